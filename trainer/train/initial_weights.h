// The weights from which all ranks start. They are drawn once, copied by each rank, and freed after the last
// copy.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "trainer/checkpoint/checkpoint.h"
#include "trainer/model/parameters.h"

namespace gradwire {

class InitialWeights {
 public:
  // Selects the source of the weights: `file`, or the seed if `file` is empty.
  explicit InitialWeights(uint64_t seed, std::string file = {}) : seed_(seed), file_(std::move(file)) {}

  // Returns the weights: a pure function of the arguments and the seed or file. Callers share the result
  // while any caller holds it.
  std::shared_ptr<const std::vector<float>> get(const std::vector<VitParameter>& parameters,
                                                const ParameterLayout& layout) {
    std::lock_guard lock(mutex_);
    auto values = values_.lock();
    if (values == nullptr || layout.offsets != layout_.offsets || layout.elements != layout_.elements) {
      auto fresh = std::make_shared<std::vector<float>>(static_cast<size_t>(layout.elements));
      if (file_.empty()) {
        vit_initialize(parameters, layout, seed_, *fresh);
      } else {
        load_weights(file_, parameters, layout, /*checksum_required=*/false, *fresh);
      }
      values = fresh;
      values_ = values;
      layout_ = layout;
    }
    return values;
  }

 private:
  const uint64_t seed_;
  const std::string file_;
  std::mutex mutex_;
  std::weak_ptr<const std::vector<float>> values_;
  ParameterLayout layout_;
};

}  // namespace gradwire
