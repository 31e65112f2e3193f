// A spec of every kind to test. Conservation, identical bits on all ranks, hard gradients, resuming and the
// benchmarks run through this list. Wire formats are included automatically; add a line for a new codec or
// option, and all of these tests cover it.
#pragma once

#include <string>
#include <vector>

#include "kernels/wire/formats.h"

namespace gradwire {

inline std::vector<std::string> example_specs() {
  std::vector<std::string> all;
  for (Wire wire : wire_formats()) {
    const std::string name = wire->name;
    all.push_back(name);
    if (wire->stochastic) all.push_back(name + ":round=stochastic");
    if (!wire->exact) all.push_back("powersgd:rank=4,wire=" + name);
  }
  for (const char* spec :
       {"powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=3,wire=bf16,round=stochastic",
        "powersgd:rank=4,warm=off", "powersgd:rank=4,start=5", "powersgd:rank=64,min_ratio=0.1",
        "bf16:residual=int8", "int8:round=stochastic,residual=bf16", "powersgd:rank=2,residual=int8",
        "int8:dense=auto", "fp8:residual=int8,dense=auto+*s*", "powersgd:rank=2,wire=int8,dense=auto"}) {
    all.push_back(spec);
  }
  return all;
}

}  // namespace gradwire
