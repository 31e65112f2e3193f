// A product in cuBLASLt's terms: column-major, D = op(A) op(B) [+ bias], where A, B and D are described as
// stored. The conversion is a pure function of Gemm, so that machines without a GPU can test it
// (tests/kernels/gemm_test.cpp has an interpreter).
//
// A row-major matrix is the column-major matrix of its transpose, in the same memory. C^T = op(B)^T op(A)^T,
// so the operands are swapped, and each keeps its flag: the memory of B, read as column-major, is B^T, which
// is op(B)^T unless transpose_b is set. The bias runs along a row of C, so along a column of C^T, as the bias
// epilogue adds it (one element per row of D, the same for all columns). The auxiliary matrix of GELU's
// epilogues has the layout of D.
#pragma once

#include "kernels/gemm/gemm.h"

namespace gradwire {

struct ColumnMajorMatrix {
  const void* data = nullptr;
  Element type = Element::fp32;
  int64_t rows = 0, columns = 0, ld = 0;  // sizes as stored; ld: elements between columns
  int64_t stride = 0;                     // elements between the products of a batch
};

struct ColumnMajorGemm {
  bool transpose_a = false, transpose_b = false;
  ColumnMajorMatrix a, b, d;
  const void* bias = nullptr;  // (d.rows) elements of d's type, or null
  int64_t batch = 1;
  Epilogue epilogue = Epilogue::none;
  const void* aux = nullptr;  // has d's size, ld and type; written by Epilogue::gelu_tanh
};

inline ColumnMajorGemm column_major(const Gemm& g) {
  // Returns the column-major description of a row-major matrix: stored rows become columns.
  auto stored = [](const auto& pointer, int64_t rows, int64_t columns, int64_t ld, int64_t stride) {
    return ColumnMajorMatrix{pointer.data, pointer.type, columns, rows, ld, stride};
  };
  return {.transpose_a = g.transpose_b,
          .transpose_b = g.transpose_a,
          .a = stored(g.b, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, g.ldb, g.stride_b),
          .b = stored(g.a, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, g.lda, g.stride_a),
          .d = stored(g.c, g.m, g.n, g.ldc, g.stride_c),
          .bias = g.bias.data,
          .batch = g.batch,
          .epilogue = g.epilogue,
          .aux = g.aux.data};
}

}  // namespace gradwire
