// A process that joins a group which is running already (reunion.h has the group's side).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/rendezvous/reunion.h"
#include "runtime/error.h"

namespace gradwire {

// Where a group can be found: a secret of its own, or "-", on a line, then the contacts of its ranks. Whoever reads it
// may join, as far as no other secret is needed.
std::string doors_text(const std::string& secret, const std::string& contacts);

struct Knock {
  std::function<std::string()> doors;  // the newest doors_text(); "" as long as there is none
  std::string secret = {};             // as in GroupOptions
  std::string about = {};              // what this process says of itself
  std::string interface = {};          // to listen on; empty: as for the rank that answers
  PortRange ports = {};
  std::chrono::milliseconds patience;  // with a group in which nobody answers
  // With one that has this process wait; 0: as long as it says that it will let it in.
  std::chrono::milliseconds longest{0};
};

struct Invitation {
  std::shared_ptr<Reunion> reunion;  // this process's
  int rank = 0, world = 1;           // in the group that forms now
  std::string name = {};             // the group's
  std::string meeting = {};          // where its store is
  // To the rank that lets this process in. If it ends before say_joined(), the others go on without this process.
  Socket host = {};
};
void say_joined(const Invitation& invitation);

class NobodyAnswers : public CommError {
 public:
  using CommError::CommError;
};

// Blocks until the group lets this process in. Throws BadInput with the reason if it refuses, NobodyAnswers as when the
// run has ended.
Invitation knock(const Knock& request);

// What a newcomer is told when it is let in.
std::string invitation_text(int rank, int world, int number, const std::string& name,
                            const std::string& meeting);

}  // namespace gradwire
