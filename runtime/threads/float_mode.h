// The floating-point mode of Gradwire's computations: rounding to nearest, with subnormal numbers,
// independent of the program's mode.
#pragma once

#include <cstdint>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace gradwire {

// Sets the default floating-point mode of the processor for this thread during this object's lifetime, then
// restores the earlier mode. Ranks must hold the same bits even if one rank has set flush-to-zero
// (torch.set_flush_denormal). Threads inherit the mode of the thread that starts them.
class DefaultFloatMode {
 public:
#ifdef __x86_64__
  DefaultFloatMode() : before_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (differs()) _mm_setcsr(before_);
  }
#else
  DefaultFloatMode() = default;
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;

 private:
#ifdef __x86_64__
  static constexpr uint32_t kDefault = 0x1f80, kSticky = 0x3f;  // kSticky: the exception flags
  bool differs() const {
    return ((before_ ^ kDefault) & ~kSticky) != 0;
  }
  const uint32_t before_;
#endif
};

}  // namespace gradwire
