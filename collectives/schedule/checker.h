// Proves a schedule correct without moving any data.
//
// The checker simulates the schedule by the rules of schedule.h. A simulated value consists of the ranks
// whose contributions the value holds, and the number of roundings. A round is a group whose transfers
// progress together, a send completes only once its receive has been posted (rendezvous), and transfers
// between the same two ranks match in order. The checked rules:
//   form      every rank has the same rounds; peers, chunks and owners exist; no rank sends to itself; in one
//             round a rank does one kind of step to a chunk; both ends agree on the link class
//   match     the k-th send from a to b and the k-th receive at b from a have the same chunk and round
//   progress  every rank finishes its last round
//   result    no contribution is added to a closed partial sum; every rank that must get a chunk's final
//             value ends with a value that holds each rank's contribution exactly once
//   ownership an owner closes the final value of its chunks itself; every other rank copies the value
//   rounding  lossy steps are as declared, both with the wire format on every link and only between nodes; a
//             value is not sent to another node after ranks of the sender's node received the unrounded
//             value; no hop adds more messages than the kernels accept
//   cost      bytes sent per rank and per link class are the known optimum for the collective and the kind of
//             schedule
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
  static constexpr int kMaxViolations = 20;

  bool ok = true;  // no violations
  // The schedule computes its collective: no violations except of the rules `rounding` and `cost`.
  bool correct = true;
  std::vector<Violation> violations;  // the first kMaxViolations
  int64_t violations_found = 0;

  // Measured sizes in chunks: a size divided by schedule.chunks is a fraction of the buffer.
  std::vector<int64_t> sent_inter_node, sent_intra_node, received_inter_node, received_intra_node;  // [rank]
  int64_t busiest_link = 0;  // largest number of chunks sent from one rank to another rank
  int64_t messages = 0;      // number of messages that all ranks send
  int lossy_steps = 0, inter_node_lossy_steps = 0;
  int max_inputs = 0;  // largest number of messages merged when a partial sum is closed

  // Records a violation.
  void add(Rule rule, const std::string& text);
  // Returns one line per violation; "ok" without violations.
  std::string to_string() const;
};

// Checks a schedule by all rules.
CheckReport check(const Schedule& schedule);

// Checks the rule `cost`, for check(). `report` must contain the measured transfers.
void check_cost(const Schedule& schedule, CheckReport& report);

const char* name(CheckReport::Rule rule);

}  // namespace gradwire
