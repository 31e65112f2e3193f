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
std::string doors_text(const std::string& secret, const std::string& contacts);

struct Knock {
  std::function<std::string()> doors;  // returns the newest doors_text(); "" while there is none
  std::string secret = {};             // as in GroupOptions
  std::string about = {};              // this process's description of itself
  std::string interface = {};          // to listen on; empty: like the rank that answers
  PortRange ports = {};
  std::chrono::milliseconds patience;  // with a group in which no rank answers
  // With a group that keeps this process waiting; 0: no limit.
  std::chrono::milliseconds longest{0};
};

struct Invitation {
  std::shared_ptr<Reunion> reunion;  // of this process
  int rank = 0, world = 1;           // in the group that forms now
  std::string name = {};             // of the group
  std::string meeting = {};          // address of the group's store
  // To the rank that admits this process. If it closes before say_joined(), the group continues without this
  // process.
  Socket host = {};
};
void say_joined(const Invitation& invitation);

class NobodyAnswers : public CommError {
 public:
  using CommError::CommError;
};

// Blocks until the group admits this process. Throws BadInput, with the reason, if the group rejects it.
// Throws NobodyAnswers if no rank answers, for example because the run has ended.
Invitation knock(const Knock& request);

// Returns the invitation sent to an admitted joiner.
std::string invitation_text(int rank, int world, int number, const std::string& name,
                            const std::string& meeting);

}  // namespace gradwire
