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

// Returns the text with which a process finds a group: the group's secret, or "-", on a line, then the
// contacts of its ranks. A process that can read the text may join, unless the run has another secret.
std::string invitation_text(const std::string& secret, const std::string& contacts);

struct JoinRequest {
  std::function<std::string()> invitation;  // returns the newest invitation_text(); "" while there is none
  std::string secret = {};                  // as in GroupOptions
  std::string about = {};                   // this process's description of itself
  std::string interface = {};               // to listen on; empty: like the rank that answers
  PortRange ports = {};
  std::chrono::milliseconds patience;  // with a group in which no rank answers
  // With a group that keeps this process waiting; 0: no limit.
  std::chrono::milliseconds longest{0};
};

// The new group, as described to an admitted joiner.
struct Admitted {
  int rank = 0, world = 1;
  int number = 0;             // of groups before this one
  std::string name = {};      // of the group
  std::string location = {};  // of the group's store
  // The joiner's quorum.
  std::shared_ptr<Quorum> quorum = nullptr;
  // To the rank that admits this process. If it closes before say_joined(), the group continues without this
  // process.
  Socket host = {};

  // Encode the members that describe the group.
  std::string encode() const;
  static Admitted decode(const std::string& text);  // throws CommError
};
void say_joined(const Admitted& admitted);
// Sends each joiner its rank in the group `next` of `world` ranks and the joiners. `number`: of groups before
// that group. A joiner that does not receive it is detected when the group forms.
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
