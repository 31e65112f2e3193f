// Row-major matrix products: OpenBLAS on the host (our own loops for batches of small ones); on CUDA
// cuBLASLt, or cuBLAS where cuBLASLt has no algorithm.
//
// C = alpha * op(A) op(B) + beta * C + bias, where op(A) is (m, k), op(B) is (k, n), C is (m, n), for `batch`
// products whose operands are `stride_*` elements apart. lda/ldb/ldc are the distances between rows as
// stored. FLOPs: 2 m n k per product. On the host C is cut into pieces that do not depend on the number of
// threads, so results do not depend on it; OpenBLAS itself runs single-threaded.
//
// A and B are both FP32 or both BF16; C is FP32, or BF16 where A and B are BF16. Products of two BF16 numbers
// are exact in FP32. On either device sums are kept in FP32 and rounded once, when C is stored: on the host
// by AVX512-BF16 (bf16_gemm.h), or by OpenBLAS on operands widened to FP32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/op.h"
#include "kernels/vit/elementwise.h"

namespace gradwire {

// The precision of matrix products. tf32: CUDA tensor cores on TF32-rounded FP32 operands; the host computes
// fp32. bf16: operands stored as BF16 (docs/training.md).
enum class Precision : uint8_t { fp32, tf32, bf16 };

enum class Element : uint8_t { fp32, bf16 };
constexpr int64_t element_bytes(Element type) {
  return type == Element::bf16 ? 2 : 4;
}

// The start of a matrix, and the type of its elements.
template <typename Void>
struct MatrixPointer {
  Void* data = nullptr;
  Element type = Element::fp32;

  template <typename T>
  using To = std::conditional_t<std::is_const_v<Void>, const T*, T*>;

  MatrixPointer() = default;
  MatrixPointer(std::nullptr_t) {}
  MatrixPointer(To<float> p) : data(p), type(Element::fp32) {}
  MatrixPointer(To<Bf16> p) : data(p), type(Element::bf16) {}

  // Returns a pointer `offset` elements further.
  template <typename T>
  To<T> at(int64_t offset) const {
    return static_cast<To<T>>(data) + offset;
  }
};

// The function applied to x = alpha * op(A) op(B) + bias before it is stored. On the host, and where cuBLASLt
// lacks the epilogue, a separate op applies it. The epilogue may use x before or after its
// rounding.
enum class Epilogue : uint8_t {
  none,
  gelu_tanh,    // aux = x unless null, C = GELU(x) in its tanh form
  d_gelu_tanh,  // C = x GELU'(aux), with the aux of a product with gelu_tanh
};

// The class has over 15 members because BLAS has as many parameters: the shape, three matrices with their
// layouts, and the epilogue.
struct Gemm {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  MatrixPointer<const void> a = {};
  int64_t lda = 0, stride_a = 0;
  MatrixPointer<const void> b = {};
  int64_t ldb = 0, stride_b = 0;
  MatrixPointer<void> c = {};
  int64_t ldc = 0, stride_c = 0;
  int64_t batch = 1;
  float alpha = 1.0f, beta = 0.0f;
  Precision precision = Precision::fp32;  // precision of FP32 operands: fp32 or tf32
  // (n) elements of C's type, added to each row; null: no bias. Only for batch == 1.
  MatrixPointer<const void> bias = {};
  // Epilogues other than none need batch == 1, beta == 0 and dense rows (ldc == n).
  Epilogue epilogue = Epilogue::none;
  // (m, n) elements of C's type, distinct from C: the pre-activations of the epilogue. With gelu_tanh, null:
  // the pre-activations are not stored, because no backward pass follows.
  MatrixPointer<void> aux = {};
};
GW_OP(gemm, Gemm)

namespace detail {
// Throws BadInput naming the invalid size, type or leading dimension.
void check(const Gemm& args);
}  // namespace detail

// Epilogues that the product does not apply itself: a product without epilogue, and an op on its result.

// Returns g without its epilogue: the product leaves x in C, or for gelu_tanh in aux, if aux is given.
inline Gemm without_epilogue(Gemm g) {
  if (g.epilogue == Epilogue::gelu_tanh && g.aux.data != nullptr) g.c = g.aux;
  g.epilogue = Epilogue::none;
  g.aux = nullptr;
  return g;
}

// Calls gelu(args) or gelu_backward(args) for the op that follows a product without its epilogue.
template <typename F, typename B>
void apply_epilogue(const Gemm& g, const F& gelu, const B& gelu_backward) {
  const auto apply = [&]<typename S>(S* c) {
    if (g.epilogue == Epilogue::gelu_tanh)
      return gelu(BiasGelu<S>{g.aux.data != nullptr ? g.aux.at<S>(0) : c, c, g.m, g.n, Gelu::tanh});
    gelu_backward(BiasGeluBackward<S>{
        .pre = g.aux.at<S>(0), .dy = c, .d_pre = c, .rows = g.m, .width = g.n, .form = Gelu::tanh});
  };
  g.c.type == Element::bf16 ? apply(g.c.at<Bf16>(0)) : apply(g.c.at<float>(0));
}

}  // namespace gradwire

namespace gradwire::host {

// Products of a few dozen rows and columns, such as attention's (17 x 17 x 16), where a BLAS call costs more
// than the arithmetic.

// Returns whether small_gemm is faster for each of the batch's products.
bool is_small(const Gemm& g);
// Computes products [begin, end) of the batch. Sums are in the order of k, with FMAs where the processor has
// them.
void small_gemm(const Gemm& g, int64_t begin, int64_t end);

}  // namespace gradwire::host
