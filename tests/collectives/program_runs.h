// Runs one program on every rank of a group of threads: a whole allreduce or one of its halves.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

#include "collectives/program/program.h"
#include "collectives/schedule/schedule.h"
#include "tests/collectives/group.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {

using Values = std::vector<std::vector<float>>;  // [rank][element]

// Returns normal draws for each rank.
inline Values normals(int world, int64_t count, uint32_t seed, float scale = 1.0f) {
  Values all;
  for (int r = 0; r < world; ++r) all.push_back(normal(count, seed + static_cast<uint32_t>(r), scale));
  return all;
}

// Runs the program once in a new workspace. Blocks until the program has ended.
inline void run_once(Program& program, const Stream& stream) {
  Buffer workspace(stream.device(), program.workspace_bytes());
  program.bind(workspace.data());
  program.run(stream);
  stream.synchronize();
}

struct Outcome {
  Values result, residual;
  std::vector<uint64_t> bytes_sent;
};

// Runs one allreduce of inputs[rank] with residuals[rank] on `device`. Empty `residuals` disable error
// feedback.
inline Outcome allreduce(Device device, const Schedule& schedule, const Values& inputs,
                         const Values& residuals, const Program::Options& options) {
  int world = schedule.world;
  Outcome outcome;
  outcome.result.resize(world);
  outcome.residual.resize(world);
  outcome.bytes_sent.resize(world);
  run_ranks(world, device, [&](Communicator& comm) {
    int r = comm.rank();
    int64_t count = static_cast<int64_t>(inputs[r].size());
    Stream stream = Stream::create(device, "test");
    Buffer data = make_buffer<float>(device, count);
    Buffer residual = make_buffer<float>(device, residuals.empty() ? 0 : count);
    to_device(stream, data.as<float>(), std::span<const float>(inputs[r]));
    if (residual) to_device(stream, residual.as<float>(), std::span<const float>(residuals[r]));
    Stream transfers = options.slice_bytes > 0 ? Stream::create(device, "transfers") : Stream();
    Program::Options mine = options;
    mine.transfers = transfers;
    Program program(comm.transport(), schedule, {data.data(), data.as<float>(), residual.as<float>(), count},
                    mine);
    // Tests of slices require at least two slices.
    const bool sure = options.slice_bytes > 0 && options.slice_bytes <= 500 && count > 10000;
    EXPECT_TRUE(program.info().slices > 1 || !sure);
    run_once(program, stream);
    outcome.result[r] = to_host(stream, data.as<const float>(), count);
    if (residual) outcome.residual[r] = to_host(stream, residual.as<const float>(), count);
    outcome.bytes_sent[r] = comm.bytes_sent();
  });
  return outcome;
}

inline std::vector<Schedule> schedules(int world) {
  std::vector<Schedule> all = allreduces(world);
  all.push_back(pipelined(double_tree(world), 3));
  return all;
}

// Calls check(schedule, wire) for every wire and for every schedule of the given numbers of ranks.
template <typename Wires, typename Check>
void for_schedules(const std::vector<int>& worlds, const Wires& wires, const Check& check) {
  for (int world : worlds) {
    for (const Schedule& schedule : schedules(world)) {
      for (Wire wire : wires) {
        SCOPED_TRACE(fmt::format("{} of {} ranks, {}", name(schedule.kind), world, wire->name));
        check(schedule, wire);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// Sums of the ranks' inputs and outputs. A collective that conserves values has equal sums.
struct Conservation {
  double in = 0, out = 0, size = 0;
  void put(double x) { in += x, size += std::abs(x); }
};

// The buffers after half of an allreduce. Elements that the program did not write are poison.
struct HalfOutcome {
  Values in, out, residual;  // [rank]: buffers after the run
};

inline constexpr float kPoison = -1.5e33f;

// Runs a reduce_scatter of inputs[rank] (`count` elements), or an all_gather or broadcast of inputs[rank]
// (the rank's shard).
inline HalfOutcome run_half(Device device, const Schedule& schedule, int64_t count, const Values& inputs,
                            const Values& residuals, Program::Options options, const Shards& shards = {}) {
  const int world = schedule.world;
  HalfOutcome outcome;
  outcome.in.resize(world), outcome.out.resize(world), outcome.residual.resize(world);
  run_ranks(world, device, [&](Communicator& comm) {
    const int r = comm.rank();
    Stream stream = Stream::create(device, "test");
    const bool gather = schedule.collective != Collective::reduce_scatter;
    const int64_t shard = elements_owned(schedule, r, count, options.wire->granularity, shards);
    const int64_t outs = gather ? count : shard;
    ASSERT_EQ(std::ssize(inputs[r]), gather ? shard : count);
    Buffer in = make_buffer<float>(device, std::ssize(inputs[r]));
    Buffer out = make_buffer<float>(device, outs + 4);  // detects writes past the end
    const int64_t kept = gather ? shard : count;
    Buffer residual = make_buffer<float>(device, residuals.empty() ? 0 : kept);
    to_device(stream, in.as<float>(), std::span<const float>(inputs[r]));
    ASSERT_TRUE(residuals.empty() || std::ssize(residuals[r]) == kept);
    const std::vector<float> poison(outs + 4, kPoison);
    to_device(stream, out.as<float>(), std::span<const float>(poison));
    if (residual) to_device(stream, residual.as<float>(), std::span<const float>(residuals[r]));
    Program::Options mine = options;
    if (options.slice_bytes > 0) mine.transfers = Stream::create(device, "transfers");
    Program program(comm.transport(), schedule,
                    {in.data(), out.data(), residual.as<float>(), count, DType::f32, shards}, mine);
    run_once(program, stream);
    outcome.in[r] = to_host(stream, in.as<const float>(), std::ssize(inputs[r]));
    outcome.out[r] = to_host(stream, out.as<const float>(), outs + 4);
    if (residual) outcome.residual[r] = to_host(stream, residual.as<const float>(), kept);
    EXPECT_EQ(std::vector<float>(outcome.out[r].end() - 4, outcome.out[r].end()),
              std::vector<float>(4, kPoison));
    outcome.out[r].resize(static_cast<size_t>(outs));
  });
  return outcome;
}

// Returns a rank's shard of a whole buffer.
inline std::vector<float> shard_of(const Schedule& s, int rank, const std::vector<float>& whole,
                                   int64_t granularity) {
  std::vector<float> shard;
  for (int c = 0; c < s.chunks; ++c) {
    if (s.owner[c] != rank) continue;
    const ElementRange range = chunk_range(std::ssize(whole), s.chunks, c, granularity);
    shard.insert(shard.end(), whole.begin() + range.begin, whole.begin() + range.end);
  }
  return shard;
}

}  // namespace gradwire::testing
