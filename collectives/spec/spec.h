// Compression specs: name[:key=value,...].
//
// The name is a wire format's (kernels/wire/format.h), `powersgd`, `randk` or `dion`.
// CompressionSpec::grammar() lists all options; docs/formats.md explains them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/schedule/schedule.h"
#include "kernels/wire/format.h"

namespace gradwire {

// The options of a spec that say what a rank does with the values that its encodes lose, and when compression
// begins. They apply to every codec and format.

struct ResidualPolicy {
  // on: the errors of a step are added to the next step's gradient. ef21: ranks send the difference from an
  // estimate of their gradient (pipeline.h).
  enum class Feedback : uint8_t { off, on, ef21 };
  Feedback feedback = Feedback::on;
  double decay = 1.0;  // ef_decay: the share of the residual that is added to the next step's gradient
  int64_t start = 0;   // [PyTorch: start_powerSGD_iter, 1000] first compressed step; earlier steps send FP32
  int64_t ramp = 0;    // steps, from `start` on, in formats wider than the spec's
  double momentum = 0.0;  // momentum correction, for codecs that send a few of the values
  double max_norm =
      0.0;  // times 1 / sqrt(ranks): the largest norm of a tensor's gradient on a rank; 0: not clipped

  bool keeps_errors() const { return feedback != Feedback::off; }
  // Returns which of `stages` formats, of which the last is the spec's, step `step` uses.
  size_t stage(int64_t step, size_t stages) const;
  bool operator==(const ResidualPolicy&) const = default;
};

inline constexpr const char* kDenseAuto = "auto";

struct CompressionSpec {
  enum class Method : uint8_t { wire, powersgd, randk, dion };
  Method method = Method::wire;
  Wire wire = kFp32;  // format of gradients, PowerSGD's factors or randk's values
  Rounding rounding = Rounding::nearest;
  ResidualPolicy policy;
  // Format of the residual between steps, with stochastic rounding.
  Wire residual = kFp32;
  // Tensors that are averaged in FP32 without compression: names with shell wildcards. kDenseAuto: vectors
  // and small tensors. Sorted, without duplicates.
  std::vector<std::string> dense;
  ScheduleKind schedule = ScheduleKind::automatic;
  // intra_node=fp32: a hierarchical schedule uses `wire` only on links between nodes.
  bool fp32_intra_node = false;

  // PowerSGD; `rank` also Dion. The name of PyTorch's option is in brackets.
  int rank = 1;      // [matrix_approximation_rank]
  bool warm = true;  // [warm_start]
  // Whether steps send P and Q alternately (ACP-SGD), instead of both factors in every step. Needs a warm
  // start.
  bool alternate = false;
  double min_ratio = 2.0;  // [min_compression_rate]
  // [random_seed] Also Dion. Seeds the first Q, re-seeded directions, and randk's coordinates.
  uint64_t seed = 0;

  double mu = 0.95;     // dion only: the momentum's decay along the directions that a step applies
  bool orth = false;    // dion only: orthonormalize the second factor; false: normalize its columns
  double ratio = 0.01;  // randk only: the fraction of each tensor's elements that is sent

  // Parses a spec. Throws BadInput that names the offending part and the legal values.
  // fed_back: refuses residuals that could grow without bound; false: the caller does (divergence()).
  static CompressionSpec parse(std::string_view text, bool fed_back = true);
  // Returns the shortest text that parses to this spec; omits options with their default value.
  std::string to_string() const;
  // Returns whether this codec can load a state saved under the spec `text`. residual= may differ, because
  // states store residuals in FP32.
  bool loads_state_of(std::string_view text) const;
  // Returns whether a step depends on more than a buffer and its residual: the number of earlier steps, other
  // state, or tensors' shapes.
  bool needs_reducer() const;
  // Returns why the residual's policies contradict each other or the rest of the spec; "" if they do not.
  std::string policy_problem() const;
  // Return the formats of a ramp, or randk's ratios, in order. The last is the spec's; the only one if
  // ramp=0.
  std::vector<Wire> ramp_formats() const;
  std::vector<double> ramp_ratios() const;
  // Returns why the residual of error feedback may grow without bound, and the remedy. Returns "" if the
  // residual is bounded or the bound of the format is unknown.
  std::string divergence() const;
  // Returns whether most of a gradient waits in the residual for many steps, so that results are sums of past
  // gradients, as with a momentum.
  bool sums_gradients() const;
  // Returns whether `name` is the name of a codec, which no wire format can have.
  static bool is_codec(std::string_view name);
  // Returns every legal spec, in one line.
  static std::string grammar();
  bool operator==(const CompressionSpec&) const = default;
};

}  // namespace gradwire
