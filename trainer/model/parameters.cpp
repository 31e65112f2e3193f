#include "trainer/model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "kernels/math/random.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using Init = VitParameter::Init;

double xavier(int64_t out, int64_t in) {
  return std::sqrt(6.0 / static_cast<double>(out + in));
}

// Returns two independent standard normal draws from two uniform words (Box and Muller, 1958).
std::pair<double, double> normal_pair(uint32_t a, uint32_t b) {
  double radius = std::sqrt(-2.0 * std::log((a + 0.5) / 4294967296.0));
  double angle = 2.0 * std::numbers::pi * ((b + 0.5) / 4294967296.0);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Separates these draws from other draws with the same seed ("init" in ASCII).
constexpr uint64_t kInitStream = uint64_t{0x696e6974} << 32;

// torchvision's trunc_normal_ truncates at -2 and 2, independent of the standard deviation.
constexpr double kTruncateAt = 2.0;

// Fills elements [begin, end) of one tensor, four from each Philox block. `begin` is a multiple of 4.
void draw(const VitParameter& parameter, uint64_t seed, uint64_t tensor, int64_t begin, int64_t end,
          float* out) {
  for (int64_t i = begin; i < end; i += 4) {
    double values[4];
    uint64_t counter = static_cast<uint64_t>(i / 4);
    Random4 r = philox(seed, kInitStream | tensor, counter);
    if (parameter.init == Init::uniform) {
      for (int j = 0; j < 4; ++j) values[j] = (2.0 * ((r.v[j] + 0.5) / 4294967296.0) - 1.0) * parameter.scale;
    } else {
      const auto [first, second] = normal_pair(r.v[0], r.v[1]);
      const auto [third, fourth] = normal_pair(r.v[2], r.v[3]);
      const double draws[4] = {first, second, third, fourth};
      for (int j = 0; j < 4; ++j) {
        double value = draws[j] * parameter.scale;
        // Redraws use another stream, so they do not shift other elements' numbers.
        for (uint64_t attempt = 1; parameter.init == Init::truncated_normal && std::abs(value) > kTruncateAt;
             ++attempt) {
          Random4 again =
              philox(seed, kInitStream | (attempt << 16) | tensor, counter * 4 + static_cast<uint64_t>(j));
          value = normal_pair(again.v[0], again.v[1]).first * parameter.scale;
        }
        values[j] = value;
      }
    }
    for (int64_t j = i; j < std::min(i + 4, end); ++j) out[j] = static_cast<float>(values[j - i]);
  }
}

}  // namespace

int64_t VitParameter::elements() const {
  return element_count(shape);
}

std::vector<VitParameter> vit_parameters(const VitConfig& config) {
  const int64_t c = config.width, f = config.mlp;
  std::vector<VitParameter> list;
  auto add = [&](std::string name, std::vector<int64_t> shape, Init init, double scale = 0.0) {
    list.push_back({std::move(name), std::move(shape), init, scale});
  };
  auto add_norm = [&](const std::string& name) {
    add(name + ".weight", {c}, Init::one);
    add(name + ".bias", {c}, Init::zero);
  };
  add("heads.head.bias", {config.classes}, Init::zero);
  add("heads.head.weight", {config.classes, c}, Init::zero);
  add_norm("encoder.ln");
  for (int64_t layer = config.depth - 1; layer >= 0; --layer) {
    const std::string at = fmt::format("encoder.layers.encoder_layer_{}.", layer);
    add(at + "mlp.3.bias", {c}, Init::normal, 1e-6);
    add(at + "mlp.3.weight", {c, f}, Init::uniform, xavier(c, f));
    add(at + "mlp.0.bias", {f}, Init::normal, 1e-6);
    add(at + "mlp.0.weight", {f, c}, Init::uniform, xavier(f, c));
    add_norm(at + "ln_2");
    add(at + "self_attention.out_proj.bias", {c}, Init::zero);
    add(at + "self_attention.out_proj.weight", {c, c}, Init::uniform,
        1.0 / std::sqrt(static_cast<double>(c)));
    add(at + "self_attention.in_proj_bias", {3 * c}, Init::zero);
    add(at + "self_attention.in_proj_weight", {3 * c, c}, Init::uniform, xavier(3 * c, c));
    add_norm(at + "ln_1");
  }
  add("encoder.pos_embedding", {1, config.tokens(), c}, Init::normal, 0.02);
  add("class_token", {1, 1, c}, Init::zero);
  add("conv_proj.bias", {c}, Init::zero);
  add("conv_proj.weight", {c, config.channels, config.patch, config.patch}, Init::truncated_normal,
      std::sqrt(1.0 / static_cast<double>(config.channels * config.patch * config.patch)));
  return list;
}

std::vector<int> vit_blocks(const std::vector<VitParameter>& parameters) {
  std::vector<int> first = {0};
  for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
    const std::string& name = parameters[static_cast<size_t>(i)].name;
    if (name.ends_with(".mlp.3.weight") || name == "encoder.pos_embedding") first.push_back(i);
  }
  return first;
}

int64_t count_elements(const std::vector<VitParameter>& parameters) {
  int64_t count = 0;
  for (const VitParameter& parameter : parameters) count += parameter.elements();
  return count;
}

ParameterLayout packed_layout(const std::vector<VitParameter>& parameters) {
  ParameterLayout layout;
  for (const VitParameter& parameter : parameters) {
    layout.offsets.push_back(layout.elements);
    layout.elements += (parameter.elements() + 3) / 4 * 4;
  }
  return layout;
}

void vit_initialize(const std::vector<VitParameter>& parameters, const ParameterLayout& layout, uint64_t seed,
                    std::span<float> out) {
  std::fill(out.begin(), out.end(), 0.0f);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const VitParameter& parameter = parameters[i];
    float* values = out.data() + layout.offsets[i];
    switch (parameter.init) {
      case Init::zero:
        break;
      case Init::one:
        std::fill_n(values, parameter.elements(), 1.0f);
        break;
      default:
        parallel_for(parameter.elements(), 1 << 16,
                     [&](int64_t begin, int64_t end) { draw(parameter, seed, i, begin, end, values); });
    }
  }
}

}  // namespace gradwire
