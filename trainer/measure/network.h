// The machine's network interfaces and InfiniBand or RoCE ports, from sysfs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire {

struct NetInterface {
  std::string name;
  bool up = false;
  int64_t megabits = -1;  // megabits per second; -1 if unknown
};
struct InfinibandPort {
  std::string device;  // "mlx5_0"
  int port = 1;
  std::string link;  // "InfiniBand" or "Ethernet" (RoCE)
  std::string rate;  // "200 Gb/sec (4X HDR)"
  bool active = false;
};
struct Network {
  std::vector<NetInterface> interfaces;  // sorted by name, without loopback
  std::vector<InfinibandPort> ports;
};

// Reads sysfs at `sys`. Never throws; skips unreadable entries.
Network find_network(const std::string& sys = "/sys");

}  // namespace gradwire
