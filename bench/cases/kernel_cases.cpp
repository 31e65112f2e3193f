#include "bench/cases/kernel_cases.h"

#include <algorithm>
#include <random>

#include "runtime/util/error.h"

namespace gradwire::bench {

Arena::Arena(const Stream& stream, int64_t bytes)
    : stream_(stream), memory_(stream.device(), static_cast<size_t>(bytes)) {
  std::mt19937 generator(1);
  std::normal_distribution<float> distribution;
  normal_.resize(1 << 20);
  for (float& value : normal_) value = distribution(generator);
}

void Arena::reset() {
  stream_.synchronize();
  used_ = 0;
  kept_.clear();
}

void* Arena::take(int64_t bytes) {
  int64_t aligned = (bytes + 255) / 256 * 256;
  if (used_ + aligned > static_cast<int64_t>(memory_.bytes())) {
    throw Error("a benchmark case needs more arena than kArenaPerSize times its size; raise kArenaPerSize");
  }
  void* data = memory_.as<char>() + used_;
  used_ += aligned;
  fill_zero(stream_, data, static_cast<size_t>(bytes));
  return data;
}

float* Arena::repeated(int64_t count, std::span<const float> pattern) {
  auto* data = static_cast<float*>(take(count * 4));
  for (int64_t done = 0; done < count; done += static_cast<int64_t>(pattern.size())) {
    int64_t now = std::min(count - done, static_cast<int64_t>(pattern.size()));
    copy(stream_, data + done, pattern.data(), static_cast<size_t>(now) * 4);
  }
  stream_.synchronize();
  return data;
}

float* Arena::normal(int64_t count) {
  return repeated(count, normal_);
}

float* Arena::filled(int64_t count, float value) {
  std::vector<float> pattern(static_cast<size_t>(std::min<int64_t>(std::max<int64_t>(count, 1), 1 << 18)),
                             value);
  return repeated(count, pattern);
}

std::vector<KernelCase> kernel_cases() {
  std::vector<KernelCase> all;
  for (auto table : {wire_cases(), feedback_cases(), powersgd_cases(), model_cases()}) {
    all.insert(all.end(), table.begin(), table.end());
  }
  return all;
}

}  // namespace gradwire::bench
