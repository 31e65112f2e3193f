// The result of a hierarchical allreduce with a two-shot between the nodes, computed with a format's scalar
// references.
#pragma once

#include "tests/kernels/two_shot.h"

namespace gradwire::testing {

// Returns the result of a hierarchical allreduce, as two_shot_reference() does for a two-shot. There is one
// chunk per rank: chunk l * nodes + b belongs to local rank l of node b.
inline TwoShotResult hierarchical_reference(const TwoShot& t, int nodes) {
  const int world = static_cast<int>(t.inputs.size()), per_node = world / nodes;
  TwoShotResult r{.result = std::vector<float>(t.inputs[0].size()), .residuals = t.residuals};
  for (int c = 0; c < world; ++c) {
    const int local = c / nodes, owner = c % nodes * per_node + local;
    const int64_t begin = t.begin[c], count = t.begin[c + 1] - begin;
    std::vector<std::vector<std::byte>> wires(world,
                                              std::vector<std::byte>(4 * count + t.wire->bytes(count) + 16));
    const auto encode = [&](int rank, const std::vector<int>& from) {
      ReduceEncode a;
      a.own = t.inputs[rank].data() + begin;
      a.residual = t.residuals.empty() ? nullptr : r.residuals[rank].data() + begin;
      a.count = count;
      a.rounding = {t.mode, t.seeds[rank], &t.step, t.first_element + begin};
      a.wire = wires[rank].data();
      for (int other : from)
        a.inputs[a.num_inputs++] = wires[other].data(), a.own_position += other < rank ? 1 : 0;
      t.wire->reference_reduce_encode(a);
    };
    const auto add = [&](int rank, const std::vector<int>& from, float* out, float scale) {
      Reduce a{.own = t.inputs[rank].data() + begin, .out = out, .scale = scale, .count = count};
      for (int other : from) {
        const bool part = other / per_node == rank / per_node;  // values from the same node are unencoded
        a.inputs[a.num_inputs++] =
            part ? t.inputs[other].data() + begin : reinterpret_cast<const float*>(wires[other].data());
        a.own_position += other < rank ? 1 : 0;
      }
      reference::fp32_reduce(a);
    };
    std::vector<int> at_owner;  // ranks whose values or node sums the owner adds
    for (int node = 0; node < nodes; ++node) {
      const int middle = node * per_node + local;
      std::vector<int> inside;
      for (int rank = node * per_node; rank < (node + 1) * per_node; ++rank) {
        if (rank == middle) continue;
        inside.push_back(rank);
        if (!t.wire->exact) encode(rank, {});
      }
      if (middle == owner) {
        at_owner.insert(at_owner.end(), inside.begin(), inside.end());
        continue;
      }
      t.wire->exact ? add(middle, inside, reinterpret_cast<float*>(wires[middle].data()), 1.0f)
                    : encode(middle, inside);
      at_owner.push_back(middle);
    }
    float* const out = r.result.data() + begin;
    if (t.wire->exact) {
      add(owner, at_owner, out, t.scale);
      continue;
    }
    encode(owner, at_owner);
    t.wire->reference_decode({.wire = wires[owner].data(), .out = out, .scale = t.scale, .count = count});
  }
  return r;
}

}  // namespace gradwire::testing
