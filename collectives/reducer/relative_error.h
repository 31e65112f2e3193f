// The relative L2 error of one encode, over all tensors of a model.
#pragma once

#include <cmath>
#include <cstdint>

namespace gradwire {

// Adds up tensors' squared relative errors, weighted by elements. Tensors of zeros do not count.
class RelativeError {
 public:
  // `exact`, `result`: functions from an index to a number.
  template <typename Exact, typename Result>
  void add(const Exact& exact, const Result& result, int64_t count) {
    double change = 0, norm = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double value = exact(i), difference = result(i) - value;
      norm += value * value;
      change += difference * difference;
    }
    if (norm == 0) return;
    weighted_ += static_cast<double>(count) * change / norm;
    elements_ += static_cast<double>(count);
  }
  double root() const { return elements_ == 0 ? 0 : std::sqrt(weighted_ / elements_); }
  bool empty() const { return elements_ == 0; }

 private:
  double weighted_ = 0, elements_ = 0;
};

}  // namespace gradwire
