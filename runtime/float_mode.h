// How this thread rounds: to nearest, with subnormal numbers, whatever the program has set.
#pragma once

#include <cstdint>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace gradwire {

// Sets the default floating-point mode of the processor for this thread while it lives, and restores the earlier mode.
// Ranks must hold the same bits, also where one has asked for flush-to-zero (torch.set_flush_denormal). Threads
// inherit the mode of the thread that starts them.
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
  static constexpr uint32_t kDefault = 0x1f80, kSticky = 0x3f;  // the latter are flags of what has happened
  bool differs() const { return ((before_ ^ kDefault) & ~kSticky) != 0; }
  const uint32_t before_;
#endif
};

}  // namespace gradwire
