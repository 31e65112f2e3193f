// A product of cuBLASLt: its descriptors, and the algorithm that it always uses (see gemm_cuda.cpp).
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "kernels/gemm/column_major_gemm.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/tuning.h"
#include "runtime/device/device.h"

namespace gradwire::cuda {

// Throws OutOfResources or DeviceError if a call of cuBLAS failed.
void check_cublas(cublasStatus_t status, const char* call);
#define GW_CUBLAS_CHECK(call) ::gradwire::cuda::check_cublas((call), #call)

inline cudaDataType_t cuda_type(Element type) {
  return type == Element::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

inline cublasComputeType_t compute_type(Precision precision) {
  return precision == Precision::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// Returns the largest power of two, up to 256, that divides the address: the alignment that an algorithm may
// assume.
uint32_t alignment_of(const void* pointer);
// Returns the alignment that all matrices of a batch have.
uint32_t alignment_of(const void* pointer, int64_t stride, Element type, int64_t batch);

// Owns one of cuBLASLt's descriptors.
template <typename T, cublasStatus_t (*kDestroy)(T)>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Owned() {
    if (value_ != nullptr) kDestroy(value_);
  }
  T* out() { return &value_; }
  T get() const { return value_; }

 private:
  T value_ = nullptr;
};
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// The tuning file for a kind of product whose algorithm is to be found by timing.
struct Tuning {
  TuningFile* file = nullptr;
  TuningFile::Key key;
};
// The handle, stream and workspace of a thread's products on a stream.
struct LtContext {
  cublasLtHandle_t lt = nullptr;
  CudaStream stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// The descriptors and the algorithm of a kind of product.
class Plan {
 public:
  // Selects an algorithm; usable() is false if there is none. `tuning`: the file and the key to look up;
  // null: use cuBLASLt's first choice.
  Plan(const LtContext& context, const ColumnMajorGemm& g, Precision precision, const Tuning* tuning);

  bool usable() const { return algorithm_.has_value(); }
  void run(const LtContext& context, const ColumnMajorGemm& g, float alpha, float beta);

 private:
  void describe(const ColumnMajorGemm& g, Precision precision);
  Preference preference_for(const ColumnMajorGemm& g, size_t workspace_bytes) const;
  // Uses the algorithm in the file, or times the algorithms that cuBLASLt found and saves the fastest.
  void choose(const LtContext& context, const ColumnMajorGemm& g, const Tuning& tuning,
              std::span<const cublasLtMatmulHeuristicResult_t> found);
  bool take_saved(const LtContext& context, const Tuning& tuning);

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    GW_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value));
  }

  Operation operation_;
  Layout a_, b_, d_;
  std::optional<cublasLtMatmulAlgo_t> algorithm_;
};

}  // namespace gradwire::cuda
