// The values all ranks start from: drawn once, copied by each rank, freed when the last has its copy.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "trainer/model/parameters.h"

namespace gradwire {

class InitialWeights {
 public:
  explicit InitialWeights(uint64_t seed) : seed_(seed) {}

  // A pure function of its arguments and the seed; the result is shared among those who hold it at the same
  // time.
  std::shared_ptr<const std::vector<float>> get(const std::vector<VitParameter>& parameters,
                                                const ParameterLayout& layout) {
    std::lock_guard lock(mutex_);
    auto values = values_.lock();
    if (values == nullptr || layout.offsets != layout_.offsets || layout.elements != layout_.elements) {
      auto fresh = std::make_shared<std::vector<float>>(static_cast<size_t>(layout.elements));
      vit_initialize(parameters, layout, seed_, *fresh);
      values = fresh;
      values_ = values;
      layout_ = layout;
    }
    return values;
  }

 private:
  const uint64_t seed_;
  std::mutex mutex_;
  std::weak_ptr<const std::vector<float>> values_;
  ParameterLayout layout_;
};

}  // namespace gradwire
