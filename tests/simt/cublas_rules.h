// Descriptors for the stand-in (cublas_stand_in.cpp), and checks of a call against the rules in cuBLAS's
// documentation.
//
// Sources: cublasLt.h of CUDA 13.0, and the cuBLAS documentation of CUDA 13
// (https://docs.nvidia.com/cuda/cublas/), by section:
// - cublasLtMatmul(): types of A, B, C, D and the bias; row-major D; alignment of the workspace
// - cublasLtEpilogue_t: epilogues that read a bias, or read or write aux
// - cublasLtMatmulDescAttributes_t: types of bias and aux; leading dimension and batch stride of aux
// - cublasLtMatmulPreferenceAttributes_t: alignments of A, B, C and D, 256 bytes unless set
// - Tensor Core Usage: no other alignment is required, except for FP8
// - cublasGemmEx(), cublasGemmStridedBatchedEx(): types; overlapping outputs
// Stricter than the documentation: refuses types, epilogues and orders that Gradwire does not use, every
// epilogue with a row-major D (CUDA 12's note; CUDA 13's names only activations with a bias), and a bias or
// aux pointer that the epilogue ignores.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdint>

namespace gradwire::simt {

struct LtOperation {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType_t scale = CUDA_R_32F;  // type of alpha and beta
  cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = -1;  // type of the bias; -1: D's type
  int64_t bias_stride = 0;
  void* aux = nullptr;
  int32_t aux_type = -1;  // type of aux; -1: D's type
  int64_t aux_ld = 0, aux_stride = 0;

  bool has_bias() const { return (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
  bool has_aux() const { return (epilogue & 128) != 0; }
  bool is_gelu() const {
    return (epilogue & (CUBLASLT_EPILOGUE_GELU | 64)) != 0;
  }  // 64 is DGELU without the bit for aux
};

struct LtLayout {
  cudaDataType type = CUDA_R_32F;
  uint64_t rows = 0, columns = 0;
  int64_t ld = 0;
  int32_t batch = 1;
  int64_t stride = 0;
  int32_t order = CUBLASLT_ORDER_COL;

  // Returns the distance between neighbouring rows, in elements.
  int64_t row_step() const { return order == CUBLASLT_ORDER_COL ? 1 : ld; }
  int64_t column_step() const { return order == CUBLASLT_ORDER_COL ? ld : 1; }
  bool operator==(const LtLayout&) const = default;
};

// The workspace size and the alignments, in bytes, that an algorithm may rely on. The defaults equal the
// library's.
struct LtPreference {
  uint64_t workspace_bytes = 0;
  uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
};

struct LtPointers {
  const void *a, *b, *c, *d, *workspace;
  size_t workspace_bytes;
};

struct LtProblem {
  const LtOperation& operation;
  const LtLayout &a, &b, &c, &d;
};

// Returns SUCCESS, or the status with which the library would refuse the product.
cublasStatus_t examine(const LtProblem& problem);

// Describes an algorithm for the problem, within the preference.
cublasLtMatmulAlgo_t describe_algorithm(const LtProblem& problem, const LtPreference& preference);

// Returns SUCCESS, or INVALID_VALUE if the algorithm was made for other types, orders or epilogues.
cublasStatus_t examine_algorithm(const LtProblem& problem, const cublasLtMatmulAlgo_t& algorithm);
uint64_t workspace_of(const cublasLtMatmulAlgo_t& algorithm);

// Returns SUCCESS, or INVALID_VALUE if a pointer is missing or less aligned than the algorithm requires.
cublasStatus_t examine_pointers(const LtProblem& problem, const LtPointers& pointers,
                                const cublasLtMatmulAlgo_t& algorithm);

// Returns SUCCESS, or the status with which cublasGemmStridedBatchedEx would refuse column-major `c` =
// op(`a`) op(`b`) + `c`.
cublasStatus_t examine_gemm(const LtLayout& a, const LtLayout& b, const LtLayout& c,
                            cublasComputeType_t compute);

bool is_aligned(const void* pointer, uint64_t bytes);

}  // namespace gradwire::simt
