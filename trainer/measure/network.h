// The machine's ways out: network interfaces and InfiniBand or RoCE ports, as sysfs tells of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire {

struct NetInterface {
  std::string name;
  bool up = false;
  int64_t megabits = -1;  // per second; -1: the driver does not say
};
struct InfinibandPort {
  std::string device;  // "mlx5_0"
  int port = 1;
  std::string link;  // "InfiniBand" or "Ethernet", which is RoCE
  std::string rate;  // "200 Gb/sec (4X HDR)"
  bool active = false;
};
struct Network {
  std::vector<NetInterface> interfaces;  // but loopback, by name
  std::vector<InfinibandPort> ports;
  bool infiniband() const;  // an active port
};

// `sys`: where sysfs is mounted. Never throws; what cannot be read is not there.
Network find_network(const std::string& sys = "/sys");

}  // namespace gradwire
