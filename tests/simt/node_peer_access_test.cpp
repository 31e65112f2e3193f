// Hierarchical allreduces whose ranks read each other's memory inside nodes (collectives/program/program.h),
// on the CPU. The kernels of all ranks run concurrently, and their results equal those of a hierarchical
// schedule by messages bit for bit. Transfers between nodes are copies that wait for all kernels. Inside a
// node, kernels wait only for their barrier.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/wire/formats.h"
#include "kernels/wire/fused.h"
#include "tests/kernels/hierarchical.h"
#include "tests/simt/peer_group.h"
#include "tests/simt/runtime.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

struct NodeCase {
  Wire wire = kFp32;
  int nodes = 1, per_node = 2;
  int64_t count = 100;
  bool residual = true;
  Rounding mode = Rounding::nearest;
  int calls = 1;  // number of successive calls on the same peer memory
  int world() const { return nodes * per_node; }
};

class InNodes {
 public:
  explicit InNodes(const NodeCase& c) : c_(c), step_(7) {
    const int64_t grain = c.wire->granularity, blocks = (c.count + grain - 1) / grain;
    for (int r = 0; r <= c.world(); ++r) begin_.push_back(std::min(c.count, blocks * r / c.world() * grain));
    int64_t half_bytes = 0;
    for (int chunk = 0; chunk < c.world(); ++chunk) {
      places_.push_back(half_bytes);
      half_bytes += (c.wire->bytes(count(chunk)) + 255) / 256 * 256;
    }
    for (int node = 0; node < c.nodes; ++node) groups_.emplace_back(c.per_node, half_bytes);
    half_bytes_ = half_bytes;
    for (int call = 0; call < c.calls; ++call) {
      TwoShot& t = plans_.emplace_back();
      t.wire = c.wire;
      t.begin = begin_;
      t.scale = 1.0f / static_cast<float>(c.world());
      t.mode = c.mode;
      t.step = step_;
      t.first_element = 40 * call;
      for (int r = 0; r < c.world(); ++r) {
        t.inputs.push_back(values(c.count, static_cast<uint32_t>(100 * call + r), 8.0f));
        if (c.residual)
          t.residuals.push_back(values(c.count, static_cast<uint32_t>(100 * call + r + 50), 0.1f));
        t.seeds.push_back(static_cast<uint64_t>(r) * 77 + 5);
      }
      data_.push_back(t.inputs);
      kept_.push_back(t.residuals);
    }
    mail_.resize(static_cast<size_t>(c.world()));
    for (auto& of_rank : mail_) {
      for (int chunk = 0; chunk < c.world(); ++chunk)
        of_rank.emplace_back(static_cast<size_t>(c.wire->bytes(count(chunk))) / 16 + 1);
    }
  }

  void run() {
    if (c_.nodes == 1) {  // a single node sends no messages: one launch makes all calls
      launch([&](int r) {
        for (int call = 0; call < c_.calls; ++call) {
          parts(r, call);
          meet(r);
          sum(r, r, call);
          meet(r);
          results(r, call);
        }
      });
      return;
    }
    for (int call = 0; call < c_.calls; ++call) {
      launch([&](int r) {
        parts(r, call);
        meet(r);
        for (int b = 0; b < c_.nodes; ++b) {
          if (b != node(r)) sum(r, local(r) * c_.nodes + b, call);
        }
      });
      launch([&](int r) { sum(r, local(r) * c_.nodes + node(r), call); });
      for (int r = 0; r < c_.world(); ++r) {
        for (int b = 0; b < c_.nodes; ++b) {
          const int chunk = local(r) * c_.nodes + b;
          if (b != node(r))
            std::memcpy(window(r, 1, chunk), window(owner(chunk), 1, chunk),
                        static_cast<size_t>(c_.wire->bytes(count(chunk))));
        }
      }
      launch([&](int r) {
        meet(r);
        results(r, call);
      });
    }
  }

  void expect_bits() {
    for (int call = 0; call < c_.calls; ++call) {
      const TwoShotResult expected = hierarchical_reference(plans_[call], c_.nodes);
      for (int r = 0; r < c_.world(); ++r) {
        SCOPED_TRACE(fmt::format("call {} rank {}", call, r));
        ASSERT_TRUE(same(data_[call][r], expected.result));
        if (c_.residual && !c_.wire->exact) {
          ASSERT_TRUE(same(kept_[call][r], expected.residuals[r]));
        }
      }
    }
  }

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
  template <typename Enqueue>
  void launch(Enqueue enqueue) {
    simt::Together together(c_.world());
    for (int r = 0; r < c_.world(); ++r) {
      together.rank(r);
      enqueue(r);
    }
    together.run();
  }

  int node(int rank) const { return rank / c_.per_node; }
  int local(int rank) const { return rank % c_.per_node; }
  int owner(int chunk) const { return chunk % c_.nodes * c_.per_node + chunk / c_.nodes; }
  int64_t count(int chunk) const { return begin_[chunk + 1] - begin_[chunk]; }
  std::byte* window(int rank, int half, int chunk) {
    return groups_[node(rank)].peers[local(rank)].windows[local(rank)] + kPeerHeaderBytes +
           half * half_bytes_ + places_[chunk];
  }
  float* data(int rank, int chunk, int call) { return data_[call][rank].data() + begin_[chunk]; }
  static void copy(float* to, const float* from, int64_t count) {
    cuda::fp32_reduce(nullptr, Reduce{.own = from, .out = to, .count = count});
  }
  ReduceEncode arguments(int rank, int chunk, int call) {
    ReduceEncode a;
    a.own = data(rank, chunk, call);
    a.residual = c_.residual ? kept_[call][rank].data() + begin_[chunk] : nullptr;
    a.count = count(chunk);
    a.rounding = {c_.mode, plans_[call].seeds[rank], &step_, plans_[call].first_element + begin_[chunk]};
    return a;
  }

  void meet(int rank) {
    kFp32->fused_allreduce(Stream(), stream_barrier(groups_[node(rank)].peers[local(rank)]));
  }
  // Encodes this rank's values in the shards of the node's other ranks.
  void parts(int rank, int call) {
    for (int chunk = 0; chunk < c_.world(); ++chunk) {
      if (chunk / c_.nodes == local(rank)) continue;
      std::byte* const to = window(rank, 0, chunk);
      if (c_.wire->exact) {
        copy(reinterpret_cast<float*>(to), data(rank, chunk, call), count(chunk));
        continue;
      }
      ReduceEncode a = arguments(rank, chunk, call);
      a.wire = to;
      c_.wire->reduce_encode(Stream(), a);
    }
  }
  // Adds up a chunk of this rank's shard over the node or, on the owner, over all ranks.
  void sum(int rank, int chunk, int call) {
    const bool final = owner(chunk) == rank;
    std::vector<std::pair<int, const void*>> from;
    for (int other = 0; other < c_.world(); ++other) {
      if (other == rank) continue;
      if (node(other) == node(rank)) {
        from.emplace_back(other, window(other, 0, chunk));
      } else if (final && local(other) == local(rank)) {
        from.emplace_back(other, mail_[other][chunk].data());
      }
    }
    const auto add_inputs = [&](auto& a) {
      for (const auto& [other, wire] : from) {
        a.inputs[a.num_inputs++] = static_cast<std::remove_reference_t<decltype(a.inputs[0])>>(wire);
        a.own_position += other < rank ? 1 : 0;
      }
    };
    std::byte* const to = final ? window(rank, 1, chunk) : mail_[rank][chunk].data()->bytes;
    float* const out = data(rank, chunk, call);
    if (c_.wire->exact) {
      Reduce a{.own = out,
               .out = final ? out : reinterpret_cast<float*>(to),
               .scale = final ? plans_[call].scale : 1.0f,
               .count = count(chunk)};
      add_inputs(a);
      cuda::fp32_reduce(nullptr, a);
      if (final) copy(reinterpret_cast<float*>(to), out, count(chunk));
      return;
    }
    ReduceEncode a = arguments(rank, chunk, call);
    add_inputs(a);
    a.wire = to;
    if (final) a.out = out, a.out_scale = plans_[call].scale;
    c_.wire->reduce_encode(Stream(), a);
  }
  void results(int rank, int call) {
    for (int chunk = 0; chunk < c_.world(); ++chunk) {
      if (owner(chunk) == rank) continue;
      std::byte* const from = window(node(rank) * c_.per_node + chunk / c_.nodes, 1, chunk);
      float* const out = data(rank, chunk, call);
      c_.wire->exact ? copy(out, reinterpret_cast<const float*>(from), count(chunk))
                     : c_.wire->decode(Stream(), {from, out, plans_[call].scale, count(chunk)});
    }
  }

  const NodeCase c_;
  std::vector<int64_t> begin_, places_;
  uint64_t step_;
  int64_t half_bytes_ = 0;
  std::vector<Group> groups_;                                 // by node
  std::vector<TwoShot> plans_;                                // by call
  std::vector<std::vector<std::vector<float>>> data_, kept_;  // [call][rank]
  std::vector<std::vector<std::vector<Line>>> mail_;  // [rank][chunk]: sums that a node sends to other nodes
};

void expect_hierarchical_bits(const NodeCase& c) {
  SCOPED_TRACE(fmt::format("{} {} nodes of {} count {}{}{}", c.wire->spec(), c.nodes, c.per_node, c.count,
                           c.residual ? " residual" : "",
                           c.mode == Rounding::stochastic ? " stochastic" : ""));
  InNodes ranks(c);
  ranks.run();
  ranks.expect_bits();
}

class NodePeerAccessTest : public ::testing::TestWithParam<Wire> {
 protected:
  const Wire wire = GetParam();
};

TEST_P(NodePeerAccessTest, MatchesAHierarchicalScheduleByMessagesBitForBit) {
  const int64_t grain = wire->granularity;
  const bool slow = grain > 512, variant = *wire->options != 0;
  for (const auto& [nodes, per_node] : std::vector<std::array<int, 2>>{
           {1, 2}, {1, 3}, {2, 2}, {1, 5}, {3, 2}, {2, 3}, {1, 7}, {2, 4}, {4, 2}}) {
    const int world = nodes * per_node;
    if ((variant || slow) && world != 4) continue;
    OneSchedule only(slow || world > 4);
    expect_hierarchical_bits(
        {.wire = wire,
         .nodes = nodes,
         .per_node = per_node,
         .count = slow ? 2 * grain + 5 : 2 * world * grain + 11,
         .residual = world % 3 != 0,
         .mode = wire->stochastic && world % 2 == 0 ? Rounding::stochastic : Rounding::nearest});
    if (HasFailure()) return;
  }
}

TEST_P(NodePeerAccessTest, ConsecutiveCallsDoNotWaitForSlowRanks) {
  if (wire->granularity > 512 || *wire->options != 0) return;
  expect_hierarchical_bits(
      {.wire = wire, .nodes = 1, .per_node = 3, .count = 3 * wire->granularity + 40, .calls = 4});
}

INSTANTIATE_TEST_SUITE_P(Formats, NodePeerAccessTest, ::testing::ValuesIn(example_wire_formats()),
                         [](const ::testing::TestParamInfo<Wire>& info) {
                           std::string name = info.param->spec();
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

TEST(NodePeerAccessBugs, MissingBarriersAreFound) {
  for (Wire wire : {kFp32, kBf16}) {
    const NodeCase c{.wire = wire, .nodes = 1, .per_node = 4, .count = 4000};
    InNodes(c).run();
    Unheeded planted(0);
    try {
      InNodes(c).run();
      ADD_FAILURE() << wire->name << ": not detected";
    } catch (const simt::Failure& failure) {
      expect_has(failure.what(), {"depends on the order"});
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
