// A spec of every kind that there is to test. Conservation, identical bits on all ranks, hard gradients,
// resuming and the benchmarks run through this list: a new codec or option needs its line here and is then
// held to all of them.
#pragma once

namespace gradwire {

inline constexpr const char* kExampleSpecs[] = {
    "fp32",
    "bf16",
    "bf16:round=stochastic",
    "fp8",
    "fp8:round=stochastic",
    "powersgd:rank=1",
    "powersgd:rank=2",
    "powersgd:rank=4,wire=bf16",
    "powersgd:rank=3,wire=bf16,round=stochastic",
    "powersgd:rank=4,wire=fp8",
    "powersgd:rank=4,warm=off",
    "powersgd:rank=4,start=5",
    "powersgd:rank=64,min_ratio=0.1",
};

}  // namespace gradwire
