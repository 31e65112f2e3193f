// The test suite that runs once per backend and per wire format that rounds.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <tuple>
#include <vector>

#include "tests/kernels/compare.h"
#include "tests/kernels/wire_problem.h"

namespace gradwire::testing {

// Number of values that gives more than one piece per thread. The number is smaller for kernels that run on
// the CPU, which are slow (a multiprocessor's blocks process 8192 values at a time). Sanitizer builds are
// also slow and run fewer cases.
#ifdef GRADWIRE_SIMT_TESTS
inline constexpr int64_t kManyPieces = 9001;
#else
inline constexpr int64_t kManyPieces = 70001;
#endif
#ifdef GRADWIRE_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

class WireSuite : public ::testing::TestWithParam<std::tuple<Backend, Wire>>, public WireFixture {
 public:
  WireSuite() : WireFixture(std::get<0>(GetParam())), format(std::get<1>(GetParam())) {}

  std::vector<Rounding> roundings() const {
    if (!format->stochastic) return {Rounding::nearest};
    return {Rounding::nearest, Rounding::stochastic};
  }
  WireResult run(const WireProblem& p) { return WireFixture::run(format, p); }
  // Returns encoded values of other ranks as inputs.
  std::vector<Bytes> inputs(int num_inputs, int64_t count, uint32_t seed, float spread) const {
    std::vector<Bytes> wires;
    for (int k = 0; k < num_inputs; ++k) {
      wires.push_back(
          reference_encoded(format, spread_values(count, seed + static_cast<uint32_t>(k), spread)));
    }
    return wires;
  }

  const Wire format;
};

inline std::vector<Wire> rounding_formats() {
  std::vector<Wire> formats;
  for (Wire format : example_wire_formats()) {
    if (!format->exact) formats.push_back(format);
  }
  return formats;
}

inline std::string format_label(const ::testing::TestParamInfo<std::tuple<Backend, Wire>>& info) {
  std::string name = std::get<0>(info.param).name + "_" + std::get<1>(info.param)->spec();
  std::ranges::replace_if(
      name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
  return name;
}

}  // namespace gradwire::testing

#define GW_INSTANTIATE_ON_FORMATS(Suite)                                                                     \
  INSTANTIATE_TEST_SUITE_P(On, Suite,                                                                        \
                           ::testing::Combine(::testing::ValuesIn(::gradwire::testing::backends()),          \
                                              ::testing::ValuesIn(::gradwire::testing::rounding_formats())), \
                           ::gradwire::testing::format_label)
