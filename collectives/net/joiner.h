// A process that joins a running group (quorum.h is the group's side).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/net/quorum.h"
#include "runtime/util/error.h"

namespace gradwire {

// Returns a group's location: its secret, or "-", on a line, then the contacts of its ranks. Readers may join
// if no other secret is needed.
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

struct Admitted {
  std::shared_ptr<Quorum> quorum;  // of this process
  int rank = 0, world = 1;         // in the group that forms now
  std::string name = {};           // of the group
  std::string location = {};       // address of the group's store
  // To the rank that admits this process. If it closes before say_joined(), the group continues without this
  // process.
  Socket host = {};
};
void say_joined(const Admitted& admitted);

class NoRankAnswers : public CommError {
 public:
  using CommError::CommError;
};

// Blocks until the group admits this process. Throws BadInput, with the reason, if the group rejects it.
// Throws NoRankAnswers if no rank answers, for example because the run has ended.
Admitted request_admission(const JoinRequest& request);

// Returns the text sent to an admitted joiner.
std::string admission_text(int rank, int world, int number, const std::string& name,
                           const std::string& location);

}  // namespace gradwire
