#include "trainer/measure/peaks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <tuple>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/math/random.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/format.h"
#include "runtime/device/device_cuda.h"
#include "runtime/threads/thread_pool.h"
#include "trainer/measure/products.h"
#include "trainer/measure/timing.h"

namespace gradwire {
namespace {

constexpr double kBudgetMs = 40;  // time of a measurement

// Fills a matrix with values in (-1, 1). A GPU multiplies constants faster than real data.
Buffer random_matrix(const Stream& stream, int64_t count) {
  constexpr int64_t kDrawn = 1 << 18;
  std::vector<float> drawn(static_cast<size_t>(std::min(count, kDrawn)));
  for (size_t i = 0; i < drawn.size(); ++i) {
    drawn[i] = 2 * uniform01(philox(1, 0x5045'0001, i / 4).v[i % 4]) - 1;
  }
  Buffer matrix = make_buffer<float>(stream.device(), count);
  const FinishOnError finish(stream);
  for (int64_t at = 0; at < count; at += kDrawn) {
    copy(stream, matrix.as<float>() + at, drawn.data(),
         static_cast<size_t>(std::min(kDrawn, count - at)) * sizeof(float));
  }
  stream.synchronize();
  return matrix;
}

// Returns the matrix rounded to BF16.
Buffer rounded(const Stream& stream, const Buffer& matrix, int64_t count) {
  Buffer out = make_buffer<Bf16>(stream.device(), count);
  kBf16->reduce_encode(stream, {.own = matrix.as<float>(), .wire = out.data(), .count = count});
  stream.synchronize();
  return out;
}

double product_tflops(const Stream& stream, Precision precision) {
  const bool host = stream.device().is_host(), bf16 = precision == Precision::bf16;
  const int64_t n = host ? 768 : precision == Precision::fp32 ? 4096 : 8192;
  // On the host: one product per thread, so that no product is split between threads.
  const int64_t batch = host ? host_threads() : 1;
  Buffer a = random_matrix(stream, n * n), b = random_matrix(stream, n * n);
  if (bf16) a = rounded(stream, a, n * n), b = rounded(stream, b, n * n);
  const Buffer c = make_buffer<float>(stream.device(), batch * n * n);
  Gemm product{.m = n,
               .n = n,
               .k = n,
               .a = a.as<const float>(),
               .lda = n,
               .b = b.as<const float>(),
               .ldb = n,
               .c = c.as<float>(),
               .ldc = n,
               .stride_c = n * n,
               .batch = batch,
               .precision = bf16 ? Precision::fp32 : precision};
  if (bf16) product.a = a.as<const Bf16>(), product.b = b.as<const Bf16>(), product.c = c.as<Bf16>();
  const double ms = time_runs(
                        stream, [&] { gemm(stream, product); }, kBudgetMs)
                        .fastest_ms;
  return 2.0 * static_cast<double>(batch * n) * static_cast<double>(n * n) / (ms * 1e9);
}

// Copies with non-temporal stores. A normal store first reads its cache line, so a copy reaches at most two
// thirds of the bandwidth.
void copy_piece(std::byte* to, const std::byte* from, int64_t bytes) {
  using Vector [[gnu::vector_size(16), gnu::may_alias]] = float;
  for (int64_t i = 0; i < bytes; i += 16) {
    host::stream_store(to + i, *reinterpret_cast<const Vector*>(from + i));
  }
  host::stream_fence();
}

double copy_gb_per_s(const Stream& stream) {
  const bool host = stream.device().is_host();
  const int64_t bytes = host ? 64 << 20 : 256 << 20;
  const Buffer from(stream.device(), static_cast<size_t>(bytes)), to(stream.device(), from.bytes());
  fill_zero(stream, from.data(), from.bytes());
  double ms = std::numeric_limits<double>::infinity();
  if (host) {
    auto* out = to.as<std::byte>();
    auto* in = from.as<const std::byte>();
    for (bool past : {true, false}) {
      ms = std::min(ms, time_runs(
                            stream,
                            [&] {
                              parallel_for(bytes, 1 << 20, [&](int64_t begin, int64_t end) {
                                if (past) return copy_piece(out + begin, in + begin, end - begin);
                                std::memcpy(out + begin, in + begin, static_cast<size_t>(end - begin));
                              });
                            },
                            kBudgetMs)
                            .fastest_ms);
    }
  } else {
    ms = time_runs(
             stream, [&] { copy(stream, to.data(), from.data(), from.bytes()); }, kBudgetMs)
             .fastest_ms;
  }
  return 2.0 * static_cast<double>(bytes) / (ms * 1e6);
}

// Returns the best peaks of this process so far. The best value counts, because a shared machine can be half
// as fast for seconds.
Peaks best_so_far(Device device, Precision precision, const Peaks& now) {
  static std::mutex mutex;
  static std::vector<std::tuple<Device, Precision, Peaks>> seen;
  std::lock_guard lock(mutex);
  for (auto& [its_device, its_precision, best] : seen) {
    if (its_device != device || its_precision != precision) continue;
    return best = {.tflops = std::fmax(best.tflops, now.tflops),
                   .copy_gb_per_s = std::fmax(best.copy_gb_per_s, now.copy_gb_per_s),
                   .fma_share = std::fmax(best.fma_share, now.fma_share)};
  }
  seen.emplace_back(device, precision, now);
  return now;
}

}  // namespace

Peaks measure_peaks(Device device, Precision precision) {
  const Stream stream = device.is_host() ? Stream::immediate_host() : Stream::create(device, "peaks");
  return best_so_far(
      device, precision,
      {.tflops = product_tflops(stream, precision),
       .copy_gb_per_s = copy_gb_per_s(stream),
       .fma_share = device.is_host() ? measure_fma_share() : std::numeric_limits<double>::quiet_NaN()});
}

}  // namespace gradwire
