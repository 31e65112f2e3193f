#include "collectives/transport/emulated_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <optional>
#include <string_view>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

constexpr double kLeastRate = 1e5, kMostRate = 1e12;
constexpr double kMostDelay = 10e9;  // in nanoseconds

struct Unit {
  const char* name;
  double factor;
};
constexpr std::array<Unit, 4> kRates{{{"Tbit", 1e12}, {"Gbit", 1e9}, {"Mbit", 1e6}, {"kbit", 1e3}}};
constexpr std::array<Unit, 3> kDelays{{{"s", 1e9}, {"ms", 1e6}, {"us", 1e3}}};

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

// Returns the value of a number with a unit; nullopt if the text is anything else.
template <size_t N>
std::optional<double> value_of(std::string_view text, const std::array<Unit, N>& units) {
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  for (const Unit& unit : units) {
    if (!same_word(text.substr(digits), unit.name)) continue;
    const auto number = parse_number<double>(text.substr(0, digits), 0.0, 1e9);
    if (number) return *number * unit.factor;
  }
  return {};
}

template <size_t N>
std::string text_of_value(double value, const std::array<Unit, N>& units) {
  const auto fits =
      std::find_if(units.begin(), units.end() - 1, [&](const Unit& u) { return value >= u.factor; });
  return fmt::format("{}{}", value / fits->factor, fits->name);
}

}  // namespace

EmulatedLink EmulatedLink::parse(const std::string& text) {
  const size_t comma = std::min(text.find(','), text.size());
  const auto rate = value_of(std::string_view(text).substr(0, comma), kRates);
  if (!rate || *rate < kLeastRate || *rate > kMostRate) {
    throw BadInput(fmt::format(
        "--link {}: '{}' is not a rate from 100kbit to 1Tbit; write RATE[,DELAY], such as 100Mbit "
        "or 1Gbit,20ms",
        text, text.substr(0, comma)));
  }
  EmulatedLink link{.bits_per_s = *rate};
  if (comma == text.size()) return link;
  const auto delay = value_of(std::string_view(text).substr(comma + 1), kDelays);
  if (!delay || *delay > kMostDelay) {
    throw BadInput(
        fmt::format("--link {}: '{}' is not a delay from 0us to 10s; write RATE[,DELAY], such as 1Gbit,20ms",
                    text, text.substr(comma + 1)));
  }
  link.delay = std::chrono::nanoseconds(std::llround(*delay));
  return link;
}

std::string EmulatedLink::to_string() const {
  const std::string rate = text_of_value(bits_per_s, kRates);
  if (delay.count() == 0) return rate;
  return fmt::format("{},{}", rate, text_of_value(static_cast<double>(delay.count()), kDelays));
}

double EmulatedLink::payload_bytes_per_us() const {
  return bits_per_s / 8e6 * kPacketPayload / (kPacketPayload + kPacketHeaders);
}

bool EmulatedLink::between(int a, int b) const {
  return ranks_per_node < 2 || a / ranks_per_node != b / ranks_per_node;
}

}  // namespace gradwire
