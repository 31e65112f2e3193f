// Safetensors files: written data is read back, and invalid files are rejected by name.
#include "trainer/data/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/trainer/files.h"

namespace gradwire::testing {
namespace {

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string write(const std::string& header, size_t data_bytes) {
    return write_raw(header.size(), header, data_bytes);
  }
  std::string write_raw(uint64_t length, const std::string& header, size_t data_bytes) {
    std::string text(reinterpret_cast<const char*>(&length), sizeof length);
    text += header + std::string(data_bytes, '\7');
    write_bytes(path_, Bytes(text.begin(), text.end()));
    return path_;
  }
  TemporaryFolder folder_;
  const std::string path_ = folder_.path("file.safetensors");
};

TEST_F(SafetensorsTest, RoundTrips) {
  SafetensorsWriter writer(path_, {{"who", "\"me\"\n"}}, {{"a", {2, 3}}, {"empty", {0}}, {"scalar", {}}});
  const std::vector<float> values{1, 2, 3, 4, 5, -0.0f, NAN};
  writer.write({values.data(), 2});
  writer.write({values.data() + 2, 5});
  writer.finish();
  const SafetensorsReader file(path_);
  file.verify(true);
  EXPECT_EQ(file.metadata().at("who"), "\"me\"\n");
  ASSERT_NE(file.find("a"), nullptr);
  EXPECT_EQ(file.find("a")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.find("empty")->elements, 0);
  EXPECT_EQ(file.find("b"), nullptr);
  std::vector<float> back(3);
  file.read(*file.find("a"), 2, back);
  EXPECT_EQ(back, (std::vector<float>{3, 4, 5}));
  EXPECT_THROW(file.read(*file.find("a"), 4, back), Error);
  file.read(*file.find("scalar"), 0, {back.data(), 1});
  EXPECT_TRUE(std::isnan(back[0]));
  EXPECT_THROW(SafetensorsWriter(path_, {}, {}), Error) << "overwrote a file";
  SafetensorsWriter cut_short(folder_.path("short"), {}, {{"a", {2}}});
  EXPECT_THROW(cut_short.finish(), Error);
}

TEST_F(SafetensorsTest, RejectsEntriesOfEqualName) {
  const std::vector<SafetensorsWriter::Entry> entries{{"a", {2}}, {"b", {2}}, {"a", {3}}};
  expect_error<Error>([&] { SafetensorsWriter(path_, {}, entries); }, {path_, "two tensors named 'a'"});
}

TEST_F(SafetensorsTest, SeveralWritersProduceTheFileOfOne) {
  const std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8, 9};
  const std::vector<SafetensorsWriter::Entry> entries{{"a", {5}}, {"b", {2, 2}}};
  SafetensorsWriter alone(folder_.path("alone"), {}, entries);
  alone.write(values);
  alone.finish();
  SafetensorsWriter first(path_, {}, entries);
  SafetensorsWriter second(path_), third(path_);
  const std::span<const float> all(values);
  third.seek("a", 4);
  third.write(all.subspan(1, 2));
  second.write(all.subspan(0, 1));
  second.seek("b", 8);
  second.write(all.subspan(7, 2));
  third.seek("b", 0);
  third.write(all.subspan(5, 2));
  first.seek("a", 12);
  first.write(all.subspan(3, 2));
  SafetensorsWriter::Written others = second.written();
  EXPECT_THROW(first.finish(others), Error) << "the third's part is missing";
  EXPECT_THROW(first.seek("c", 0), Error);
  EXPECT_THROW(second.write(all.subspan(0, 1)), Error) << "past the end";
  others += third.written();
  second.close();
  third.close();
  first.finish(others);
  EXPECT_EQ(read_bytes(path_), read_bytes(folder_.path("alone")));
  SafetensorsReader(path_).verify(true);
}

// A linear search for each of 200,000 tensors would take minutes, here and in an --init.
TEST_F(SafetensorsTest, RoundTripsHundredsOfThousandsOfTensors) {
  std::vector<SafetensorsWriter::Entry> entries;
  std::vector<float> values;
  for (int i = 0; i < 200'000; ++i) {
    entries.push_back({std::to_string(i), {1}});
    values.push_back(static_cast<float>(i));
  }
  SafetensorsWriter writer(path_, {}, entries);
  writer.write(values);
  writer.finish();
  const SafetensorsReader file(path_);
  file.verify(true);
  EXPECT_EQ(file.tensors().size(), entries.size());
  for (size_t i = 0; i < entries.size(); i += 97) {
    float back = -1;
    file.read(*file.find(entries[i].name), 0, {&back, 1});
    ASSERT_EQ(back, values[i]);
  }
}

TEST_F(SafetensorsTest, RejectsInvalidHeaders) {
  auto tensor = [](const std::string& name, const std::string& shape, const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  struct Case {
    std::string header;
    size_t data_bytes;
    const char* why;
  };
  const std::vector<Case> cases{
      {"", 0, "not JSON"},
      {"[1]", 0, "not a JSON object"},
      {"{\"a\":", 0, "not JSON"},
      {"{\"\xff\":1}", 0, "not JSON"},
      {"{\"a\":1}", 0, "description"},
      {"{\"a\":{}}", 0, "dtype"},
      {"{\"__metadata__\":3}", 0, "__metadata__"},
      {"{\"__metadata__\":{\"k\":3}}", 0, "'k'"},
      {"{" + tensor("a", "[2]", "[0,8]") + "}", 4, "truncated"},
      {"{" + tensor("a", "[2]", "[0,8]") + "}", 12, "too long"},
      {"{" + tensor("a", "[2]", "[0,99999999999]") + "}", 8, "truncated"},
      {"{" + tensor("a", "[2]", "[8,0]") + "}", 8, "truncated or corrupt"},
      {"{" + tensor("a", "[2]", "[-8,0]") + "}", 8, "data_offsets"},
      {"{" + tensor("a", "[2]", "[0.5,8]") + "}", 8, "data_offsets"},
      {"{" + tensor("a", "[2]", "[0]") + "}", 8, "data_offsets"},
      {"{" + tensor("a", "[-2,-1]", "[0,8]") + "}", 8, "shape"},
      {"{" + tensor("a", "[3]", "[0,8]") + "}", 8, "shape of 'a'"},
      {"{" + tensor("a", "[4294967296,4294967296,4294967296]", "[0,8]") + "}", 8, "shape"},
      {"{" + tensor("a", "[4611686018427387904,4]", "[0,0]") + "}", 0, "shape"},
      {"{" + tensor("a", "[18446744073709551615]", "[0,0]") + "}", 0, "shape"},
      {"{" + tensor("a", "[1152921504606846976]", "[0,0]") + "}", 0, "shape"},
      {"{" + tensor("a", "[2]", "[0,8]") + "," + tensor("b", "[2]", "[4,12]") + "}", 12, "'b'"},
      {"{" + tensor("a", "[1]", "[0,4]") + "," + tensor("b", "[1]", "[8,12]") + "}", 12, "'b'"},
      {std::string(1 << 20, '['), 0, "not JSON"},
  };
  for (const Case& c : cases) {
    expect_bad_input([&] { SafetensorsReader(write(c.header, c.data_bytes)); }, {path_, c.why});
  }
  expect_bad_input([&] { SafetensorsReader(write_raw(~uint64_t{0}, "{}", 0)); }, {path_, "header"});
  expect_bad_input([&] { SafetensorsReader(write_raw(99'000'000, "{}", 0)); }, {path_, "header"});
  write_bytes(path_, Bytes(5));
  expect_bad_input([&] { SafetensorsReader reader(path_); }, {path_, "too short"});
  expect_bad_input([&] { SafetensorsReader(folder_.path("none")); }, {"none", "no such file"});
  expect_bad_input([&] { SafetensorsReader(folder_.path()); }, {"not a regular file"});
  // This file is valid, but was not written by Gradwire.
  const SafetensorsReader foreign(write("{" + tensor("a", "[2]", "[0,8]") + "}   ", 8));
  EXPECT_NO_THROW(foreign.verify(false));
  expect_bad_input([&] { foreign.verify(true); }, {path_, "no checksum"});
  const SafetensorsReader half(write("{\"a\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8));
  std::vector<float> out(2);
  expect_bad_input([&] { half.read(*half.find("a"), 0, out); }, {path_, "F16"});
}

}  // namespace
}  // namespace gradwire::testing
