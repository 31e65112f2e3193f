// The part of the host's ops that all block formats share. Threads process runs of whole blocks: some hundred
// values, whose sums and codes stay in the first cache. Longer runs are slower: reading pauses while a run is
// encoded.
//
// Bytes per element: as in kernels/wire/format.h; large results are written past the caches. Limit: memory;
// with stochastic rounding, the random generator. Deterministic: a value depends on its block only.
#include "kernels/wire/block_host.h"

#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int kRun = 256, kMaxInRun = 4096;  // values per run; kMaxInRun for formats with long blocks
constexpr int64_t kPiece = 32 * 1024;

struct Run {
  int64_t first, last;  // the run's blocks
  int64_t begin;        // index of the run's first value
  int count;            // values in the run
};
Run run_of(const HostBlocks& f, int64_t all, int64_t first, int64_t last) {
  const int64_t blocks = std::max(1, kRun / f.block), end = std::min(last, first + blocks);
  return {first, end, first * f.block, static_cast<int>(std::min(all, end * f.block) - first * f.block)};
}

// Computes S of a run, as in format.h; `x` is scratch.
GW_INLINE void sum_run(const HostBlocks& f, const ReduceEncode& a, const Run& run, float* __restrict s,
                       float* __restrict x) {
  const int n = run.count;
  for (int term = 0; term <= a.num_inputs; ++term) {
    float* const to = term == 0 ? s : x;
    const int input = term < a.own_position ? term : term - 1;
    const float scale = term == a.own_position ? a.own_scale : a.input_scale(input);
    if (term == a.own_position) {
      const float* const own = a.own + run.begin;
      const float* const kept = a.residual + run.begin;
      if (a.residual != nullptr) {
#pragma omp simd
        for (int i = 0; i < n; ++i) to[i] = own[i] + a.residual_scale * kept[i];
      } else {
        memcpy(to, own, static_cast<size_t>(n) * sizeof *to);
      }
    } else {
      f.decode(f.coder, static_cast<const uint8_t*>(a.inputs[input]), a.count, run.first, run.last, to);
    }
    if (term > 0) {
#pragma omp simd
      for (int i = 0; i < n; ++i) s[i] += scale * x[i];
    } else if (scale != 1.0f) {
#pragma omp simd
      for (int i = 0; i < n; ++i) s[i] *= scale;
    }
  }
}

// Converts the encoding error of sums to residuals.
GW_INLINE void to_residuals(float* __restrict rest, int n, float unit) {
  if (unit == 1.0f) return;
#pragma omp simd
  for (int i = 0; i < n; ++i) rest[i] = to_residual(rest[i], unit);
}

// Sets to = scale * from, past the caches if `stream`.
GW_INLINE void put_scaled(const float* __restrict from, float scale, float* __restrict to, int n,
                          bool stream) {
  int i = 0;
  if (stream) {
    for (; i + kWidth <= n; i += kWidth) stream_store(to + i, scale * load<F32x8>(from + i));
  }
#pragma omp simd
  for (int k = i; k < n; ++k) to[k] = scale * from[k];
}

// Prefetches the next input of sum_run(); otherwise reading pauses while a run is encoded.
GW_INLINE void prefetch_run(const ReduceEncode& a, int64_t begin) {
  constexpr int kLine = 64 / sizeof(float);
  const int64_t end = std::min(begin + kRun, a.count);
  for (int64_t i = begin; i < end; i += kLine) {
    __builtin_prefetch(a.own + i);
    if (a.residual != nullptr) __builtin_prefetch(a.residual + i, 1);
  }
}

GW_SIMD void reduce_encode_piece(const HostBlocks& f, const ReduceEncode& a, int64_t first, int64_t last) {
  alignas(64) float s[kMaxInRun], sent[kMaxInRun];
  static thread_local Candidates candidates;
  uint16_t buffer[random_buffer(kMaxInRun)];
  const uint64_t step = step_of(a.rounding);
  const bool draws = f.stochastic && a.rounding.mode == Rounding::stochastic && a.wire != nullptr;
  const bool own_only = f.encode_own != nullptr && a.num_inputs == 0 && a.residual != nullptr &&
                        a.wire != nullptr && a.out == nullptr;
  while (first < last) {
    const Run run = run_of(f, a.count, first, last);
    const int n = run.count, room = static_cast<int>(run.last - run.first) * f.block;
    first = run.last;
    float* const residual = a.residual != nullptr ? a.residual + run.begin : nullptr;
    if (own_only && n == room) {
      f.encode_own(f.coder, &a, run.first, run.last, &candidates);
      to_residuals(residual, n, residual_unit(a));
      continue;
    }
    sum_run(f, a, run, s, sent);
    prefetch_run(a, run.begin + n);
    if (a.wire == nullptr) {
      put_scaled(s, a.out_scale, a.out + run.begin, n, false);
      if (residual != nullptr) memset(residual, 0, static_cast<size_t>(n) * sizeof *residual);
      continue;
    }
    // Clears the last block's padding, in which decoding a rotated block left values.
    memset(s + n, 0, static_cast<size_t>(room - n) * sizeof *s);
    const uint16_t* random = nullptr;
    if (draws) {
      const auto element = static_cast<uint64_t>(a.rounding.first_element + run.begin);
      random = random_bits(a.rounding.seed, step, element, room, buffer);
    }
    auto* const wire = static_cast<uint8_t*>(a.wire);
    if (residual != nullptr && a.out == nullptr && f.encode_with_residual != nullptr) {
      f.encode_with_residual(f.coder, s, a.count, run.first, run.last, random, wire, residual);
      to_residuals(residual, n, residual_unit(a));
      continue;
    }
    f.encode(f.coder, s, a.count, run.first, run.last, random, wire);
    if (residual == nullptr && a.out == nullptr) continue;
    f.decode(f.coder, wire, a.count, run.first, run.last, sent);
    if (residual != nullptr && f.far) {
#pragma omp simd
      for (int i = 0; i < n; ++i) residual[i] = rest_of<true>(s[i], sent[i]);
    } else if (residual != nullptr) {
#pragma omp simd
      for (int i = 0; i < n; ++i) residual[i] = rest_of<false>(s[i], sent[i]);
    }
    if (residual != nullptr) to_residuals(residual, n, residual_unit(a));
    if (a.out != nullptr) put_scaled(sent, a.out_scale, a.out + run.begin, n, false);
  }
}

GW_SIMD void decode_piece(const HostBlocks& f, const Decode& a, bool stream, int64_t first, int64_t last) {
  alignas(64) float values[kMaxInRun];
  while (first < last) {
    const Run run = run_of(f, a.count, first, last);
    f.decode(f.coder, static_cast<const uint8_t*>(a.wire), a.count, run.first, run.last, values);
    put_scaled(values, a.scale, a.out + run.begin, run.count, stream);
    forget_not_finite(values, a.residual == nullptr ? nullptr : a.residual + run.begin, run.count);
    first = run.last;
  }
  if (stream) stream_fence();
}

}  // namespace

void reduce_encode_blocks(const HostBlocks& f, const ReduceEncode& a) {
  parallel_for((a.count + f.block - 1) / f.block, std::max<int64_t>(1, kPiece / f.block),
               [&](int64_t first, int64_t last) { reduce_encode_piece(f, a, first, last); });
}

void decode_blocks(const HostBlocks& f, const Decode& a) {
  const bool stream = streams(a.out, a.count * int64_t{sizeof(float)});
  parallel_for((a.count + f.block - 1) / f.block, std::max<int64_t>(1, kPiece / f.block),
               [&](int64_t first, int64_t last) { decode_piece(f, a, stream, first, last); });
}

}  // namespace gradwire::host
