// NVLinks between GPUs, as NVML counts them. The library is opened at run time, so nothing links to it.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

class NvLinks {
 public:
  // `addresses`: PCI addresses of the GPUs. Never throws; without NVML there are no links and source() says
  // why.
  explicit NvLinks(const std::vector<std::string>& addresses);

  // Bonded links from GPU a to GPU b, direct ones, or those with which both hang on NVSwitches.
  int between(int a, int b) const;
  const std::string& source() const { return source_; }

 private:
  struct Gpu {
    std::string address;
    std::vector<std::string> peers;  // at the other end of each active link that ends at a GPU
    int to_switches = 0;
  };
  std::vector<Gpu> gpus_;
  std::string source_;
};

}  // namespace gradwire
