// Compression specs, one grammar everywhere: name[:key=value,...].
//
// The name is that of a wire format (kernels/wire/formats.h), `powersgd` or `randk`. `CompressionSpec::grammar()`
// lists all options; docs/formats.md explains them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/schedule/schedule.h"
#include "kernels/wire/formats.h"

namespace gradwire {

inline constexpr const char* kDenseAuto = "auto";

struct CompressionSpec {
  enum class Method : uint8_t { wire, powersgd, randk };
  Method method = Method::wire;
  Wire wire = kFp32;  // of dense tensors, PowerSGD's factors and randk's values
  Rounding rounding = Rounding::nearest;
  bool error_feedback = true;
  Wire residual = kFp32;  // in which error feedback keeps its residual between steps, rounded at random
  // Tensors that stay out of all this and are averaged in FP32: names with shell wildcards; kDenseAuto among
  // them: vectors and small tensors. Sorted, no name twice.
  std::vector<std::string> dense;
  ScheduleKind schedule = ScheduleKind::automatic;
  // transport=lsa: where ranks read each other's memory, an allreduce is one kernel (LSA, NCCL's word: load/store-
  // accessible) or, with schedule=hierarchical, nothing is sent inside nodes. Otherwise, by messages. transport=auto:
  // where the planner predicts that to be faster.
  Lsa lsa = Lsa::off;
  // intra_node=fp32: a hierarchical schedule uses `wire` only on links between nodes.
  bool fp32_intra_node = false;

  // PowerSGD only. In brackets the name of PyTorch's option.
  int rank = 1;       // [matrix_approximation_rank]
  int64_t start = 0;  // [start_powerSGD_iter, default 1000] first compressed step; plain FP32 before it
  bool warm = true;   // [warm_start]
  // P and Q are sent in turns, one in each step (ACP-SGD), instead of both in every step. Needs a warm start.
  bool alternate = false;
  double min_ratio = 2.0;  // [min_compression_rate]
  uint64_t seed = 0;       // [random_seed] of the first Q and of re-seeded directions; of randk's coordinates

  double ratio = 0.01;  // randk only: the share of each tensor's elements that is sent

  // Throws BadInput that names the offending part and the legal values.
  static CompressionSpec parse(std::string_view text);
  // The shortest text that parses to this spec; options with their default value are omitted.
  std::string to_string() const;
  // Whether a state saved under the spec `text` is this codec's: residuals are saved in FP32 whatever they are
  // kept in, so that residual= may differ.
  bool loads_state_of(std::string_view text) const;
  // Returns why the residual of error feedback may grow without bound, with the remedy; "" if it cannot grow,
  // or if the bound of the format is unknown.
  std::string divergence() const;
  // Whether `name` stands for a codec, and so cannot be that of a wire format.
  static bool is_codec(std::string_view name);
  // Every legal spec, in one line.
  static std::string grammar();
  bool operator==(const CompressionSpec&) const = default;
};

}  // namespace gradwire
