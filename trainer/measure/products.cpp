#include "trainer/measure/products.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <vector>

#include "kernels/blas/blas.h"
#include "kernels/blas/kernel_set.h"
#include "kernels/gemm/bf16_gemm.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

GW_ALLOW_FMA

namespace gradwire {
namespace {

// Kernels for the processor reach at least 80 % of the FMA peak, SSE kernels (without FMA) at most half.
constexpr double kLeastShare = 0.6;

constexpr int kRuns = 8;
constexpr int kChains = 12;  // enough to hide the latency of FMA, and few enough for AVX2's 16 registers
constexpr int64_t kRounds = 1'000'000;
constexpr int64_t kSize = 512;  // rows and columns of the product

#ifndef GRADWIRE_SANITIZED  // a sanitized build would measure the sanitizer
using Ymm [[gnu::vector_size(32)]] = float;
using Zmm [[gnu::vector_size(64)]] = float;

// Runs independent chains of FMAs in registers.
template <typename Vector>
GW_INLINE float fma_chains() {
  Vector sum[kChains], factor = Vector{} + 0.999f, term = Vector{} + 0.001f;
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sum[i] = Vector{} + static_cast<float>(2 + i);
  for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sum[i] = sum[i] * factor + term;
  }
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) sum[0] += sum[i];
  return sum[0][0];
}
GW_SIMD float fma_chains_avx2() {
  return fma_chains<Ymm>();
}
GW_SIMD float fma_chains_avx512() {
  return fma_chains<Zmm>();
}

template <typename Work>
double cpu_seconds(const Work& work) {
  auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  const double start = now();
  work();
  return now() - start;
}
#endif

}  // namespace

std::string host_products_text() {
  const GradwireBlas& blas = *gradwire_blas();
  if (blas.error != nullptr) throw BadInput(blas.error);
  std::string text = fmt::format("{}, {} kernels", blas.version, blas.kernels);
  if (blas.wanted != nullptr) {
    text += " (GRADWIRE_BLAS_KERNELS)";
  } else if (blas.instead_of != nullptr) {
    text +=
        fmt::format(" (chosen by CPU features; OpenBLAS would use {} for this CPU model)", blas.instead_of);
  }
  const host::Bf16Products way = host::bf16_products();
  return way == host::Bf16Products::widened ? text : fmt::format("{}; BF16 by {}", text, host::name_of(way));
}

double measure_fma_share() {
#ifdef GRADWIRE_SANITIZED
  return std::numeric_limits<double>::quiet_NaN();
#else
  const blas::Level level = blas::level_of_processor();
  if (level == blas::Level::base) return std::numeric_limits<double>::quiet_NaN();
  const bool wide = level == blas::Level::avx512;
  const std::vector<float> a(kSize * kSize, 0.5f), b(kSize * kSize, 0.25f);
  std::vector<float> c(kSize * kSize);
  double fma_s = std::numeric_limits<double>::infinity(), product_s = fma_s;
  for (int run = 0; run < kRuns; ++run) {
    fma_s = std::min(fma_s, cpu_seconds([&] {
                       volatile float kept = wide ? fma_chains_avx512() : fma_chains_avx2();
                       (void)kept;
                     }));
    product_s = std::min(product_s, cpu_seconds([&] {
                           if (!gradwire_blas_sgemm(false, false, kSize, kSize, kSize, 1.0f, a.data(), kSize,
                                                    b.data(), kSize, 0.0f, c.data(), kSize)) {
                             throw_no_memory(0);
                           }
                         }));
  }
  const double fmas = static_cast<double>(kRounds * kChains * (wide ? 16 : 8));
  return static_cast<double>(kSize * kSize * kSize) / product_s / (fmas / fma_s);
#endif
}

std::string slow_products_warning(double fma_share) {
  if (!(fma_share < kLeastShare)) return {};  // ignore NaN
  const GradwireBlas& blas = *gradwire_blas();
  const std::string remedy =
      blas.wanted != nullptr
          ? fmt::format("unset GRADWIRE_BLAS_KERNELS={}", blas.wanted)
          : fmt::format(
                "{}'s {} kernels do not suit it; build with a newer OpenBLAS, or try GRADWIRE_BLAS_KERNELS",
                blas.version, blas.kernels);
  return fmt::format("products run at {} % of this processor's FMA peak: {}", std::lround(100 * fma_share),
                     remedy);
}

}  // namespace gradwire
