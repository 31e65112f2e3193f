// A process that joins a running group; admission_queue.h is the group's side.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/net/quorum.h"
#include "runtime/util/error.h"

namespace gradwire {

// Returns the text by which a process finds a group. The first line is the group's secret, or "-"; the next
// lines are the contacts of the group's ranks. A process that can read the text may join, unless the run has
// another secret.
std::string invitation_text(const std::string& secret, const std::string& contacts);

struct JoinRequest {
  std::function<std::string()> invitation;  // returns the newest invitation_text(); "" while there is none
  std::string secret = {};                  // the run's secret, as in GroupOptions
  std::string about = {};                   // this process's description of itself, for `validate`
  std::string interface = {};               // the interface to listen on; empty: as the answering rank
  PortRange ports = {};
  std::chrono::milliseconds patience;  // longest time without an answer from any rank
  // Longest time that this process waits in a group's queue; 0: no limit.
  std::chrono::milliseconds longest{0};
};

// The new group, as described to an admitted joiner.
struct Admitted {
  int rank = 0, world = 1;
  int number = 0;             // the number of groups before this group
  std::string name = {};      // the group's name
  std::string location = {};  // the location of the group's store
  // The joiner's quorum.
  std::shared_ptr<Quorum> quorum = nullptr;
  // The connection to the rank that admits this process. If the connection closes before say_joined(), the
  // group continues without this process.
  Socket host = {};

  // Encode and decode the members that describe the group.
  std::string encode() const;
  static Admitted decode(const std::string& text);  // throws CommError
};
void say_joined(const Admitted& admitted);
// Sends each joiner the joiner's rank in the group `next`, which has `world` ranks followed by the joiners.
// `number`: the number of groups before `next`. A joiner that does not receive the message is detected when
// the group forms.
void admit(const std::vector<AdmissionQueue::Joiner>& joiners, const Quorum::NextGroup& next, int world,
           int number);

class NoRankAnswers : public CommError {
 public:
  using CommError::CommError;
};

// Blocks until the group admits this process. Throws BadInput, with the reason, if the group rejects it.
// Throws NoRankAnswers if no rank answers, for example because the run has ended.
Admitted request_admission(const JoinRequest& request);

}  // namespace gradwire
