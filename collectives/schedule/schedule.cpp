#include "collectives/schedule/schedule.h"

#include <algorithm>

#include "kernels/bf16.h"
#include "kernels/error.h"

namespace gradwire {
namespace {

Schedule empty_schedule(ScheduleKind kind, int world, int rounds) {
  if (world < 1) throw BadInput("a schedule needs at least 1 rank, got " + std::to_string(world));
  Schedule s;
  s.kind = kind;
  s.world = world;
  s.chunks = world;
  s.rounds.assign(world, std::vector<Round>(world == 1 ? 0 : rounds));
  return s;
}

}  // namespace

Schedule ring(int world) {
  Schedule s = empty_schedule(ScheduleKind::ring, world, 2 * (world - 1));
  s.lossy_steps = world == 1 ? 0 : world;
  auto wrap = [world](int x) { return ((x % world) + world) % world; };
  for (int r = 0; r < world; ++r) {
    int next = wrap(r + 1), previous = wrap(r - 1);
    for (int k = 0; k < world - 1; ++k) {
      // Chunk c starts at rank c + 1 and is complete at rank c after n-1 hops.
      s.rounds[r][k] = {{Step::Kind::send, next, wrap(r - 1 - k)},
                        {Step::Kind::recv_reduce, previous, wrap(r - 2 - k)}};
      s.rounds[r][world - 1 + k] = {{Step::Kind::send, next, wrap(r - k)},
                                    {Step::Kind::recv_copy, previous, wrap(r - 1 - k)}};
    }
  }
  return s;
}

Schedule two_shot(int world) {
  Schedule s = empty_schedule(ScheduleKind::two_shot, world, 2);
  s.lossy_steps = world == 1 ? 0 : 2;
  for (int r = 0; r < world && world > 1; ++r) {
    // Starting at the right neighbour spreads the load: no rank is everybody's first peer.
    for (int k = 1; k < world; ++k) {
      int to = (r + k) % world, from = (r + world - k) % world;
      s.rounds[r][0].push_back({Step::Kind::send, to, to});
      s.rounds[r][0].push_back({Step::Kind::recv_reduce, from, r});
      s.rounds[r][1].push_back({Step::Kind::send, to, r});
      s.rounds[r][1].push_back({Step::Kind::recv_copy, from, from});
    }
  }
  return s;
}

ChunkRange chunk_range(int64_t count, int chunks, int chunk, int64_t granularity) {
  int64_t units = (count + granularity - 1) / granularity;
  auto edge = [&](int64_t c) { return std::min(count, units * c / chunks * granularity); };
  return {edge(chunk), edge(chunk + 1)};
}

int64_t elements_sent(const Schedule& schedule, int rank, int64_t count) {
  int64_t sent = 0;
  for (const Round& round : schedule.rounds[rank]) {
    for (const Step& step : round) {
      if (step.kind == Step::Kind::send) sent += chunk_range(count, schedule.chunks, step.chunk).count();
    }
  }
  return sent;
}

Schedule make_schedule(ScheduleKind kind, int world, Wire wire, std::string* reason) {
  auto because = [&](const std::string& text) {
    if (reason) *reason = text;
  };
  constexpr int kMostTwoShot = kMaxHopInputs + 1;
  switch (kind) {
    case ScheduleKind::automatic:
      if (world > kMostTwoShot) {
        because("more than " + std::to_string(kMostTwoShot) + " ranks");
        return ring(world);
      }
      because(wire == Wire::fp32
                  ? "2 rounds instead of the ring's " + std::to_string(2 * (world - 1)) + ", same bytes"
                  : "2 lossy steps instead of the ring's " + std::to_string(world) + ", same bytes");
      return two_shot(world);
    case ScheduleKind::ring:
      because("asked for");
      return ring(world);
    case ScheduleKind::two_shot:
      if (world > kMostTwoShot) {
        throw BadInput("schedule=two_shot serves at most " + std::to_string(kMostTwoShot) + " ranks, not " +
                       std::to_string(world) + "; use schedule=ring");
      }
      because("asked for");
      return two_shot(world);
    case ScheduleKind::tree:
    case ScheduleKind::hierarchical:
      break;
  }
  throw BadInput(std::string("schedule=") + name(kind) + " is not built yet; use ring or two_shot");
}

}  // namespace gradwire
