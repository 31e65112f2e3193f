#include "trainer/train/muon.h"

#include <algorithm>
#include <cmath>

#include "kernels/feedback/feedback.h"
#include "kernels/powersgd/orthonormalize.h"

namespace gradwire {
namespace {

constexpr int kIterations = 5;
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;

MatrixTable as_columns(const Stream& stream, const std::vector<FlatMatrix>& matrices) {
  std::vector<MatrixDescriptor> columns;
  for (const FlatMatrix& m : matrices)
    columns.push_back(
        {.q_offset = m.begin, .rows = 1, .cols = static_cast<int32_t>(m.rows * m.cols), .rank = 1});
  return MatrixTable(stream, std::move(columns));
}

int64_t largest_square(const std::vector<FlatMatrix>& matrices) {
  int64_t side = 0;
  for (const FlatMatrix& m : matrices) side = std::max(side, std::min(m.rows, m.cols));
  return side * side;
}

}  // namespace

Muon::Muon(const Stream& stream, std::vector<FlatMatrix> matrices, int64_t elements, double mu,
           Precision precision)
    : matrices_(std::move(matrices)),
      mu_(static_cast<float>(mu)),
      precision_(precision == Precision::tf32 ? Precision::tf32 : Precision::fp32),
      columns_(as_columns(stream, matrices_)),
      steps_(make_buffer<float>(stream.device(), elements)),
      x_(make_buffer<float>(stream.device(), elements)),
      a_(make_buffer<float>(stream.device(), largest_square(matrices_))),
      b_(make_buffer<float>(stream.device(), largest_square(matrices_))),
      flags_(make_buffer<int32_t>(stream.device(), static_cast<int64_t>(matrices_.size()))) {
  fill_zero(stream, flags_.data(), flags_.bytes());
}

void Muon::run(const Stream& stream, const float* grads, float* momentum) {
  float* const steps = steps_.as<float>();
  for (const FlatMatrix& m : matrices_) {
    copy(stream, steps + m.begin, grads + m.begin, static_cast<size_t>(m.rows * m.cols) * sizeof(float));
    momentum_add(
        stream,
        {.grad = steps + m.begin, .momentum = momentum + m.begin, .factor = mu_, .count = m.rows * m.cols});
  }
  // X = M / |M|, with 0 for 0.
  normalize_columns(stream, {&columns_, steps, x_.as<float>(), flags_.as<const int32_t>()});
  for (const FlatMatrix& m : matrices_) {
    float *from = x_.as<float>() + m.begin, *to = steps + m.begin;
    for (int i = 1; i <= kIterations; ++i, std::swap(from, to)) {
      const double shape = std::sqrt(static_cast<double>(m.rows) / static_cast<double>(m.cols));
      iterate(stream, m, from, to, i == kIterations ? static_cast<float>(shape) : 1.0f);
    }
  }
}

void Muon::iterate(const Stream& stream, const FlatMatrix& matrix, const float* x, float* out, float scale) {
  const int64_t rows = matrix.rows, cols = matrix.cols, side = std::min(rows, cols);
  const bool wide = rows <= cols;  // A = X X^T, otherwise A = X^T X
  float *const a = a_.as<float>(), *const b = b_.as<float>();
  gemm(stream, {.transpose_a = !wide,
                .transpose_b = wide,
                .m = side,
                .n = side,
                .k = std::max(rows, cols),
                .a = x,
                .lda = cols,
                .b = x,
                .ldb = cols,
                .c = a,
                .ldc = side,
                .precision = precision_});
  copy(stream, b, a, static_cast<size_t>(side * side) * sizeof(float));
  gemm(stream, {.m = side,
                .n = side,
                .k = side,
                .a = a,
                .lda = side,
                .b = a,
                .ldb = side,
                .c = b,
                .ldc = side,
                .alpha = kC,
                .beta = kB,
                .precision = precision_});
  copy(stream, out, x, static_cast<size_t>(rows * cols) * sizeof(float));
  gemm(stream, {.m = rows,
                .n = cols,
                .k = side,
                .a = wide ? b : x,
                .lda = wide ? side : cols,
                .b = wide ? x : b,
                .ldb = wide ? cols : side,
                .c = out,
                .ldc = cols,
                .alpha = scale,
                .beta = scale * kA,
                .precision = precision_});
}

}  // namespace gradwire
