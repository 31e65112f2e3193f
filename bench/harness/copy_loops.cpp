#include "bench/harness/copy_loops.h"

#include <algorithm>
#include <cstring>

#include "kernels/simd/simd.h"
#include "runtime/threads/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradwire::bench {
namespace {

void with_memcpy(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

GW_SIMD void with_vectors(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<float*>(to);
  auto* in = static_cast<const float*>(from);
  // The compiler turns a plain loop into a call of memcpy, but does not replace a loop over vectors.
  using Vector [[gnu::vector_size(64), gnu::may_alias]] = float;
  for (int64_t i = 0; i < bytes / 4; i += 16) {
    *reinterpret_cast<Vector*>(out + i) = *reinterpret_cast<const Vector*>(in + i);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx"))) void non_temporal(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<float*>(to);
  auto* in = static_cast<const float*>(from);
  for (int64_t i = 0; i < bytes / 4; i += 16) {
    _mm256_stream_ps(out + i, _mm256_load_ps(in + i));
    _mm256_stream_ps(out + i + 8, _mm256_load_ps(in + i + 8));
  }
  _mm_sfence();
}
#endif

}  // namespace

std::vector<CopyLoop> copy_loops() {
  std::vector<CopyLoop> loops = {{"memcpy", with_memcpy}, {"vector stores", with_vectors}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx")) loops.push_back({"non-temporal stores", non_temporal});
#endif
  return loops;
}

void copy_in_parallel(CopyLoop loop, void* to, const void* from, int64_t bytes) {
  const int64_t grain = std::clamp<int64_t>(bytes / host_threads() / 64 * 64, 64 << 10, 1 << 20);
  parallel_for(bytes / 64 * 64, grain, [=](int64_t begin, int64_t end) {
    loop.copy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

}  // namespace gradwire::bench
