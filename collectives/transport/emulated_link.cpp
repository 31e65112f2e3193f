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
constexpr double kMostBurst = 1e9;   // in bytes
constexpr double kMostTime = 1e15;   // until the rate changes, in nanoseconds
constexpr std::string_view kThen = ",then=";

struct Unit {
  const char* name;
  double factor;
};
constexpr std::array<Unit, 4> kRates{{{"Tbit", 1e12}, {"Gbit", 1e9}, {"Mbit", 1e6}, {"kbit", 1e3}}};
constexpr std::array<Unit, 3> kDelays{{{"s", 1e9}, {"ms", 1e6}, {"us", 1e3}}};
constexpr std::array<Unit, 4> kSizes{{{"MiB", 1 << 20}, {"MB", 1e6}, {"KiB", 1 << 10}, {"kB", 1e3}}};

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
  std::array<std::string_view, 3> parts;
  const std::string_view whole = text;
  const size_t change = whole.find(kThen);
  const std::string_view all = whole.substr(0, change);
  size_t count = 0;
  for (size_t at = 0; at <= all.size(); ++count) {
    const size_t comma = count + 1 < parts.size() ? std::min(all.find(',', at), all.size()) : all.size();
    parts[count] = all.substr(at, comma - at);
    at = comma + 1;
  }
  const auto checked = [&](std::string_view part, const auto& units, double least, double most,
                           const char* what) {
    const auto number = value_of(part, units);
    if (number && *number >= least && *number <= most) return *number;
    throw BadInput(
        fmt::format("--link {}: '{}' is not {}; write RATE[,DELAY][,then=RATE@TIME], such as "
                    "100Mbit, 1Gbit,20ms or 1Gbit,then=100Mbit@20s",
                    text, part, what));
  };
  const auto value = [&](size_t part, const auto& units, double least, double most, const char* what) {
    return checked(parts[part], units, least, most, what);
  };
  constexpr const char* kRate = "a rate from 100kbit to 1Tbit";
  EmulatedLink link{.bits_per_s = value(0, kRates, kLeastRate, kMostRate, kRate)};
  if (count > 1) {
    link.delay =
        std::chrono::nanoseconds(std::llround(value(1, kDelays, 0, kMostDelay, "a delay from 0us to 10s")));
  }
  if (count > 2)
    link.burst = static_cast<size_t>(value(2, kSizes, 0, kMostBurst, "a burst from 0kB to 1000MB"));
  if (change != whole.npos) {
    const std::string_view then = whole.substr(change + kThen.size());
    const size_t at = std::min(then.find('@'), then.size());
    link.then_bits_per_s = checked(then.substr(0, at), kRates, kLeastRate, kMostRate, kRate);
    link.then_after = std::chrono::nanoseconds(std::llround(checked(
        then.substr(std::min(at + 1, then.size())), kDelays, 0, kMostTime, "a time from 0s to 1000000s")));
  }
  return link;
}

std::string EmulatedLink::to_string() const {
  std::string text = text_of_value(bits_per_s, kRates);
  if (delay.count() > 0 || burst > 0) {
    text += fmt::format(",{}", text_of_value(static_cast<double>(delay.count()), kDelays));
  }
  if (burst > 0) {
    text += burst % 1024 == 0 ? fmt::format(",{}KiB", burst / 1024)
                              : fmt::format(",{}kB", static_cast<double>(burst) / 1e3);
  }
  if (then_bits_per_s > 0) {
    text += fmt::format("{}{}@{}", kThen, text_of_value(then_bits_per_s, kRates),
                        text_of_value(static_cast<double>(then_after.count()), kDelays));
  }
  return text;
}

double EmulatedLink::payload_bytes_per_us() const {
  return bits_per_s / 8e6 * kPacketPayload / (kPacketPayload + kPacketHeaders);
}

double EmulatedLink::bits_per_s_at(std::chrono::steady_clock::time_point time) const {
  const bool changed =
      then_bits_per_s > 0 && since != std::chrono::steady_clock::time_point{} && time >= since + then_after;
  return changed ? then_bits_per_s : bits_per_s;
}

bool EmulatedLink::between(int a, int b) const {
  return ranks_per_node < 2 || a / ranks_per_node != b / ranks_per_node;
}

}  // namespace gradwire
