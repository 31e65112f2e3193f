#include "tests/simt/cublas_rules.h"

#include <algorithm>
#include <array>

namespace gradwire::simt {
namespace {

// A row of cublasLtMatmul()'s table for regular matrices or of cublasGemmEx()'s table. The tables here have
// only rows with types that Gradwire uses. The types of the bias and of D equal C's type.
struct Row {
  cublasComputeType_t compute;
  cudaDataType scale, ab, c;
};
constexpr Row kSupported[] = {
    {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF},
    {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F},
    {CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F},
    {CUBLAS_COMPUTE_32F_PEDANTIC, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF},
    {CUBLAS_COMPUTE_32F_PEDANTIC, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F},
    {CUBLAS_COMPUTE_32F_PEDANTIC, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F},
    {CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F},
    {CUBLAS_COMPUTE_32F_FAST_16BF, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F},
    {CUBLAS_COMPUTE_32F_FAST_16F, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F},
};
bool is_supported(cublasComputeType_t compute, cudaDataType scale, cudaDataType a, cudaDataType b,
                  cudaDataType c) {
  return std::ranges::any_of(kSupported, [&](const Row& row) {
    return row.compute == compute && row.scale == scale && row.ab == a && row.ab == b && row.c == c;
  });
}

constexpr std::array<uint32_t, 7> kEpilogues = {CUBLASLT_EPILOGUE_DEFAULT,  CUBLASLT_EPILOGUE_BIAS,
                                                CUBLASLT_EPILOGUE_GELU,     CUBLASLT_EPILOGUE_GELU_BIAS,
                                                CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                                CUBLASLT_EPILOGUE_DGELU};

constexpr int64_t kMaxElements = 0x7fffffff;  // "usually only values that can be expressed as int32_t"

int64_t bytes_of(cudaDataType type) {
  return type == CUDA_R_16BF ? 2 : 4;
}

// Returns whether the leading dimension fits the matrix. CUBLASLT_MATRIX_LAYOUT_LD: "must be large enough so
// that matrix memory locations are not overlapping".
bool is_possible(const LtLayout& m) {
  if (m.order != CUBLASLT_ORDER_COL && m.order != CUBLASLT_ORDER_ROW) return false;
  if (m.rows < 1 || m.columns < 1 || m.rows > kMaxElements || m.columns > kMaxElements || m.batch < 1)
    return false;
  return m.ld >= static_cast<int64_t>(m.order == CUBLASLT_ORDER_COL ? m.rows : m.columns);
}

// Returns whether two products of a batch would write the same element, which is undefined according to
// cublasGemmStridedBatchedEx().
bool outputs_overlap(const LtLayout& d) {
  const bool by_column = d.order == CUBLASLT_ORDER_COL;
  const auto lines = static_cast<int64_t>(by_column ? d.columns : d.rows);
  const auto length = static_cast<int64_t>(by_column ? d.rows : d.columns);
  for (int64_t apart = 1; apart < d.batch; ++apart) {
    const int64_t distance = apart * std::abs(d.stride);
    const int64_t line = distance / d.ld, rest = distance % d.ld;
    if ((line < lines && rest < length) || (line + 1 < lines && d.ld - rest < length)) return true;
  }
  return false;
}

bool is_operation(cublasOperation_t op) {
  return op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C;
}

cublasStatus_t examine_epilogue(const LtOperation& o, const LtLayout& d) {
  if (std::ranges::find(kEpilogues, o.epilogue) == kEpilogues.end()) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (o.epilogue == CUBLASLT_EPILOGUE_DEFAULT)
    return o.bias == nullptr && o.aux == nullptr ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
  // The note on the bias type in cublasLtMatmul()'s table: no GELU, dGELU or bias if D is row-major.
  if (d.order == CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (o.has_bias() != (o.bias != nullptr) || o.has_aux() != (o.aux != nullptr))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (o.has_bias() && o.bias_type != -1 && o.bias_type != d.type) return CUBLAS_STATUS_INVALID_VALUE;
  if (!o.has_aux()) return CUBLAS_STATUS_SUCCESS;
  // The documentation of CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, _LD and _BATCH_STRIDE requires these
  // checks.
  if (o.aux_type != -1 && o.aux_type != d.type) return CUBLAS_STATUS_INVALID_VALUE;
  if (o.aux_ld % 8 != 0 || o.aux_ld < static_cast<int64_t>(d.rows)) return CUBLAS_STATUS_INVALID_VALUE;
  if (d.batch > 1 && (o.aux_stride % 8 != 0 || o.aux_stride < o.aux_ld * static_cast<int64_t>(d.columns)))
    return CUBLAS_STATUS_INVALID_VALUE;
  return CUBLAS_STATUS_SUCCESS;
}

// Indices of the words of the stand-in's cublasLtMatmulAlgo_t.
enum : size_t { kMark, kKind, kAlignment, kPointerAlignment, kWorkspace };
constexpr uint64_t kIsAlgorithm = 0x616c676f72697468;

uint64_t kind_of(const LtProblem& p) {
  const LtOperation& o = p.operation;
  uint64_t kind = 1469598103934665603u;
  for (int64_t part : {int64_t{o.compute}, int64_t{o.scale}, int64_t{o.a}, int64_t{o.b}, int64_t{o.epilogue},
                       int64_t{p.a.type}, int64_t{p.b.type}, int64_t{p.c.type}, int64_t{p.d.type},
                       int64_t{p.a.order}, int64_t{p.b.order}, int64_t{p.c.order}, int64_t{p.d.order}})
    kind = (kind ^ static_cast<uint64_t>(part)) * 1099511628211u;
  return kind;
}

uint64_t alignment_of(const void* pointer) {
  const uint64_t address = reinterpret_cast<uintptr_t>(pointer) | 256u;
  return address & (~address + 1);
}

// Returns whether each matrix of a batch is aligned to `bytes` bytes.
bool is_aligned(const void* pointer, const LtLayout& m, uint64_t bytes) {
  const int64_t between = m.batch > 1 ? m.stride * bytes_of(m.type) : 0;
  return simt::is_aligned(pointer, bytes) && static_cast<uint64_t>(between) % bytes == 0;
}

}  // namespace

bool is_aligned(const void* pointer, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

cublasStatus_t examine(const LtProblem& p) {
  const LtOperation& o = p.operation;
  if (!is_operation(o.a) || !is_operation(o.b)) return CUBLAS_STATUS_INVALID_VALUE;
  for (const LtLayout* m : {&p.a, &p.b, &p.c, &p.d}) {
    if (!is_possible(*m) || m->batch != p.d.batch) return CUBLAS_STATUS_INVALID_VALUE;
  }
  const bool ta = o.a != CUBLAS_OP_N, tb = o.b != CUBLAS_OP_N;
  if ((ta ? p.a.columns : p.a.rows) != p.d.rows || (tb ? p.b.rows : p.b.columns) != p.d.columns ||
      (ta ? p.a.rows : p.a.columns) != (tb ? p.b.columns : p.b.rows))
    return CUBLAS_STATUS_INVALID_VALUE;
  // The stand-in requires products in place, as Gradwire's products are.
  if (!(p.c == p.d) || outputs_overlap(p.d)) return CUBLAS_STATUS_INVALID_VALUE;
  if (!is_supported(o.compute, o.scale, p.a.type, p.b.type, p.d.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  return examine_epilogue(o, p.d);
}

cublasLtMatmulAlgo_t describe_algorithm(const LtProblem& problem, const LtPreference& preference) {
  const LtOperation& o = problem.operation;
  cublasLtMatmulAlgo_t made = {};
  made.data[kMark] = kIsAlgorithm;
  made.data[kKind] = kind_of(problem);
  made.data[kAlignment] = preference.align_a | uint64_t{preference.align_b} << 16 |
                          uint64_t{preference.align_c} << 32 | uint64_t{preference.align_d} << 48;
  made.data[kPointerAlignment] = alignment_of(o.bias) | alignment_of(o.aux) << 16;
  // an algorithm may use the whole workspace of the preference
  made.data[kWorkspace] = preference.workspace_bytes;
  return made;
}

cublasStatus_t examine_algorithm(const LtProblem& problem, const cublasLtMatmulAlgo_t& algorithm) {
  return algorithm.data[kMark] == kIsAlgorithm && algorithm.data[kKind] == kind_of(problem)
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_INVALID_VALUE;
}

uint64_t workspace_of(const cublasLtMatmulAlgo_t& algorithm) {
  return algorithm.data[kWorkspace];
}

// Checks a call's pointers against the alignments for which the heuristic was asked. For the matrices these
// are CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_*_BYTES. For the bias and aux these are the alignments of the
// pointers in the descriptor at that time.
cublasStatus_t examine_pointers(const LtProblem& problem, const LtPointers& pointers,
                                const cublasLtMatmulAlgo_t& algorithm) {
  if (pointers.a == nullptr || pointers.b == nullptr || pointers.c == nullptr || pointers.d == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  auto part = [&](size_t word, int index) { return algorithm.data[word] >> 16 * index & 0xffff; };
  const LtOperation& o = problem.operation;
  const bool aligned = is_aligned(pointers.a, problem.a, part(kAlignment, 0)) &&
                       is_aligned(pointers.b, problem.b, part(kAlignment, 1)) &&
                       is_aligned(pointers.c, problem.c, part(kAlignment, 2)) &&
                       is_aligned(pointers.d, problem.d, part(kAlignment, 3)) &&
                       (!o.has_bias() || is_aligned(o.bias, part(kPointerAlignment, 0))) &&
                       (!o.has_aux() || is_aligned(o.aux, part(kPointerAlignment, 1)));
  // The documentation says "workspace: must be 256B aligned".
  const bool enough = pointers.workspace_bytes >= workspace_of(algorithm) &&
                      (pointers.workspace_bytes == 0 ||
                       (pointers.workspace != nullptr && is_aligned(pointers.workspace, uint64_t{256})));
  return aligned && enough ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t examine_gemm(const LtLayout& a, const LtLayout& b, const LtLayout& c,
                            cublasComputeType_t compute) {
  for (const LtLayout* m : {&a, &b, &c}) {
    if (m->ld < std::max<int64_t>(1, static_cast<int64_t>(m->rows))) return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (c.rows > 0 && c.columns > 0 && outputs_overlap(c)) return CUBLAS_STATUS_INVALID_VALUE;
  return is_supported(compute, CUDA_R_32F, a.type, b.type, c.type) ? CUBLAS_STATUS_SUCCESS
                                                                   : CUBLAS_STATUS_NOT_SUPPORTED;
}

}  // namespace gradwire::simt
