// Lists of specs for benchmarks and `gradwire compare --compression shelf`. Wire formats are included
// automatically. The practical choices of a new codec must be added here.
#pragma once

#include <string>
#include <vector>

#include "collectives/spec/spec.h"

namespace gradwire {

// Returns every wire format with default options and, if supported, with stochastic rounding.
inline std::vector<std::string> format_specs() {
  std::vector<std::string> all;
  for (Wire wire : wire_formats()) {
    CompressionSpec spec = CompressionSpec::parse(wire->name);
    all.push_back(spec.to_string());
    if (!wire->stochastic || spec.rounding == Rounding::stochastic) continue;
    spec.rounding = Rounding::stochastic;
    all.push_back(spec.to_string());
  }
  return all;
}

// Returns the practical choices, `--compression shelf`: every format with default options, and the options
// that change the trade-off.
inline std::vector<std::string> shelf_specs() {
  std::vector<std::string> all;
  for (Wire wire : wire_formats()) all.emplace_back(wire->name);
  for (const char* spec : {"int4:rotate=hadamard", "eden:bits=2", "eden:bits=1", "topk:k=41",
                           "topk:k=41,values=int2", "powersgd:rank=1", "powersgd:rank=4", "powersgd:rank=16",
                           "powersgd:rank=4,alternate=on", "randk:ratio=0.1", "randk:ratio=0.01"})
    all.emplace_back(spec);
  return all;
}

}  // namespace gradwire
