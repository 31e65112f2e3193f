// Proves a schedule right without moving any data.
//
// It plays the schedule with the rules of schedule.h, every value being the list of whose contributions it
// holds and how often it was rounded: a round is a group whose transfers progress together, a send is done
// only when its receive was posted (rendezvous), transfers between the same two ranks match in order. What
// must hold:
//   form      every rank has the same rounds; peers, chunks and owners exist; no rank talks to itself; in one
//             round a rank does one kind of thing to a chunk; both ends agree on the link class
//   match     the k-th send from a to b and the k-th receive at b from a are for the same chunk, in the same
//             round
//   progress  every rank finishes its last round
//   result    nothing joins a partial sum after it was closed; every rank that the collective promises a
//             chunk's final value ends with one that holds each rank's contribution exactly once
//   ownership what an owner holds in the end it closed itself; everybody else has copied it
//   rounding  lossy steps are as declared, on every link and on links between nodes alone; no value goes to
//             another node that ranks of its own already got unrounded; no hop adds more messages than the
//             kernels take
//   cost      bytes sent per rank, and per link class, are the known optimum of the collective and the kind
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/schedule/schedule.h"

namespace gradwire {

struct CheckReport {
  enum class Rule : uint8_t { form, match, progress, result, ownership, rounding, cost };
  struct Violation {
    Rule rule;
    std::string text;  // names rank, round and transfer, all counted from 0
  };
  bool ok = false;                    // no violation at all
  bool correct = false;               // no violation before rounding and cost: it computes its collective
  std::vector<Violation> violations;  // the first kMostViolations
  static constexpr int kMostViolations = 20;
  int64_t violations_found = 0;

  // Measured. Sizes are in chunks: divide by schedule.chunks for fractions of the buffer.
  std::vector<int64_t> sent_inter_node, sent_intra_node, received_inter_node, received_intra_node;  // [rank]
  int64_t busiest_link = 0;  // most chunks over one ordered pair of ranks
  int64_t messages = 0;      // of all ranks
  int lossy_steps = 0, inter_node_lossy_steps = 0;
  int most_inputs = 0;  // messages merged by one closing

  std::string to_string() const;  // one line per violation, "ok" when there is none
};

CheckReport check(const Schedule& schedule);

const char* name(CheckReport::Rule rule);

}  // namespace gradwire
