// Schedules are data: for each rank, rounds of transfers that add up to an allreduce. No schedule touches
// memory or a wire; one executor runs them all, one checker proves them all, one planner simulates them.
//
// The buffer is cut into `chunks` parts. In each round a rank's transfers progress together; a round starts
// when the one before is done on this rank. The three kinds:
//   send c to p              what this rank holds of chunk c: its partial sum, or the final value
//   recv_reduce c from p     a contribution: it joins this rank's partial sum of c
//   recv_copy c from p       the final value of c
// A rank's partial sum of c is closed by its first send of c. Nothing may join after that. Who closes c and
// never gets a recv_copy of it is c's owner: what it sends is final.
//
// Rounding order is part of a schedule's meaning: when a partial sum is closed, its parts are added in FP32
// in ascending order of the source rank, this rank's own part at its own place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/codec/spec.h"

namespace gradwire {

struct Step {
  enum class Kind : uint8_t { send, recv_reduce, recv_copy };
  Kind kind = Kind::send;
  int32_t peer = 0;
  int32_t chunk = 0;
  bool operator==(const Step&) const = default;
};

using Round = std::vector<Step>;

struct Schedule {
  ScheduleKind kind = ScheduleKind::ring;
  int world = 1;
  int chunks = 1;
  // How often one element is rounded on its way into the result, at most, when the wire is lossy.
  int lossy_steps = 0;
  std::vector<std::vector<Round>> rounds;  // [rank][round]; every rank has the same number of rounds
};

// Ring: n chunks, n-1 rounds of reduce-scatter, n-1 of all-gather. Each rank sends 2 (n-1)/n of the buffer,
// the least possible. Lossy steps: n (each hop of the reduction, and the owner's encode), so error grows with
// n.
Schedule ring(int world);

// Two-shot: n chunks; round 1: chunk c of everybody goes to rank c, which sums them in rank order in FP32;
// round 2: rank c sends the result to everybody. Same bytes as the ring in 2 rounds; 2 lossy steps whatever n
// is. n (n-1) messages per round, so it suits switched fabrics and small worlds.
Schedule two_shot(int world);

// The [begin, end) of chunk c when `count` elements are cut into `chunks` parts as evenly as `granularity`
// allows.
struct ChunkRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};
ChunkRange chunk_range(int64_t count, int chunks, int chunk, int64_t granularity = 8);

// Elements this rank sends when the schedule runs over `count` elements.
int64_t elements_sent(const Schedule& schedule, int rank, int64_t count);

// Picks for `automatic` and returns the schedule asked for otherwise; `reason`, if given, says why. Throws
// BadInput for a kind that cannot serve this world.
Schedule make_schedule(ScheduleKind kind, int world, Wire wire, std::string* reason = nullptr);

}  // namespace gradwire
