// Block formats on the host. A format's encode and decode are compiled for each instruction set; sums,
// residuals, random bits and threads are the same for all formats, and compiled once (block_host.cpp).
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/math/random.h"
#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_vectors.h"
#include "kernels/wire/format.h"
#include "kernels/wire/topk_vectors.h"

namespace gradwire::host {

// Helpers for the host's ops of the wire formats: parts of a call, random bits.

template <typename T>
void advance(T*& p, int64_t n) {
  if (p != nullptr) p += n;
}

// Draws random16() for `count` elements starting at `first`, sixteen at a time. Returns the address of the
// bits in `buffer`, which has room for random_buffer(count) elements.
inline constexpr int kDraw = 16;
constexpr int random_buffer(int count) {
  return (count + kDraw - 1) / kDraw * kDraw + kDraw;
}
GW_INLINE const uint16_t* random_bits(uint64_t seed, uint64_t step, uint64_t first, int count,
                                      uint16_t* buffer) {
  static_assert(2 * kWidth == kDraw);
  const int shift = static_cast<int>(first % kDraw);
  RoundingKey key = rounding_key(seed, step, first);
  for (int i = 0; i < shift + count; i += kDraw) {
    const uint64_t element = first - static_cast<uint64_t>(shift) + static_cast<uint64_t>(i);
    if (static_cast<uint32_t>(element) == 0) key = rounding_key(seed, step, element);
    const U32x8 numbers = U32x8{0, 1, 2, 3, 4, 5, 6, 7} + rounding_word_of(element);
    const U32x8 words = rounding_word(key, numbers);
    store(buffer + i, __builtin_convertvector(words & 0xffffu, U16x8));
    store(buffer + i + kWidth, __builtin_convertvector(words >> 16, U16x8));
  }
  return buffer + shift;
}

// Sets `kept`, which may be null, to 0 where x is not finite.
GW_INLINE void forget_not_finite(const float* x, float* kept, int64_t count) {
  if (kept == nullptr) return;
  uint32_t any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < count; ++i) any |= is_finite(x[i]) ? 0u : 1u;
  if (any == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(x[i])) kept[i] = 0.0f;
  }
}

template <typename V>
struct OneLane : SelectingLane<V>, RunLane<V> {
  template <typename Body>
  GW_INLINE void each(int n, const Body& body) const {
#pragma omp simd
    for (int i = 0; i < n; ++i) body(i);
  }
  template <typename Value>
  GW_INLINE uint32_t max(int n, const Value& value) const {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < n; ++i) {
      const uint32_t x = value(i);
      largest = x > largest ? x : largest;
    }
    return largest;
  }
  template <typename Value>
  GW_INLINE float sum(int n, const Value& value) const {
    constexpr int kVectors = kSumLanes / kWidth;
    F32x8 sums[kVectors] = {};
    alignas(32) float x[kSumLanes];
    int begin = 0;
    for (; begin + kSumLanes <= n; begin += kSumLanes) {
#pragma omp simd
      for (int l = 0; l < kSumLanes; ++l) x[l] = value(begin + l);
      for (int v = 0; v < kVectors; ++v) sums[v] += load<F32x8>(x + v * kWidth);
    }
    static_assert(kVectors == 4 && kWidth == 8);
    if (begin < n) {
      for (int v = 0; v < kVectors; ++v) store(x + v * kWidth, sums[v]);
      for (int l = 0; begin + l < n; ++l) x[l] += value(begin + l);
      for (int v = 0; v < kVectors; ++v) sums[v] = load<F32x8>(x + v * kWidth);
    }
    F32x8 y = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    y += __builtin_shufflevector(y, y, 4, 5, 6, 7, 4, 5, 6, 7);
    y += __builtin_shufflevector(y, y, 2, 3, 2, 3, 2, 3, 2, 3);
    return y[0] + y[1];
  }
  template <typename Test>
  GW_INLINE int count(int n, const Test& test) const {
    int all = 0;
#pragma omp simd reduction(+ : all)
    for (int i = 0; i < n; ++i) all += test(i) ? 1 : 0;
    return all;
  }
  template <typename Test, typename Take>
  GW_INLINE void pick(int n, const Test& test, const Take& take) const {
    for (int i = 0, k = 0; i < n; ++i) {
      if (test(i)) take(k++, i);
    }
  }

  // Packs codes in the layouts of codes.h. If there are too few bytes for the compiler to vectorize, first
  // computes all codes, as words.
  template <int kBits, typename Code>
  GW_INLINE void pack(int n, uint8_t* bytes, const Code& code) const {
    const int m = n * kBits / 8;
    if (lower_code_bits(kBits) == kBits && kBits != 8 && m >= kFullBytes) {
#pragma omp simd
      for (int j = 0; j < m; ++j) {
        uint32_t byte = 0;
        for (int part = 0; part < 8 / kBits; ++part) byte |= code(j + part * m) << (part * kBits);
        bytes[j] = static_cast<uint8_t>(byte);
      }
      return;
    }
    alignas(64) uint32_t codes[kMaxCodes];
    each(n, [&](int i) { codes[i] = code(i); });
    pack_all<kBits, typename Lanes<V>::U32>(codes, n, bytes);
  }
  template <int kBits, typename Take>
  GW_INLINE void unpack(const uint8_t* bytes, int n, int count, const Take& take) const {
    const int m = n * kBits / 8;
    if (lower_code_bits(kBits) == kBits && kBits != 8 && m >= kFullBytes) {
      for (int part = 0; part < 8 / kBits && part * m < count; ++part) {
        const int first = part * m, here = count - first < m ? count - first : m;
        each(here, [&](int j) {
          take(first + j, (static_cast<uint32_t>(bytes[j]) >> (part * kBits)) & ((1u << kBits) - 1u));
        });
      }
      return;
    }
    alignas(64) uint32_t codes[kMaxCodes];
    unpack_all<kBits>(bytes, n, codes);
    each(count, [&](int i) { take(i, codes[i]); });
  }

 private:
  static constexpr int kMaxCodes = 512, kFullBytes = 32;
};

// Loops over blocks [first, last) of the encoding of `count` values. `values` begins with block `first`.
struct HostBlocks {
  const void* coder;     // a BlockCoder<F>
  int block;             // values per block
  bool stochastic, far;  // far: as in rest_of()
  // Encodes values, which are 0 after `count`. `random`: as in block.h, for all values.
  void (*encode)(const void* coder, const float* values, int64_t count, int64_t first, int64_t last,
                 const uint16_t* random, uint8_t* wire);
  // Encodes, and sets residual = values - decoded values. Null where a combined loop is not faster for the
  // format or its rotation.
  void (*encode_with_residual)(const void* coder, const float* values, int64_t count, int64_t first,
                               int64_t last, const uint16_t* random, uint8_t* wire, float* residual);
  // Computes S of whole blocks from `own` and the residual, encodes it, and leaves the residual before
  // to_residual(). Null except for top-k. `candidates` are for the next blocks.
  void (*encode_own)(const void* coder, const ReduceEncode* a, int64_t first, int64_t last,
                     Candidates* candidates);
  // Decodes into values, which holds whole blocks.
  void (*decode)(const void* coder, const uint8_t* wire, int64_t count, int64_t first, int64_t last,
                 float* values);
};
void reduce_encode_blocks(const HostBlocks& format, const ReduceEncode& a);
void decode_blocks(const HostBlocks& format, const Decode& a);

// Returns the number of values in block `block`.
template <typename F>
GW_INLINE int values_in(const BlockCoder<F>& coder, int64_t count, int64_t block) {
  return static_cast<int>(std::min<int64_t>(coder.block(), count - block * coder.block()));
}

namespace {  // internal to each file: the compiler clones these functions for each instruction set

// Runs kBody, compiled for the processors that have V as a register.
template <auto kBody, typename... Args>
GW_NARROW void run_narrow(Args... args) {
  kBody(args...);
}
#ifdef GW_WIDE
template <auto kBody, typename... Args>
GW_WIDE void run_wide(Args... args) {
  kBody(args...);
}
#endif
template <typename V, auto kBody, typename... Args>
void compiled(Args... args) {
#ifdef GW_WIDE
  if constexpr (std::is_same_v<V, WideF32>) return run_wide<kBody>(args...);
#endif
  run_narrow<kBody>(args...);
}

// Sink that stores the residual: values minus decoded values.
struct KeepRest {
  const float* values;
  float* residual;
  // Returns whether the residual already holds the values.
  GW_INLINE bool in_place() const { return values == residual; }
  template <bool kFinite>
  GW_INLINE void put(int i, float sent) const {
    residual[i] = kFinite ? values[i] - sent : rest_of<false>(values[i], sent);
  }
  template <bool kFar, typename V>
  GW_INLINE void put_vector(int i, const V& sent) const {
    const V rest = load<V>(values + i) - sent;
    store(residual + i, kFar ? saturated(rest) : rest);
  }
};
// Sink that stores the decoded values.
struct KeepSent {
  float* sent;
  template <bool kFinite>
  GW_INLINE void put(int i, float x) const {
    sent[i] = x;
  }
};
// True if a format's encode takes a sink for the decoded values. Asks with the coder's own place of a block:
// fp8's is not a pointer.
template <typename F>
inline constexpr bool takes_sink = requires(const BlockCoder<F> coder, const float* values, uint8_t* wire,
                                            KeepRest keep) {
  coder.format.encode(OneLane<F32x8>(), values, 0, nullptr, coder.place(wire, 0, 0), keep);
}
|| requires(const BlockCoder<F> coder, const float* values, uint8_t* wire, float* scratch, KeepRest keep) {
  coder.format.encode(OneLane<F32x8>(), values, 0, nullptr, coder.place(wire, 0, 0), scratch, keep);
};

// True if RunLane encodes runs of the format, if not rotated.
template <typename F>
inline constexpr bool encodes_runs = requires(const F format, const float* values, uint8_t* wire) {
  OneLane<F32x8>().encode_run(format, values, static_cast<const uint16_t*>(nullptr), wire, NoSink());
};
// True if encode_rotated() encodes blocks of the format, if rotated.
template <typename F>
inline constexpr bool reports_rotated = std::is_same_v<F, Eden> ||
                                        (takes_sink<F> && F::kRotation == Rotation::optional);

// The ops of HostBlocks. V: the vector that holds values. The functions copy the coder, so that its options
// stay in registers.
template <typename F, typename V>
struct BlockLoops {
  static constexpr OneLane<V> kLane = {};

  GW_INLINE static bool whole_run(const BlockCoder<F>& coder, int64_t count, int64_t first, int64_t last) {
    const int64_t n = coder.block();
    return (last - first) * n == std::max<int64_t>(n, kLane.kRun) && last * n <= count;
  }
  GW_INLINE static void encode(const void* its_coder, const float* values, int64_t count, int64_t first,
                               int64_t last, const uint16_t* random, uint8_t* wire) {
    alignas(64) float scratch[F::kMaxBlock];
    const BlockCoder<F> coder = *static_cast<const BlockCoder<F>*>(its_coder);
    const int n = coder.block();
    if constexpr (encodes_runs<F>) {
      if (!coder.rotates() && whole_run(coder, count, first, last) &&
          kLane.encode_run(coder.format, values, random, coder.place(wire, count, first), NoSink()))
        return;
    }
    for (int64_t block = first; block < last; ++block) {
      coder.encode(kLane, values, values_in(coder, count, block), random, coder.place(wire, count, block),
                   scratch);
      values += n;
      if (random != nullptr) random += n;
    }
  }
  GW_INLINE static void decode(const void* its_coder, const uint8_t* wire, int64_t count, int64_t first,
                               int64_t last, float* values) {
    const BlockCoder<F> coder = *static_cast<const BlockCoder<F>*>(its_coder);
    const int n = coder.block();
    for (int64_t block = first; block < last; ++block, values += n)
      coder.decode(kLane, coder.place(wire, count, block), values_in(coder, count, block), values);
  }
  // Encodes whole blocks and returns true, or returns false if a value is not finite.
  GW_INLINE static bool encode_rotated(const BlockCoder<F>& coder, const float* values, int64_t count,
                                       int64_t first, int64_t last, const uint16_t* random, uint8_t* wire,
                                       float* residual) {
    alignas(64) float x[F::kMaxBlock];
    const int n = coder.block();
    for (int64_t block = first; block < last; ++block, values += n, residual += n) {
      kLane.rotate(values, n, 1.0f / static_cast<float>(n), x);
      if (!is_finite(x[0])) return false;  // a sum of all values
      const auto to = coder.place(wire, count, block);
      if constexpr (std::is_same_v<F, Eden>) {
        kLane.encode_block(coder.format, x, to, x);
      } else {
        coder.encode_values(kLane, static_cast<const float*>(x), n, random, to, x, KeepSent{x});
      }
      const KeepRest keep{values, residual};
      kLane.rotate_back(x, n,
                        [=](int i, const V& sent) GW_HD_LAMBDA { keep.template put_vector<true>(i, sent); });
      if (random != nullptr) random += n;
    }
    return true;
  }
  GW_INLINE static void encode_with_residual(const void* its_coder, const float* values, int64_t count,
                                             int64_t first, int64_t last, const uint16_t* random,
                                             uint8_t* wire, float* residual) {
    alignas(64) float sent[std::max(F::kMaxBlock, OneLane<V>::kRun)];
    const BlockCoder<F> coder = *static_cast<const BlockCoder<F>*>(its_coder);
    const int n = coder.block();
    if (coder.rotates()) {
      if constexpr (reports_rotated<F>) {
        if (last * n <= count && encode_rotated(coder, values, count, first, last, random, wire, residual))
          return;
      }
    } else if constexpr (encodes_runs<F>) {
      if (whole_run(coder, count, first, last) &&
          kLane.encode_run(coder.format, values, random, coder.place(wire, count, first),
                           KeepRest{values, residual}))
        return;
    }
    if (!takes_sink<F> || coder.rotates()) {
      compiled<V, BlockLoops::encode>(its_coder, values, count, first, last, random, wire);
      compiled<V, BlockLoops::decode>(its_coder, static_cast<const uint8_t*>(wire), count, first, last,
                                      static_cast<float*>(sent));
      const auto all = static_cast<int>(std::min(count, last * n) - first * n);
      for (int i = 0; i < all; ++i) residual[i] = rest_of<true>(values[i], sent[i]);
      return;
    }
    if constexpr (takes_sink<F>) {
      for (int64_t block = first; block < last; ++block, values += n, residual += n) {
        const int here = values_in(coder, count, block);
        const auto to = coder.place(wire, count, block);
        if (here == n) {
          coder.encode_values(kLane, values, n, random, to, sent, KeepRest{values, residual});
        } else {
          coder.encode_values(kLane, values, here, random, to, sent);
          coder.format.decode(kLane, coder.place(static_cast<const uint8_t*>(wire), count, block), here,
                              sent);
          for (int i = 0; i < here; ++i) residual[i] = rest_of<false>(values[i], sent[i]);
        }
        if (random != nullptr) random += n;
      }
    }
  }
};

template <typename V>
GW_INLINE void encode_own(const void* its_coder, const ReduceEncode* its_args, int64_t first, int64_t last,
                          Candidates* candidates) {
  const ReduceEncode& a = *its_args;
  const BlockCoder<TopK> coder = *static_cast<const BlockCoder<TopK>*>(its_coder);
  OneLane<V> lane;
  lane.candidates = candidates;
  alignas(64) float places[TopK::kMaxBlock];
  const int n = coder.block();
  for (int64_t block = first; block < last; ++block) {
    float* const s = a.residual + block * n;
    lane.add_own(a.own + block * n, a.own_scale, a.residual_scale, n, s);
    coder.format.encode(lane, s, n, nullptr, coder.place(static_cast<uint8_t*>(a.wire), a.count, block),
                        places, KeepRest{s, s});
  }
}

template <typename F, typename V>
HostBlocks host_blocks(const BlockCoder<F>& coder) {
  using Loops = BlockLoops<F, V>;
  HostBlocks blocks{&coder,
                    coder.block(),
                    F::kStochastic,
                    coder.far(),
                    compiled<V, Loops::encode>,
                    nullptr,
                    nullptr,
                    compiled<V, Loops::decode>};
  if constexpr (std::is_same_v<F, TopK>) blocks.encode_own = compiled<V, encode_own<V>>;
  if constexpr (takes_sink<F> || encodes_runs<F> || reports_rotated<F>) {
    if (!coder.rotates() || reports_rotated<F>)
      blocks.encode_with_residual = compiled<V, Loops::encode_with_residual>;
  }
  return blocks;
}
template <typename F>
HostBlocks host_blocks(const BlockCoder<F>& coder) {
#ifdef GW_WIDE
  if (runs_wide()) return host_blocks<F, WideF32>(coder);
#endif
  return host_blocks<F, F32x8>(coder);
}

}  // namespace

template <typename F>
void reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& a) {
  reduce_encode_blocks(host_blocks(coder), a);
}
template <typename F>
void decode(const BlockCoder<F>& coder, const Decode& a) {
  decode_blocks(host_blocks(coder), a);
}

}  // namespace gradwire::host
