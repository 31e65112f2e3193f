// The parameters of a ViT: torchvision's names and shapes, their layout in memory, and initial values.
//
// Parameters are listed in the order in which backward finishes their gradients (head first, patch embedding
// last), which the reducer needs. This is also the order in memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trainer/config/config.h"

namespace gradwire {

struct VitParameter {
  enum class Init : uint8_t { zero, one, normal, truncated_normal, uniform };
  std::string name;            // torchvision's state-dict name
  std::vector<int64_t> shape;  // torchvision's shape
  Init init = Init::zero;
  double scale = 0.0;  // standard deviation, or bound of the uniform distribution

  int64_t elements() const;
};

// Returns all parameters, in the order in which their gradients become ready.
std::vector<VitParameter> vit_parameters(const VitConfig& config);
// Returns the index of the first parameter of each block, in the order of the parameters: the head with the
// last norm, the layers from last to first, the embedding. A layer's last bias belongs to the next block in
// forward order, whose norm adds the bias and whose backward sums its gradient.
std::vector<int> vit_blocks(const std::vector<VitParameter>& parameters);
// Returns the number of elements of all parameters, as in "the model has N parameters".
int64_t count_elements(const std::vector<VitParameter>& parameters);

// The offset of each parameter in a flat buffer, in floats. Parameters, gradients and optimizer state have
// the layout of the reducer's gradient buffer (16-byte aligned, zero gaps), so one launch updates everything.
struct ParameterLayout {
  std::vector<int64_t> offsets;
  int64_t elements = 0;  // number of elements, including gaps
};
// Values of a subset of a layout's elements: at the layout's offsets, or packed.
template <typename T>
struct Parts {
  T* data = nullptr;
  bool packed = false;
};
// Returns the layout with each tensor at the next multiple of 4 floats.
ParameterLayout packed_layout(const std::vector<VitParameter>& parameters);

// Draws initial values with torchvision's distributions, as a pure function of (parameters, layout, seed):
// class token and biases 0, positions N(0, 0.02), patch convolution truncated normal, in_proj and MLP
// Xavier-uniform, out_proj uniform in +-1/sqrt(C), MLP biases N(0, 1e-6), norms 1 and 0, head 0. Gaps are 0.
// `out` has layout.elements floats.
void vit_initialize(const std::vector<VitParameter>& parameters, const ParameterLayout& layout, uint64_t seed,
                    std::span<float> out);

}  // namespace gradwire
