#include "trainer/measure/peaks.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <span>
#include <tuple>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/report.h"
#include "kernels/blas/blas.h"
#include "kernels/blas/kernel_set.h"
#include "kernels/gemm/bf16_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/math/random.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/format.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

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

double copy_gb_per_s(const Stream& stream) {
  const bool host = stream.device().is_host();
  const int64_t bytes = host ? 64 << 20 : 256 << 20;
  const Buffer from(stream.device(), static_cast<size_t>(bytes)), to(stream.device(), from.bytes());
  fill_zero(stream, from.data(), from.bytes());
  double ms = std::numeric_limits<double>::infinity();
  if (host) {
    auto* out = to.as<std::byte>();
    auto* in = from.as<const std::byte>();
    // With non-temporal stores, or memcpy. A normal store first reads its cache line, so a copy reaches at
    // most two thirds of the bandwidth.
    using Vector [[gnu::vector_size(16), gnu::may_alias]] = float;
    for (bool past : {true, false}) {
      const auto piece = [&](int64_t begin, int64_t end) {
        if (!past) return void(std::memcpy(out + begin, in + begin, static_cast<size_t>(end - begin)));
        for (int64_t i = begin; i < end; i += 16)
          host::stream_store(out + i, *reinterpret_cast<const Vector*>(in + i));
        host::stream_fence();
      };
      const auto copy_all = [&] { parallel_for(bytes, 1 << 20, piece); };
      ms = std::min(ms, time_runs(stream, copy_all, kBudgetMs).fastest_ms);
    }
  } else {
    ms = time_runs(
             stream, [&] { copy(stream, to.data(), from.data(), from.bytes()); }, kBudgetMs)
             .fastest_ms;
  }
  return 2.0 * static_cast<double>(bytes) / (ms * 1e6);
}

}  // namespace

Peaks measure_peaks(Device device, Precision precision) {
  static std::mutex mutex;
  static std::vector<std::tuple<Device, Precision, Peaks>> seen;
  const Stream stream = device.is_host() ? Stream::immediate_host() : Stream::create(device, "peaks");
  const Peaks now{
      .tflops = product_tflops(stream, precision),
      .copy_gb_per_s = copy_gb_per_s(stream),
      .fma_share = device.is_host() ? measure_fma_share() : std::numeric_limits<double>::quiet_NaN()};
  // The best value counts, because a shared machine can be half as fast for seconds.
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

namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  while (!line.empty() && (line.back() == ' ' || line.back() == '\r')) line.pop_back();
  return line;
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

Network find_network(const std::string& sys) {
  Network network;
  for (const fs::path& folder : entries(fs::path(sys) / "class/net")) {
    NetInterface interface { .name = folder.filename().string() };
    if (interface.name == "lo" || !fs::is_directory(folder)) continue;
    interface.up = first_line(folder / "operstate") == "up";
    interface.megabits = parse_number<int64_t>(first_line(folder / "speed"), 1).value_or(-1);
    network.interfaces.push_back(interface);
  }
  for (const fs::path& device : entries(fs::path(sys) / "class/infiniband")) {
    for (const fs::path& folder : entries(device / "ports")) {
      InfinibandPort port{.device = device.filename().string(),
                          .link = first_line(folder / "link_layer"),
                          .rate = first_line(folder / "rate"),
                          .active = first_line(folder / "state").find("ACTIVE") != std::string::npos};
      port.port = parse_number<int>(folder.filename().string()).value_or(port.port);
      network.ports.push_back(port);
    }
  }
  return network;
}

}  // namespace gradwire

GW_ALLOW_FMA

namespace gradwire {
namespace {

// Kernels for the processor reach at least 80 % of the FMA peak, SSE kernels (without FMA) at most half.
constexpr double kMinShare = 0.6;

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
  if (!(fma_share < kMinShare)) return {};  // ignore NaN
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

namespace gradwire {

Timing time_runs(const Stream& stream, const std::function<void()>& work, double budget_ms) {
  using Clock = std::chrono::steady_clock;
  constexpr int kMinRuns = 2, kMaxRuns = 20;
  Event begin = Event::create_timer(stream.device()), end = Event::create_timer(stream.device());
  work();
  stream.synchronize();
  Timing timing{.fastest_ms = std::numeric_limits<double>::infinity()};
  double sum = 0, squares = 0;
  const auto start = Clock::now();
  for (int run = 0; run < kMaxRuns; ++run) {
    begin.record(stream);
    work();
    end.record(stream);
    end.synchronize();
    const double ms = elapsed_ms(begin, end);
    sum += ms, squares += ms * ms;
    timing.fastest_ms = std::min(timing.fastest_ms, ms);
    timing.mean_ms = sum / (run + 1);
    const double variance = std::max(0.0, squares - sum * timing.mean_ms) / std::max(run, 1);
    timing.deviation = sum > 0 ? std::sqrt(variance) / timing.mean_ms : 0;
    const std::chrono::duration<double, std::milli> taken = Clock::now() - start;
    if (run + 1 >= kMinRuns && taken.count() > budget_ms) break;
  }
  return timing;
}

namespace {

constexpr int64_t kAlignment = 4;  // of packed_layout()

// Averages gradients of which all ranks have the same values, and adds the errors of their tensors.
void add_errors(Communicator& comm, const CompressionSpec& spec, const std::vector<GradientTensor>& tensors,
                std::span<const float> gradients, RelativeError& errors) {
  const Stream stream = Stream::create(comm.device(), "error");
  Reducer reducer(comm, spec, tensors,
                  {.bucket_bytes = kOneBucket, .timing = false, .alignment = kAlignment});
  to_device<float>(stream, reducer.gradients().as<float>(), gradients);
  for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
  reducer.wait(stream);
  const std::vector<float> mean =
      to_host(stream, reducer.gradients().as<const float>(), static_cast<int64_t>(gradients.size()));
  comm.check();
  for (int i = 0; i < reducer.tensors(); ++i) {
    const auto from = [begin = reducer.offset(i)](const float* values) {
      return [at = values + begin](int64_t element) { return at[element]; };
    };
    errors.add(from(gradients.data()), from(mean.data()), tensors[static_cast<size_t>(i)].count());
  }
}

}  // namespace

double encode_error(Device device, const std::vector<GradientTensor>& tensors,
                    const std::vector<float>& gradients, const std::string& text) {
  CompressionSpec spec = CompressionSpec::parse(text);
  spec.schedule = ScheduleKind::automatic;  // the pair has no nodes
  spec.fp32_intra_node = false;
  RelativeError errors[2];
  const auto pair = create_local_ranks({device, device}, std::chrono::seconds(60), {});
  run_local_ranks(pair, [&](Communicator& comm) {
    for (const BucketRange& bucket : lay_out(tensors, kAlignment, int64_t{25} << 20).buckets) {
      add_errors(comm, spec, {tensors.begin() + bucket.first_tensor, tensors.begin() + bucket.last_tensor},
                 {gradients.data() + bucket.begin, static_cast<size_t>(bucket.elements())},
                 errors[comm.rank()]);
    }
  });
  return errors[0].root();
}

std::optional<double> try_encode_error(Device device, const std::vector<GradientTensor>& tensors,
                                       const std::vector<float>& gradients, const std::string& spec) {
  try {
    return encode_error(device, tensors, gradients, spec);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace gradwire
