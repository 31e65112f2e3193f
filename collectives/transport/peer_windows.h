// The windows of a group whose ranks read each other's memory (runtime/peers.h), as one rank has them.
#pragma once

#include <memory>
#include <string>

#include "runtime/device.h"
#include "runtime/peers.h"

namespace gradwire {

struct PeerWindows {
  PeerMemory memory;           // its report is in `report`; of all ranks, or of some that follow each other:
  int first = 0;               // the rank whose window comes first there
  Buffer report;               // page-locked: a PeerReport
  std::shared_ptr<void> keep;  // the memory of all ranks

  // Makes the kernels that wait for other ranks end.
  void stop();
  // What a kernel has reported, or "" while all is well: "waited 60000 ms for rank 3 at barrier 1 of 2 ..."
  std::string failure() const;
};

}  // namespace gradwire
