// Encodes and decodes difficult arrays for wire_oracle_test.py, in every wire format with many options.
// Writes for each array: the length of the spec and the spec, the number of values, the number of bytes, the
// bytes, and the decoded values.
//
// Usage: wire_oracle OUTPUT
#include <fmt/format.h>

#include <cmath>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "kernels/wire/format.h"
#include "runtime/device/device.h"
#include "tests/oracles/binary_io.h"
#include "tests/support/normal.h"

namespace gradwire {
namespace {

// Returns the format's specs with each value of each option, and with each pair of options.
std::vector<std::string> variants(Wire entry) {
  std::vector<std::string> all = {entry->name};
  const auto copy = entry->copy();
  if (copy == nullptr) return all;
  for (const FormatOption& option : copy->choices()) {
    const int most = option.words.empty() ? option.most : static_cast<int>(option.words.size()) - 1;
    const size_t before = all.size();
    for (int value = option.least; value <= most;) {
      *option.value = value;
      for (size_t i = 0; i < before; ++i) {
        all.push_back(
            fmt::format("{}{}{}={}", all[i], all[i] == entry->name ? ":" : ",", option.key, option.text()));
      }
      if (option.words.empty() && option.most > 100) {
        value = value < option.most / 4 ? option.most / 4 : 2 * value;
      } else {
        ++value;
        if (option.power_of_two) value = 2 * (value - 1);
      }
    }
  }
  return all;
}

std::vector<float> values_for(int64_t count, uint32_t seed) {
  std::vector<float> x = testing::normal(count, seed);
  for (size_t i = 0; i < x.size(); ++i) {
    if (seed % 4 == 1) x[i] *= std::exp2(static_cast<float>(static_cast<int>(i * 7 % 41) - 20));
    if (seed % 4 == 2) x[i] *= i % 5 == 0 ? 1e30f : 1e-38f;
    if (i % 11 == 3) x[i] = i % 2 == 0 ? 0.0f : -0.0f;
    if (seed % 4 == 3 && i % 97 == 5) x[i] = std::numeric_limits<float>::quiet_NaN();
    if (seed % 4 == 3 && i % 203 == 17) x[i] = -std::numeric_limits<float>::infinity();
  }
  return x;
}

void run(const char* path) {
  const Stream stream = Stream::immediate_host();
  oracle::Writer out(path);
  uint32_t seed = 0;
  for (Wire entry : wire_formats()) {
    if (entry->exact) continue;
    for (const std::string& spec : variants(entry)) {
      Wire format = nullptr;
      try {
        format = wire_format(spec);
        if (!format->problem().empty()) continue;
      } catch (const std::exception&) {
        continue;  // incompatible options
      }
      for (int64_t count : {1, 5, 33, 127, 513, 4133}) {
        const std::vector<float> x = values_for(count, ++seed);
        std::vector<uint8_t> wire(format->bytes(count));
        std::vector<float> decoded(x.size());
        const auto mode = seed % 3 == 0 ? Rounding::stochastic : Rounding::nearest;
        format->reduce_encode(
            stream,
            {.own = x.data(), .wire = wire.data(), .count = count, .rounding = {.mode = mode, .seed = seed}});
        format->decode(stream, {.wire = wire.data(), .out = decoded.data(), .count = count});
        const int64_t head[] = {static_cast<int64_t>(spec.size()), count, static_cast<int64_t>(wire.size())};
        out.write(head, 3);
        out.write(spec.data(), head[0]);
        out.write(wire.data(), head[2]);
        out.write(decoded.data(), count);
      }
    }
  }
  out.close();
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    gradwire::run(argv[1]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "wire_oracle: {}\n", error.what());
    return 1;
  }
  return 0;
}
