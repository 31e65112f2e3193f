// Compression specs, one grammar everywhere: name[:key=value,...].
//
//   fp32 | bf16[:round=nearest|stochastic] |
//   powersgd:rank=4[,wire=fp32|bf16][,start=N][,warm=on|off][,min_ratio=2][,seed=S] any of them: ,ef=on|off
//   ,schedule=auto|ring|tree|two_shot|hierarchical ,node_wire=same|fp32
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/wire/bf16.h"

namespace gradwire {

enum class Wire : uint8_t { fp32, bf16, fp8 };
enum class ScheduleKind : uint8_t { automatic, ring, tree, two_shot, hierarchical };

struct CompressionSpec {
  enum class Method : uint8_t { wire, powersgd };
  Method method = Method::wire;
  Wire wire = Wire::fp32;  // of everything dense; for PowerSGD also of the factors
  Rounding rounding = Rounding::nearest;
  bool error_feedback = true;
  ScheduleKind schedule = ScheduleKind::automatic;
  // node_wire=fp32: a hierarchical schedule leaves `wire` to the links between nodes; FP32 inside them.
  bool exact_inside = false;

  // PowerSGD only. PyTorch's option in brackets.
  int rank = 1;            // [matrix_approximation_rank]
  int64_t start = 0;       // [start_powerSGD_iter, 1000 there] first compressed step; before it plain FP32
  bool warm = true;        // [warm_start]
  double min_ratio = 2.0;  // [min_compression_rate]
  uint64_t seed = 0;       // [random_seed] of the first Q and of re-seeded directions

  // Throws BadInput that names the offending part and what would be legal there.
  static CompressionSpec parse(std::string_view text);
  // The shortest text that parses to this spec; options at their default are left out.
  std::string to_string() const;
  bool operator==(const CompressionSpec&) const = default;
};

const char* name(Wire wire);
const char* name(ScheduleKind kind);

}  // namespace gradwire
