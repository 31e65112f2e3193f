// Cases of error feedback's policies: `size` bytes of gradients.
#include "bench/cases/kernel_cases.h"
#include "kernels/feedback/clip.h"
#include "kernels/feedback/feedback.h"

namespace gradwire::bench {
namespace {

// Returns a problem that launches `op`, which moves `bytes` per element of args.count.
template <typename Args>
Problem passes(const Args& args, void (*op)(const Stream&, const Args&), double bytes) {
  return {[args, op](const Stream& s) { op(s, args); }, bytes * static_cast<double>(args.count), 0,
          std::to_string(args.count)};
}

Problem difference(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  Ef21Difference args{.grad = arena.normal(count), .residual = arena.zeros<float>(count)};
  args.estimate = arena.zeros<float>(count);  // else the gradient would grow from launch to launch
  args.kept = arena.zeros<float>(count);
  args.count = count;
  return passes<Ef21Difference>(args, ef21_difference, 24);
}

Problem update(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  Ef21Update args{.grad = arena.zeros<float>(count), .residual = arena.normal(count)};
  args.estimate = arena.zeros<float>(count);
  args.kept = arena.normal(count);
  args.count = count;
  return passes<Ef21Update>(args, ef21_update, 28);
}

Problem add(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  const MomentumAdd args{arena.normal(count), arena.zeros<float>(count), 0.0f, count};
  return passes<MomentumAdd>(args, momentum_add, 16);
}

Problem mask(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  const MomentumMask args{arena.normal(count), arena.normal(count), count};
  return passes<MomentumMask>(args, momentum_mask, 12);
}

// The array is above the norm in the first launch only, and is read in each.
Problem clip(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  const ClipNorm args{arena.normal(count), arena.zeros<double>(clip_chunks(count)), 1.0f, count};
  return passes<ClipNorm>(args, clip_norm, 4);
}

}  // namespace

std::span<const KernelCase> feedback_cases() {
  static const std::vector<KernelCase> cases = {
      {"ef21_difference", "", "feedback", difference},
      {"ef21_update", "", "feedback", update},
      {"clip_norm", "", "feedback", clip},
      {"momentum_add", "", "feedback", add},
      {"momentum_mask", "", "feedback", mask},
  };
  return cases;
}

}  // namespace gradwire::bench
