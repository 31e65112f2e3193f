// Overlapped training steps on eight ranks, with transfers concurrent with kernels, for ThreadSanitizer. The
// program is built twice. Unchanged, the program must cause no report. With GRADWIRE_PLANT_MISSING_WAIT, the
// reducer does not wait for the gradients of a bucket, and ThreadSanitizer must report a data race. The
// second program proves that the first program can fail. Host streams are real threads, so a missing event
// wait is a race here. On a GPU, the same race would be undetected.
#include <fmt/format.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "collectives/reducer/reducer.h"

int main() {
  using namespace gradwire;
  constexpr int kWorld = 8, kTensors = 4, kCount = 20'000, kSteps = 5;
  auto group =
      Communicator::create_local(std::vector<Device>(kWorld, Device::host()), std::chrono::seconds(60));
  std::vector<std::thread> ranks;
  bool right = true;
  for (int r = 0; r < kWorld; ++r) {
    ranks.emplace_back([&, r] {
      Stream compute = Stream::create(Device::host(), "compute");
      std::vector<GradientTensor> tensors;
      for (int t = 0; t < kTensors; ++t) tensors.push_back({fmt::format("t{}", t), {kCount}});
      Reducer reducer(*group[r], CompressionSpec::parse("bf16"), tensors,
                      {.bucket_bytes = 4 * kCount, .slice_bytes = 2000});
      for (int s = 0; s < kSteps; ++s) {
        for (int t = 0; t < kTensors; ++t) {
          float* gradient = reducer.gradient(t);
          compute.submit([=] {
            for (int i = 0; i < kCount; ++i) gradient[i] = 1.0f;
          });
          reducer.ready(t, compute);
        }
        reducer.wait(compute);
        compute.submit([&right, gradient = reducer.gradient(0), r] {
          if (r == 0 && gradient[0] != 1.0f) right = false;
        });
      }
      compute.synchronize();
    });
  }
  for (auto& rank : ranks) rank.join();
  std::puts(right ? "overlapped steps done" : "wrong result");
  return right ? 0 : 1;
}
