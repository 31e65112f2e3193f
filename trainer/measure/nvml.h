// NVLinks between GPUs, from NVML. The library is opened at run time, so nothing links to it.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

class NvLinks {
 public:
  // `addresses`: PCI addresses of the GPUs. Never throws. Without NVML, between() is 0 and source() the
  // reason.
  explicit NvLinks(const std::vector<std::string>& addresses);

  // Returns the number of links from GPU a to GPU b: direct links, plus links through NVSwitches.
  int between(int a, int b) const;
  // Returns "NVML", or the reason why no links are known.
  const std::string& source() const { return source_; }

 private:
  struct Gpu {
    std::string address;
    std::vector<std::string> peers;  // PCI addresses, one for each active link to a GPU
    int to_switches = 0;             // active links to NVSwitches
  };
  std::vector<Gpu> gpus_;
  std::string source_;
};

}  // namespace gradwire
