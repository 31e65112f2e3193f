// Parsing of numbers from text, and of variables that are 0 or 1.
#include "runtime/util/parse.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>

#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

template <typename T>
void expect_read_back(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  if (value != value || value - value != T{}) return;  // NaN or infinite
  const std::string text = fmt::format("{}", value);
  EXPECT_EQ(parse_number<T>(text), value) << text;
  EXPECT_EQ(parse_number<T>(text, value, value), value) << text;
  for (const char* more : {" ", "x", ",", "-", "\n"}) {
    EXPECT_FALSE(parse_number<T>(text + more)) << text << more;
    EXPECT_FALSE(parse_number<T>(more + text + more)) << text << more;
  }
}

TEST(ParseNumber, ReadsBackWhatIsPrintedAndNothingLonger) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t bits = random() >> random() % 64;
    expect_read_back<int32_t>(bits);
    expect_read_back<int64_t>(bits);
    expect_read_back<uint64_t>(bits);
    expect_read_back<float>(bits);
    expect_read_back<double>(bits);
  }
}

TEST(ParseNumber, RejectsWhatIsNotANumberOrOutsideOfItsRange) {
  for (const char* text : {"", " ", "+1", " 1", "0x10", "1e3", "1.5", "-", "one", "99999999999999999999"})
    EXPECT_FALSE(parse_number<int>(text)) << text;
  for (const char* text : {"", "nan", "inf", "-inf", "1e999", "1,5"})
    EXPECT_FALSE(parse_number<double>(text)) << text;
  EXPECT_FALSE(parse_number<uint64_t>("-1"));
  for (int value = -3; value <= 3; ++value)
    EXPECT_EQ(parse_number(fmt::to_string(value), -1, 2).has_value(), -1 <= value && value <= 2) << value;
}

TEST(ParsePair, ReadsTwoNumbersAroundOneSeparator) {
  EXPECT_EQ(parse_pair("3:10", ':', 0), (std::pair{3, 10}));
  EXPECT_EQ(parse_pair("20000-20100", '-', 1), (std::pair{20000, 20100}));
  for (const char* text : {"", ":", "3", "3:", ":3", "3:4:5", "-1:3", "3:-1", " 3:4", "3 :4"})
    EXPECT_FALSE(parse_pair(text, ':', 0)) << text;
}

TEST(EnvironmentFlag, IsZeroOrOneAndNothingElse) {
  auto flag = [](const char* value) {
    return environment_flag("GRADWIRE_ANY", [value](const char*) { return value; });
  };
  EXPECT_FALSE(flag(nullptr));
  EXPECT_FALSE(flag(""));
  EXPECT_FALSE(flag("0"));
  EXPECT_TRUE(flag("1"));
  for (const char* value : {"yes", "true", "01", "1 ", "2", "-1"})
    EXPECT_THROW(flag(value), BadInput) << value;
}

}  // namespace
}  // namespace gradwire
