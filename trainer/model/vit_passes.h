// The implementation of Vit: the activations and the two passes, for one storage type of product operands
// (docs/training.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "runtime/device/device.h"
#include "trainer/model/parameters.h"

namespace gradwire {

// The callback of forward before the first op that uses the weights of `block`, for each block of
// vit_blocks().
using EnterBlock = std::function<void(int block)>;

// Adjacent layers whose weight gradients are computed together, in one batched product of each kind. This
// fills a GPU and saves launches. A group's gradients are reported after its last layer.
struct GradientGroups {
  static constexpr int64_t kMax = kMaxLayersInGroup;
  int64_t layers = 1;  // layers in a group, 1 to kMax
  // True if ranks exchange gradients as they become ready. Layers 1 and 0, the last of backward, are then
  // groups of one layer, because little computation follows to hide their exchange.
  bool awaited = true;
};

struct VitPassesOptions {
  int64_t max_batch = 1;
  Precision precision = Precision::fp32;
  bool training = true;
  Buffer weights;          // layout.elements floats
  Buffer rounded_weights;  // BF16 copy; only with Precision::bf16
  EnterBlock enter_block;  // may be empty
  bool fused_attention = false;
  bool fused_gelu = false;
  GradientGroups groups = {};
};

// The interface of the two passes. Vit documents the functions.
class VitPasses {
 public:
  virtual ~VitPasses() = default;
  virtual void forward(const float* images, int64_t batch) = 0;
  virtual const float* logits() const = 0;
  virtual void evaluate(const int32_t* labels, double* totals) = 0;
  virtual void backward(const int32_t* labels, double* totals, float grad_scale, float* gradients,
                        bool accumulate, const std::function<void(int)>& ready) = 0;
  virtual int64_t bytes() const = 0;  // device memory of the activations
};

// Returns whether attention is one op on the device (kernels/vit/attention.h).
bool fuses_attention(const Device& device, const VitConfig& config, Precision precision);
// Returns whether the device computes GELU inside the preceding product, and its derivative inside the
// product of backward (Epilogue).
bool fuses_gelu(const Device& device, const VitConfig& config);

std::unique_ptr<VitPasses> make_vit_passes(const VitConfig& config, const Stream& stream,
                                           const std::vector<VitParameter>& parameters,
                                           const ParameterLayout& layout, const VitPassesOptions& options);

}  // namespace gradwire
