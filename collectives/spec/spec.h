// Compression specs, one grammar everywhere: name[:key=value,...].
//
// A name is that of a wire format (kernels/wire/formats.h) or `powersgd`. `CompressionSpec::grammar()` has all
// options; docs/formats.md explains them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "collectives/schedule/schedule.h"
#include "kernels/wire/formats.h"

namespace gradwire {

struct CompressionSpec {
  enum class Method : uint8_t { wire, powersgd };
  Method method = Method::wire;
  Wire wire = kFp32;  // of everything dense; for PowerSGD also of the factors
  Rounding rounding = Rounding::nearest;
  bool error_feedback = true;
  ScheduleKind schedule = ScheduleKind::automatic;
  // intra_node=fp32: a hierarchical schedule leaves `wire` to the links between nodes.
  bool fp32_intra_node = false;

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
  // Every legal spec, in one line.
  static std::string grammar();
  bool operator==(const CompressionSpec&) const = default;
};

}  // namespace gradwire
