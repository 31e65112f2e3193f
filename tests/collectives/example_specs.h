// Specs of every codec and option, for tests of conservation, identical bits on all ranks, and resuming. Wire
// formats are included automatically. Add a line for each new codec or option.
#pragma once

#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "tests/support/schedules.h"

namespace gradwire {

// Returns at least one spec for every codec and option.
inline std::vector<std::string> example_specs() {
  std::vector<std::string> all = format_specs();
  for (Wire wire : wire_formats()) {
    if (!wire->exact) all.push_back(std::string("powersgd:rank=4,wire=") + wire->name);
  }
  for (const char* spec : {"int4:rotate=hadamard",
                           "eden:bits=1",
                           "qsgd:bits=4,block=128",
                           "topk:k=5,of=256,values=int2",
                           "powersgd:rank=1",
                           "powersgd:rank=2",
                           "powersgd:rank=3,wire=bf16,round=stochastic",
                           "powersgd:rank=4,warm=off",
                           "powersgd:rank=4,start=5",
                           "powersgd:rank=64,min_ratio=0.1",
                           "bf16:residual=int8",
                           "int8:round=stochastic,residual=bf16",
                           "powersgd:rank=2,residual=int8",
                           "int8:dense=auto",
                           "sign:dense=off",
                           "fp8:residual=int8,dense=auto+*s*",
                           "powersgd:rank=2,wire=int8,dense=auto",
                           "int8:ef_decay=0.9",
                           "topk:k=41,ef_decay=0.95,start=3",
                           "int4:ramp=6,residual=bf16,ef_decay=0.8",
                           "topk:k=5,of=256,ramp=4",
                           "randk:ratio=0.05,ef_decay=0.9,start=1,ramp=3",
                           "powersgd:rank=2,ef_decay=0.9",
                           "powersgd:rank=2,alternate=on,wire=int8,ef_decay=0.9",
                           "powersgd:rank=4,alternate=on",
                           "powersgd:rank=1,alternate=on,start=3",
                           "powersgd:rank=2,wire=bf16,round=stochastic,alternate=on",
                           "powersgd:rank=4,wire=fp8,alternate=on",
                           "randk:ratio=0.01",
                           "randk:ratio=0.3,seed=7",
                           "randk:ratio=0.1,wire=bf16,round=stochastic"}) {
    all.push_back(spec);
  }
  return all;
}

// Returns example_specs() with every schedule. Specs that differ only in rounding or in a codec's wire format
// have the same exchanges, so each of these specs gets only one schedule, in rotation.
inline std::vector<std::string> example_specs_with_schedules() {
  const std::vector<std::string> schedules = testing::schedule_names();
  std::vector<std::string> all = {"bf16:schedule=hierarchical,intra_node=fp32",
                                  "powersgd:rank=2,wire=bf16,schedule=hierarchical,intra_node=fp32"};
  size_t turn = 0;
  for (std::string spec : example_specs()) {
    const auto has = [&](const char* option) { return spec.find(option) != std::string::npos; };
    const bool variant = has("round=stochastic") || has("wire=");
    spec += has(":") ? "," : ":";
    if (variant) {
      all.push_back(spec + "schedule=" + schedules[turn++ % schedules.size()]);
      continue;
    }
    for (const std::string& schedule : schedules) all.push_back(spec + "schedule=" + schedule);
  }
  return all;
}

}  // namespace gradwire
