// The result, on every rank, of a two-shot allreduce by messages, computed with a format's scalar references.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/wire/fp32.h"
#include "kernels/wire/fused.h"

namespace gradwire::testing {

struct TwoShot {
  Wire wire = kFp32;
  std::vector<std::vector<float>> inputs, residuals;  // [rank][element]; residuals may be empty
  std::vector<int64_t> begin;                         // start of each rank's chunk, and end of the last chunk
  float scale = 1.0f;
  Rounding mode = Rounding::nearest;
  std::vector<uint64_t> seeds;  // [rank]
  uint64_t step = 0;
  int64_t first_element = 0;
};

struct TwoShotResult {
  std::vector<float> result;  // equal on all ranks
  std::vector<std::vector<float>> residuals;
};

inline TwoShotResult two_shot_reference(const TwoShot& t) {
  const int world = static_cast<int>(t.inputs.size());
  TwoShotResult r{.result = std::vector<float>(t.inputs[0].size()), .residuals = t.residuals};
  const float part_scale = part_scale_for(t.scale), scale = t.scale / part_scale;
  const auto arguments = [&](int rank, int c) {
    const auto begin = static_cast<size_t>(t.begin[c]);
    ReduceEncode a;
    a.own = t.inputs[rank].data() + begin;
    a.residual = t.residuals.empty() ? nullptr : r.residuals[rank].data() + begin;
    a.count = t.begin[c + 1] - t.begin[c];
    a.rounding = {t.mode, t.seeds[rank], &t.step, t.first_element + t.begin[c]};
    return a;
  };
  for (int c = 0; c < world; ++c) {
    const auto count = t.begin[c + 1] - t.begin[c];
    std::vector<std::vector<std::byte>> wires(world, std::vector<std::byte>(t.wire->bytes(count) + 16));
    float* const out = r.result.data() + t.begin[c];
    if (t.wire->exact) {
      Reduce sum{.own = t.inputs[c].data() + t.begin[c],
                 .out = out,
                 .own_scale = part_scale,
                 .scale = scale,
                 .count = count};
      for (int rank = 0; rank < world; ++rank) {
        if (rank == c) continue;
        sum.input_scales.of[sum.num_inputs] = part_scale;
        sum.inputs[sum.num_inputs++] = t.inputs[rank].data() + t.begin[c];
      }
      sum.own_position = c;
      reference::fp32_reduce(sum);
      continue;
    }
    ReduceEncode sum = arguments(c, c);
    for (int rank = 0; rank < world; ++rank) {
      if (rank == c) continue;
      ReduceEncode part = arguments(rank, c);
      part.wire = wires[rank].data();
      t.wire->reference_reduce_encode(part);
      sum.input_scales.of[sum.num_inputs] = part_scale;
      sum.inputs[sum.num_inputs++] = part.wire;
    }
    sum.own_scale = part_scale;
    sum.own_position = c;
    sum.wire = wires[c].data();
    t.wire->reference_reduce_encode(sum);
    t.wire->reference_decode({.wire = sum.wire, .out = out, .scale = scale, .count = count});
    for (int rank = 0; rank < world && !t.residuals.empty(); ++rank) {
      if (rank == c) continue;
      t.wire->reference_decode({.wire = sum.wire,
                                .out = out,
                                .scale = scale,
                                .count = count,
                                .residual = r.residuals[rank].data() + t.begin[c]});
    }
  }
  return r;
}

}  // namespace gradwire::testing
