// The FP32 wire format: a sum whose order is part of the contract.
#include "kernels/wire/fp32.h"

#include <cstring>

#include "tests/kernels/backend.h"

namespace gradwire {
namespace {

using testing::Array;

class Fp32 : public testing::OpTest {};

TEST_P(Fp32, ReduceHasTheReferencesBits) {
  uint32_t seed = 0;
  auto sizes = testing::awkward_sizes();
  sizes.push_back(70001);
  for (int64_t n : sizes) {
    for (int inputs : {0, 1, 2, 7, 64}) {
      if (inputs == 64 && n > 2000) continue;
      int own = inputs / 2, shift = inputs == 2 ? 1 : inputs == 7 ? 4 : 0;
      auto start = normal(n, ++seed);
      auto acc = array(start, shift);
      Fp32Reduce args{
          .num_inputs = inputs, .own_position = own, .acc = acc.data(), .scale = 0.3f, .count = n};
      auto want = start;
      auto reference_args = args;
      reference_args.acc = want.data();
      std::vector<std::vector<float>> values;
      std::vector<Array<float>> arrays;
      for (int k = 0; k < inputs; ++k) {
        values.push_back(normal(n, ++seed, k % 2 == 0 ? 1.0f : 1e6f));
        if (n > 40) values.back()[39] = std::numeric_limits<float>::infinity();
        arrays.push_back(array(values.back(), inputs == 7 ? k : shift));
      }
      for (int k = 0; k < inputs; ++k) {
        args.inputs[k] = arrays[k].data();
        reference_args.inputs[k] = values[k].data();
      }
      reference::fp32_reduce(reference_args);
      GW_RUN(fp32_reduce, args);
      auto got = acc.host();
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(memcmp(&got[i], &want[i], sizeof(float)), 0)
            << "n " << n << " inputs " << inputs << " element " << i << ": " << got[i] << " != " << want[i];
      }
      acc.expect_guards_intact("acc");
    }
  }
}

GW_INSTANTIATE_BACKENDS(Fp32);

}  // namespace
}  // namespace gradwire
