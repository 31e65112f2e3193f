// The FP32 wire format, a sum whose order is part of the contract.
#include "kernels/wire/floats.h"

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
    for (int num_inputs : {0, 1, 2, 7, 64}) {
      if (num_inputs == 64 && n > 2000) continue;
      for (int place = 0; place < 3; ++place) {  // the output array: a new array, `own`, or an input
        if (place == 2 && num_inputs == 0) continue;
        if (n == 70001 && place != num_inputs % 3) continue;
        int shift = num_inputs == 2 ? 1 : num_inputs == 7 ? 4 : 0;
        auto start = normal(n, ++seed);
        auto own = array(start, shift), out = array<float>(n, shift);
        std::vector<float> want(start.size());
        Reduce args{
            .num_inputs = num_inputs, .own_position = num_inputs / 2, .own = own.data(), .scale = 0.3f};
        args.count = n;
        if (place != 0) {  // scales of an average, where the sums of other nodes have scale 1
          args.own_scale = 0.125f;
          for (int k = 0; k < num_inputs; k += 2) args.input_scales.of[k] = 0.125f;
        }
        auto reference_args = args;
        reference_args.own = start.data();
        reference_args.out = want.data();
        std::vector<std::vector<float>> values;
        std::vector<Array<float>> arrays;
        for (int k = 0; k < num_inputs; ++k) {
          values.push_back(normal(n, ++seed, k % 2 == 0 ? 1.0f : 1e6f));
          if (n > 40) values.back()[39] = std::numeric_limits<float>::infinity();
          arrays.push_back(array(values.back(), num_inputs == 7 ? k : shift));
        }
        for (int k = 0; k < num_inputs; ++k) {
          args.inputs[k] = arrays[k].data();
          reference_args.inputs[k] = values[k].data();
        }
        const Array<float>& result = place == 0 ? out : place == 1 ? own : arrays.back();
        args.out = result.data();
        reference::fp32_reduce(reference_args);
        GW_RUN(fp32_reduce, args);
        auto got = result.host();
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(memcmp(&got[i], &want[i], sizeof(float)), 0)
              << "n " << n << " inputs " << num_inputs << " element " << i << ": " << got[i]
              << " != " << want[i];
        }
        result.expect_guards_intact("out");
        if (place != 1) {
          EXPECT_EQ(own.host(), start) << "own is read only";
        }
      }
    }
  }
}

GW_INSTANTIATE_BACKENDS(Fp32);

}  // namespace
}  // namespace gradwire
