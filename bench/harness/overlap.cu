// overlap: what do kernels cost that run at the same time as GEMMs, and by which means?
//
// A stand-in for ViT-L/32's backward, 24 layers of eight BF16 products of 1600 rows, and for compression of
// each layer's 12.8 M gradients: residual in and out, FP8 codes, FP32 out, 17 bytes a value. Compression of a
// layer begins when the layer's products are done, on a stream of high priority. Then the products without
// compression: with rows for whole tiles (1664), and with the gradients of weights on a second stream.
// Each way is one CUDA graph per step and prints one line. Without a GPU exits with 77.
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "runtime/device/launch.cuh"

namespace gradwire::bench {
namespace {

constexpr int kLayers = 24, kRows = 1600, kWidth = 1024, kSteps = 15, kWarmUp = 5;
constexpr int64_t kVectors = 12'779'520 / 4;    // of a layer's gradients
constexpr int64_t kOperand = int64_t{8} << 20;  // elements, more than a product's largest array
constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int kFillingThreads = 1024;  // with kFillingBytes, a block that leaves no room on an SM
constexpr size_t kFillingBytes = size_t{200} << 10;

// Adds the residual, encodes as FP8, keeps what the codes lose, and replaces the gradient by the values of
// the codes. Four independent accesses per thread.
__global__ void __launch_bounds__(kFillingThreads)
    compress_kernel(float4* gradient, float4* residual, uint32_t* codes, int64_t count) {
  cuda::wait_for_earlier_kernels();
  constexpr int kAtOnce = 4;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += kAtOnce * step) {
    float4 g[kAtOnce], r[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * step < count) g[j] = gradient[i + j * step], r[j] = residual[i + j * step];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * step >= count) break;
      const float4 sum{g[j].x + r[j].x, g[j].y + r[j].y, g[j].z + r[j].z, g[j].w + r[j].w};
      const __nv_fp8x4_e4m3 code(sum);
      const auto sent = static_cast<float4>(code);
      residual[i + j * step] = {sum.x - sent.x, sum.y - sent.y, sum.z - sent.z, sum.w - sent.w};
      gradient[i + j * step] = sent;
      codes[i + j * step] = code.__x;
    }
  }
}

// Fills memory with values between 0.5 and 1 of either sign, as FP32 and as BF16. Constants would draw less
// power, which raises the clock.
__global__ void fill_kernel(uint32_t* words, int64_t count) {
  cuda::wait_for_earlier_kernels();
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    words[i] = ((static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(i >> 7)) & 0x807f807fu) |
               0x3f003f00u;
}

void fill(uint32_t* words, int64_t count) {
  cuda::launch("fill_kernel", fill_kernel, {.grid = dim3(1024), .block = dim3(256)}, words, count);
}

#define GW_CUBLAS_CHECK(call)                                          \
  if (cublasStatus_t status = (call); status != CUBLAS_STATUS_SUCCESS) \
  throw std::runtime_error(std::string(#call ": ") + cublasGetStatusString(status))

// Device memory of `count` values, for as long as the program.
template <typename T>
T* allocate(int64_t count) {
  T* memory = nullptr;
  GW_CUDA_CHECK(cudaMalloc(&memory, count * sizeof(T)));
  return memory;
}

cudaStream_t stream_of(int priority) {
  cudaStream_t stream = nullptr;
  GW_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return stream;
}

// The streams of a way, and how its kernels share the multiprocessors.
struct Way {
  const char* name;
  cudaStream_t gemms;
  cudaStream_t compression = nullptr;  // null: none
  int blocks = 0, threads = 0;
  size_t shared_bytes = 0;
  int gemm_sms = 0;  // that cuBLAS may count on; 0: all
  int rows = kRows;
  cudaStream_t weights = nullptr;  // if not null, the stream of the products for the gradients of weights
};

// A number of multiprocessors with a stream of their own (a green context); none where the driver lacks them.
struct Partition {
  int sms = 0;
  cudaStream_t stream = nullptr;
};
#define GW_DRIVER(function) cuda::driver_function<decltype(&function)>(#function, 12050)

Partition partition_on(CUdevResource& resource, int priority) {
  const auto describe = GW_DRIVER(cuDevResourceGenerateDesc);
  const auto create = GW_DRIVER(cuGreenCtxCreate);
  const auto add_stream = GW_DRIVER(cuGreenCtxStreamCreate);
  CUdevResourceDesc description{};
  CUgreenCtx context{};
  Partition partition;
  if (describe != nullptr && create != nullptr && add_stream != nullptr &&
      describe(&description, &resource, 1) == CUDA_SUCCESS &&
      create(&context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS &&
      add_stream(&partition.stream, context, CU_STREAM_NON_BLOCKING, priority) == CUDA_SUCCESS)
    partition.sms = static_cast<int>(resource.sm.smCount);
  return partition;
}

// Returns a partition of `sms` multiprocessors, and one of the others.
std::pair<Partition, Partition> partitions(unsigned sms, int priority, int priority_of_others) {
  const auto get = GW_DRIVER(cuDeviceGetDevResource);
  const auto split = GW_DRIVER(cuDevSmResourceSplitByCount);
  CUdevResource all{}, part{}, others{};
  unsigned groups = 1;
  if (get == nullptr || split == nullptr || get(0, &all, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS ||
      split(&part, &groups, &all, &others, 0, sms) != CUDA_SUCCESS)
    return {};
  return {partition_on(part, priority), partition_on(others, priority_of_others)};
}

class Backward {
 public:
  Backward() {
    GW_CUBLAS_CHECK(cublasCreate(&blas_));
    fill(operands_, 3 * kOperand / 2);
    fill(reinterpret_cast<uint32_t*>(gradient_), kLayers * kVectors * 4);
    fill(reinterpret_cast<uint32_t*>(residual_), kLayers * kVectors * 4);
    GW_CUDA_CHECK(cudaDeviceSynchronize());
  }

  // Returns the median milliseconds of a step.
  float measure(const Way& way, bool gemms, bool compression) {
    GW_CUBLAS_CHECK(cublasSetSmCountTarget(blas_, way.gemm_sms));
    GW_CUDA_CHECK(cudaStreamBeginCapture(way.gemms, cudaStreamCaptureModeRelaxed));
    for (int layer = 0; layer < kLayers; ++layer) {
      if (gemms) multiply_layer(way);
      if (compression) compress_layer(way, layer);
    }
    if (compression) wait_for(way.gemms, way.compression);
    if (way.weights != nullptr) wait_for(way.gemms, way.weights);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    GW_CUDA_CHECK(cudaStreamEndCapture(way.gemms, &graph));
    GW_CUDA_CHECK(cudaGraphInstantiateWithFlags(&executable, graph, cudaGraphInstantiateFlagUseNodePriority));
    std::vector<float> ms(kSteps);
    for (float& each : ms) {
      GW_CUDA_CHECK(cudaEventRecord(begin_, way.gemms));
      GW_CUDA_CHECK(cudaGraphLaunch(executable, way.gemms));
      GW_CUDA_CHECK(cudaEventRecord(end_, way.gemms));
      GW_CUDA_CHECK(cudaEventSynchronize(end_));
      GW_CUDA_CHECK(cudaEventElapsedTime(&each, begin_, end_));
    }
    GW_CUDA_CHECK(cudaGraphExecDestroy(executable));
    GW_CUDA_CHECK(cudaGraphDestroy(graph));
    std::sort(ms.begin() + kWarmUp, ms.end());
    return ms[(kWarmUp + kSteps) / 2];
  }

 private:
  static cudaEvent_t event_of(unsigned flags) {
    cudaEvent_t event = nullptr;
    GW_CUDA_CHECK(cudaEventCreateWithFlags(&event, flags));
    return event;
  }

  void wait_for(cudaStream_t stream, cudaStream_t other) {
    GW_CUDA_CHECK(cudaEventRecord(order_, other));
    GW_CUDA_CHECK(cudaStreamWaitEvent(stream, order_, 0));
  }

  // The products of a layer's backward: the gradients of the inputs and of the weights of the MLP's two
  // products, the attention's output and its queries, keys and values.
  void multiply_layer(const Way& way) {
    const bool separate = way.weights != nullptr;
    const auto multiply = [&](bool of_weights, int m, int n, int k) {
      const float one = 1, zero = 0;
      const bool other = of_weights && separate;
      GW_CUBLAS_CHECK(cublasSetStream(blas_, other ? way.weights : way.gemms));
      GW_CUBLAS_CHECK(cublasSetWorkspace(blas_, workspaces_[other], kWorkspaceBytes));
      GW_CUBLAS_CHECK(cublasGemmEx(blas_, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &one, operands_, CUDA_R_16BF, n,
                                   operands_ + kOperand / 2, CUDA_R_16BF, k, &zero,
                                   other ? codes_ : operands_ + kOperand, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                                   CUBLAS_GEMM_DEFAULT));
    };
    for (const auto& [in, out] : {std::pair(4, 1), {1, 4}, {1, 1}, {1, 3}}) {
      if (separate) wait_for(way.weights, way.gemms);
      multiply(false, way.rows, in * kWidth, out * kWidth);
      multiply(true, in * kWidth, out * kWidth, way.rows);
    }
  }

  void compress_layer(const Way& way, int layer) {
    wait_for(way.compression, way.gemms);
    const int64_t at = layer * kVectors;
    cuda::launch("compress_kernel", compress_kernel,
                 {.grid = dim3(way.blocks),
                  .block = dim3(way.threads),
                  .shared_bytes = way.shared_bytes,
                  .stream = way.compression},
                 gradient_ + at, residual_ + at, codes_ + at, kVectors);
  }

  cublasHandle_t blas_ = nullptr;
  cudaEvent_t order_ = event_of(cudaEventDisableTiming);
  cudaEvent_t begin_ = event_of(cudaEventDefault), end_ = event_of(cudaEventDefault);
  float4* gradient_ = allocate<float4>(kLayers * kVectors);
  float4* residual_ = allocate<float4>(kLayers * kVectors);
  uint32_t* codes_ = allocate<uint32_t>(kLayers * kVectors);
  uint32_t* operands_ = allocate<uint32_t>(3 * kOperand / 2);  // pairs of BF16
  char* workspaces_[2] = {allocate<char>(kWorkspaceBytes), allocate<char>(kWorkspaceBytes)};
};

void run() {
  int least = 0, greatest = 0;
  GW_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t gemms = stream_of(least), compression = stream_of(greatest);
  const int sms = cuda::multiprocessors();
  const auto [few, others] = partitions(24, greatest, least);
  std::printf("green contexts: %d + %d multiprocessors\n", few.sms, others.sms);
  const Way ways[] = {
      {"full grid", gemms, compression, 8 * sms, 256},
      {"24 small blocks", gemms, compression, 24, 256},
      {"24 blocks that fill an SM", gemms, compression, 24, kFillingThreads, kFillingBytes},
      {"the same, GEMMs limited to SMs - 24", gemms, compression, 24, kFillingThreads, kFillingBytes,
       sms - 24},
      {"12 blocks, GEMMs limited to SMs - 12", gemms, compression, 12, kFillingThreads, kFillingBytes,
       sms - 12},
      {"green contexts", others.stream, few.stream, 2 * few.sms, kFillingThreads, 0, others.sms}};
  Backward backward;
  for (const Way& way : ways) {
    if (way.gemms == nullptr || way.compression == nullptr) continue;
    const float products = backward.measure(way, true, false), alone = backward.measure(way, false, true);
    const float both = backward.measure(way, true, true);
    std::printf("%-32s GEMMs %.3f, compression %.3f (%.0f GB/s), both %.3f ms: hidden %.0f %%\n", way.name,
                products, alone, 17e-6 * 4 * kVectors * kLayers / alone, both,
                100 * (products + alone - both) / alone);
    std::fflush(stdout);
  }
  const Way alone[] = {{.name = "products", .gemms = gemms},
                       {.name = "of 1664 rows", .gemms = gemms, .rows = 1664},
                       {.name = "weights on a second stream", .gemms = gemms, .weights = stream_of(least)}};
  for (int i = 0; i < 2; ++i) {  // twice, because the ways are close
    for (const Way& way : alone) std::printf("%-32s %.3f ms\n", way.name, backward.measure(way, true, false));
  }
}

}  // namespace
}  // namespace gradwire::bench

int main() {
  if (gradwire::cuda_device_count() == 0) {
    std::printf("overlap: no GPU: %s\n", gradwire::cuda_unavailable_reason().c_str());
    return 77;
  }
  try {
    gradwire::bench::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "overlap: %s\n", error.what());
    return 1;
  }
}
