// One rank's view of the peer windows of a group whose ranks read each other's memory
// (runtime/device/peers.h).
#pragma once

#include <memory>
#include <string>

#include "runtime/device/device.h"
#include "runtime/device/peers.h"

namespace gradwire {

struct PeerWindows {
  PeerMemory memory;           // of all ranks or of consecutive ones; its report is `report`
  int first = 0;               // rank of the first window
  Buffer report;               // page-locked: a PeerReport
  std::shared_ptr<void> keep;  // the memory of all ranks

  // Ends the kernels that wait for other ranks.
  void stop();
  // Returns the kernel's error report, or "": "waited 60000 ms for rank 3 at barrier 1 of 2 ..."
  std::string failure() const;
};

}  // namespace gradwire
