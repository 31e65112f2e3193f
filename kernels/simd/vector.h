// Eight or sixteen numbers as one value, in GCC's portable vectors: for loops that the compiler would not
// vectorize well, because they are too short or their sums must stay in registers.
//
// An operation compiles to the instruction set of its function (kernels/simd/vector.h): F32x8 is one AVX
// register or two of SSE, and F32x16 is two F32x8. Arithmetic and comparisons are written as for plain
// numbers, and one operand may be a plain number. This header has the other operations: memory, BF16, blends,
// parts of vectors, and sums and maxima over lanes. Sums over lanes add halves, so that they have the same
// bits on every machine. No alignment is needed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>  // defines __GLIBC__ on glibc
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/math/column_chunks.h"
#include "kernels/math/gelu.h"
#include "kernels/math/small_float.h"
#include "runtime/threads/thread_pool.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

// Function multiversioning needs GCC, an ELF system with ifunc (glibc) and no sanitizer: instrumented
// resolvers would run before the sanitizer's set-up.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(GRADWIRE_SANITIZED) && \
    __GNUC__ >= 12
#define GW_SIMD __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define GW_SIMD_CHOOSES 1
#else
#define GW_SIMD
#endif

#define GW_INLINE __attribute__((always_inline)) inline

#ifdef __x86_64__
#define GW_SIMD_AVX512 __attribute__((noinline, target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#else
#define GW_SIMD_AVX512
#endif

// Defines NAME as BODY<WIDE> with AVX-512, and as BODY<NARROW> without it. WIDE is a 64-byte vector, or has
// such vectors: without AVX-512, GCC 12 splits operations on them into scalar operations.
#define GW_DEFINE_WIDEST(RESULT, NAME, BODY, NARROW, WIDE, PARAMETERS, ARGUMENTS) \
  GW_SIMD static RESULT NAME##_narrow PARAMETERS {                                \
    return BODY<NARROW> ARGUMENTS;                                                \
  }                                                                               \
  GW_SIMD_AVX512 static RESULT NAME##_wide PARAMETERS {                           \
    return BODY<WIDE> ARGUMENTS;                                                  \
  }                                                                               \
  RESULT NAME PARAMETERS {                                                        \
    return has_avx512() ? NAME##_wide ARGUMENTS : NAME##_narrow ARGUMENTS;        \
  }

#if defined(__clang__)
#define GW_ALLOW_FMA _Pragma("STDC FP_CONTRACT ON")
#else
#define GW_ALLOW_FMA _Pragma("GCC optimize(\"fp-contract=fast\")")
#endif

namespace gradwire::host {

// Returns whether the processor runs GW_SIMD_AVX512's functions.
inline bool has_avx512() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// Returns whether the processor has all of x86-64-v4, and functions may be compiled for it.
bool runs_wide();

// Results of at least this many bytes would only evict other data from the caches. They are written past the
// caches, which also saves reading each line first.
inline constexpr int64_t kStreamBytes = 16 * 1024 * 1024;

GW_INLINE bool streams(const void* to, int64_t bytes) {
  return bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(to) % 16 == 0;
}
// Stores a GCC vector without filling the caches. `to` is 16-byte aligned.
template <typename V>
GW_INLINE void stream_store(void* to, const V& v) {
#ifdef __SSE2__
  __m128i part[sizeof(V) / 16];
  std::memcpy(part, &v, sizeof v);
  for (size_t i = 0; i < sizeof(V) / 16; ++i) _mm_stream_si128(static_cast<__m128i*>(to) + i, part[i]);
#else
  std::memcpy(to, &v, sizeof v);
#endif
}
// Makes the results of stream_store() visible to other threads; required before another thread reads them.
GW_INLINE void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace gradwire::host

namespace gradwire {

using F32x8 = float __attribute__((vector_size(32)));
using I32x8 = int32_t __attribute__((vector_size(32)));
using U32x8 = uint32_t __attribute__((vector_size(32)));
using U16x8 = uint16_t __attribute__((vector_size(16)));

// Stores sixteen numbers as two vectors of eight, not as one vector of 64 bytes: without AVX-512, GCC 12
// splits operations on 64-byte vectors into sixteen scalar operations (-Wvector-operation-performance), which
// makes most loops several times slower.
template <typename V>
struct Pair {
  V low, high;
};
using F32x16 = Pair<F32x8>;
using I32x16 = Pair<I32x8>;
using U32x16 = Pair<U32x8>;
// Sixteen numbers in one register of AVX-512, for functions that are compiled for it.
using WideF32 = float __attribute__((vector_size(64)));
using WideI32 = int32_t __attribute__((vector_size(64)));
using WideU32 = uint32_t __attribute__((vector_size(64)));

#define GW_PAIR_OPERATOR(op)                                                           \
  template <typename V>                                                                \
  GW_INLINE auto operator op(const Pair<V>& a, const Pair<V>& b) {                     \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};           \
  }                                                                                    \
  template <typename V, typename T>                                                    \
  requires std::is_arithmetic_v<T> GW_INLINE auto operator op(const Pair<V>& a, T b) { \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                        \
  }
GW_PAIR_OPERATOR(+)
GW_PAIR_OPERATOR(-)
GW_PAIR_OPERATOR(*)
GW_PAIR_OPERATOR(&)
GW_PAIR_OPERATOR(|)
GW_PAIR_OPERATOR(<<)
GW_PAIR_OPERATOR(>>)
GW_PAIR_OPERATOR(<)
GW_PAIR_OPERATOR(>)
GW_PAIR_OPERATOR(==)
GW_PAIR_OPERATOR(!=)
template <typename V>
GW_INLINE Pair<V> operator*(float a, const Pair<V>& b) {
  return {a * b.low, a * b.high};
}
template <typename V>
GW_INLINE Pair<V>& operator+=(Pair<V>& a, const Pair<V>& b) {
  a.low += b.low;
  a.high += b.high;
  return a;
}

// The vector types with as many lanes as V, a vector of floats. Masks are I32.
template <typename V>
struct Lanes;
template <>
struct Lanes<F32x8> {
  using I32 = I32x8;
  using U32 = U32x8;
  using U16 = U16x8;
  static constexpr I32 kIndex = {0, 1, 2, 3, 4, 5, 6, 7};
};
template <>
struct Lanes<F32x16> {
  using I32 = I32x16;
  using U32 = U32x16;
  static constexpr I32 kIndex = {{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}};
};
template <>
struct Lanes<WideF32> {
  using I32 = WideI32;
  using U32 = WideU32;
  static constexpr I32 kIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
template <typename V>
inline constexpr int kLanes = sizeof(V) / sizeof(float);

template <>
struct FloatWords<F32x8> {
  static GW_INLINE U32x8 words(F32x8 x) { return std::bit_cast<U32x8>(x); }
  static GW_INLINE F32x8 floats(U32x8 u) { return std::bit_cast<F32x8>(u); }
};

// Returns the instruction set for which the host's loops were compiled and run in this process, such as
// "x86-64-v4 (AVX-512)". Sums over vectors have the same bits in two processes only if the level is the same.
// Therefore ranks that compute identical values locally must have the same level.
std::string simd_level();

namespace host {

// Returns mask ? a : b.
template <typename M, typename V>
GW_INLINE V blend(const M& mask, const V& a, const V& b) {
  if constexpr (requires { mask.low; }) {
    return {mask.low ? a.low : b.low, mask.high ? a.high : b.high};
  } else {
    return mask ? a : b;
  }
}

template <typename V>
GW_INLINE typename Lanes<V>::U32 words_of(const V& x) {
  return std::bit_cast<typename Lanes<V>::U32>(x);
}

// Returns BF16 bits as floats.
template <typename V>
GW_INLINE V widen_bf16(const typename Lanes<V>::U16& bits) {
  return std::bit_cast<V>(__builtin_convertvector(bits, typename Lanes<V>::U32) << 16);
}

// Load a V from, or store it to, consecutive elements of type T: float for a vector of floats, uint16_t for a
// vector of uint16_t. Bf16 is widened, and rounded as narrow<Bf16> does.
template <typename V, typename T>
GW_INLINE V load(const T* from) {
  if constexpr (std::is_same_v<T, Bf16>) {
    return widen_bf16<V>(load<typename Lanes<V>::U16>(&from->bits));
  } else {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
}
template <typename T, typename V>
GW_INLINE void store(T* to, const V& v) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const auto x = words_of(v), rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16, nan = (x >> 16) | 0x0040u;
    const auto bits = blend((x & 0x7fffffffu) > 0x7f800000u, nan, rounded);
    store(&to->bits, __builtin_convertvector(bits, typename Lanes<V>::U16));
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}

// Load or store the first `count` lanes. Loading sets the other lanes to 0; storing skips the other lanes.
template <typename V>
GW_INLINE V load_some(const float* from, int64_t count) {
  if (count >= kLanes<V>) return load<V>(from);
  V v = {};
  std::memcpy(&v, from, static_cast<size_t>(count) * sizeof(float));
  return v;
}
template <typename V>
GW_INLINE void store_some(float* to, const V& v, int64_t count) {
  if (count >= kLanes<V>) return store(to, v);
  std::memcpy(to, &v, static_cast<size_t>(count) * sizeof(float));
}

// Returns the mask of the first `count` lanes.
template <typename V>
GW_INLINE typename Lanes<V>::I32 first_lanes(int count) {
  return Lanes<V>::kIndex < count;
}
// Returns the mask of the lanes that are neither infinite nor NaN.
template <typename V>
GW_INLINE typename Lanes<V>::I32 finite_lanes(const V& v) {
  return (words_of(v) & 0x7f800000u) != 0x7f800000u;
}

template <typename V>
GW_INLINE V larger(const V& a, const V& b) {
  return blend(a > b, a, b);
}

template <typename V>
GW_INLINE float sum_of(V v) {
  if constexpr (kLanes<V> == 16) {
    const auto halves = std::bit_cast<F32x16>(v);
    return sum_of(halves.low + halves.high);
  } else {
    v += __builtin_shuffle(v, I32x8{4, 5, 6, 7, 0, 1, 2, 3});
    v += __builtin_shuffle(v, I32x8{2, 3, 0, 1, 6, 7, 4, 5});
    return v[0] + v[1];
  }
}
template <typename V>
GW_INLINE auto largest_of(V v) {
  v = larger(v, __builtin_shuffle(v, I32x8{4, 5, 6, 7, 0, 1, 2, 3}));
  v = larger(v, __builtin_shuffle(v, I32x8{2, 3, 0, 1, 6, 7, 4, 5}));
  return v[0] > v[1] ? v[0] : v[1];
}

// Joins the halves of every group of lanes by op(a, b): first those of a's groups, then those of b's groups.
template <int kHalf, typename V, typename Op>
GW_INLINE V join_halves(const V& a, const V& b, const Op& op) {
  I32x8 low, high;
  for (int i = 0; i < 8; ++i) {
    low[i] = i / kHalf * 2 * kHalf + i % kHalf;
    high[i] = low[i] + kHalf;
  }
  return op(__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, high));
}
// Returns sum_of() for each of sixteen vectors, with the same bits and in a tenth of the time.
template <typename V>
GW_INLINE F32x16 sums_of(const V (&v)[16]) {
  const auto add = [](const F32x8& x, const F32x8& y) __attribute__((always_inline)) {
    return x + y;
  };
  F32x8 eight[16], four[8], two[4];
  for (int i = 0; i < 16; ++i) {
    const auto pair = std::bit_cast<F32x16>(v[i]);
    eight[i] = pair.low + pair.high;
  }
  for (int i = 0; i < 8; ++i) four[i] = join_halves<4>(eight[2 * i], eight[2 * i + 1], add);
  for (int i = 0; i < 4; ++i) two[i] = join_halves<2>(four[2 * i], four[2 * i + 1], add);
  return {join_halves<1>(two[0], two[1], add), join_halves<1>(two[2], two[3], add)};
}

// Swaps element j of v[i] and element i of v[j].
GW_INLINE void transpose(F32x8 (&v)[8]) {
  F32x8 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shuffle(v[i], v[i + 1], I32x8{0, 8, 1, 9, 4, 12, 5, 13});
    pairs[i + 1] = __builtin_shuffle(v[i], v[i + 1], I32x8{2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int from = i / 2 * 4 + i % 2;
    fours[2 * i] = __builtin_shuffle(pairs[from], pairs[from + 2], I32x8{0, 1, 8, 9, 4, 5, 12, 13});
    fours[2 * i + 1] = __builtin_shuffle(pairs[from], pairs[from + 2], I32x8{2, 3, 10, 11, 6, 7, 14, 15});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = __builtin_shuffle(fours[i], fours[i + 4], I32x8{0, 1, 2, 3, 8, 9, 10, 11});
    v[i + 4] = __builtin_shuffle(fours[i], fours[i + 4], I32x8{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

// Divides rows into pieces for host ops. The division depends only on the shape, so that results never depend
// on the number of threads.

// Divides into pieces of about 64 KiB of floats: large enough to hide a task's cost, small enough for a
// core's cache.
template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  parallel_for(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)), body);
}

// Runs an element-wise op (kernels/passes/passes.h) on elements [begin, end), in the instruction set of the
// caller.
struct ElementLoop {
  int64_t begin, end;

  template <typename T>
  GW_INLINE T once(const T* scalar) const {
    return *scalar;
  }
  template <typename Element, typename... Arrays>
  GW_INLINE void operator()(const Element& element, Arrays... arrays) const {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      [&](auto... x) __attribute__((always_inline)) {
        element(x...);
        (arrays.store(i, x), ...);
      }
      (arrays.load(i)...);
    }
  }
};

// Conversions between FP32 and BF16 on the host, whole rows at a time.

void widen_all(const Bf16* from, int64_t count, float* to);
// Stores from [+ bias] in `to`, rounded once; `bias` may be null.
void narrow_all(const float* from, const Bf16* bias, int64_t count, Bf16* to);
// Adds x to `to`.
void add_all(const float* x, int64_t count, float* to);

// Sums over rows on the host, in the two stages of kernels/math/column_chunks.h.

// Runs the first stage: calls add_rows(begin, end, partial) for each chunk of rows, to add rows [begin, end)
// to the chunk's `width` partial sums in `workspace`, initially 0. Returns the number of chunks.
template <typename AddRows>
int64_t sum_chunks(int64_t rows, int64_t width, float* workspace, const AddRows& add_rows) {
  const auto chunks = column_chunks(rows);
  parallel_for(chunks.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* partial = workspace + i * width;
      std::fill_n(partial, width, 0.0f);
      add_rows(i * chunks.rows, std::min(rows, (i + 1) * chunks.rows), partial);
    }
  });
  return chunks.count;
}

// Runs the second stage: sum(c) = [sum(c) +] partial(0, c) + ... + partial(count - 1, c), with `stride`
// floats between rows of partial sums.
void combine_partial_sums(const float* partial, int64_t count, int64_t stride, int64_t width, bool accumulate,
                          float* sum);
void combine_partial_sums(const PartialSums& of);

// A buffer for packed operands that begins with a cache line, since loads that cross lines take twice as
// long. The buffer only grows.
template <typename T>
class AlignedMemory {
 public:
  // Returns room for at least `count` elements; the old contents are lost.
  T* reserve(int64_t count) {
    constexpr int64_t kPerLine = sizeof(Line) / sizeof(T);
    const auto lines = static_cast<size_t>((count + kPerLine - 1) / kPerLine);
    if (lines_.size() < lines) lines_.resize(lines);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  struct alignas(64) Line {
    T elements[64 / sizeof(T)];
  };
  std::vector<Line> lines_;
};

}  // namespace host

}  // namespace gradwire
