#include "kernels/powersgd/library.h"

#include <limits>
#include <vector>

namespace gradwire {
namespace {

ThinProducts* stand_in = nullptr;

ThinProducts* on_cuda() {
#ifdef GRADWIRE_HAS_CUDA
  static ThinProducts* const library = cuda::thin_products();
  return library;
#else
  return nullptr;
#endif
}

std::vector<ThinProduct> products_of(const MatrixTable& table, bool onto_p, const float* m,
                                     const float* factors, float* out) {
  std::vector<ThinProduct> all;
  for (const MatrixDescriptor& d : table.host()) {
    all.push_back({.onto_p = onto_p,
                   .rows = d.rows,
                   .cols = d.cols,
                   .rank = d.rank,
                   .m = m + d.offset,
                   .factor = factors + (onto_p ? d.p_offset : d.q_offset),
                   .out = out + (onto_p ? d.q_offset : d.p_offset)});
  }
  return all;
}

// Forms M in the residual, and marks the matrices whose M is not finite.
template <typename Project>
void form(const Stream& stream, const Project& a, int32_t* marks) {
  fill_zero(stream, marks, static_cast<size_t>(a.table->count()) * sizeof(int32_t));
  powersgd_form(
      stream,
      {.table = a.table, .grad = a.grad, .residual = a.residual, .pending = a.pending, .marks = marks});
}

}  // namespace

ThinGemm thin_gemm(const ThinProduct& p) {
  // P^T = Q^T M^T, or Q^T = P^T M, where the memory of M is M^T.
  return {.transpose_b = p.onto_p,
          .m = p.rank,
          .n = p.onto_p ? p.cols : p.rows,
          .k = p.onto_p ? p.rows : p.cols,
          .a = p.factor,
          .lda = p.rank,
          .b = p.m,
          .ldb = p.cols,
          .c = p.out,
          .ldc = p.rank};
}

ThinProducts* thin_products(const Device& device) {
  return device.is_host() ? stand_in : on_cuda();
}

void stand_in_for_thin_products(ThinProducts* on_the_host) {
  stand_in = on_the_host;
}

namespace by_library {

void powersgd_project(const Stream& stream, const PowerSgdProject& a, ThinProducts& library, int32_t* marks) {
  const bool forms = a.residual != nullptr;
  if (forms) form(stream, a, marks);
  library.run(stream, products_of(*a.table, false, forms ? a.residual : a.grad, a.q, a.p));
  if (forms) {
    powersgd_overwrite(
        stream,
        {.table = a.table, .marks = marks, .p = a.p, .value = std::numeric_limits<float>::quiet_NaN()});
  }
}

void powersgd_project_onto(const Stream& stream, const PowerSgdProjectOnto& a, ThinProducts& library,
                           int32_t* marks) {
  const bool forms = a.residual != nullptr;
  if (forms) form(stream, a, marks);
  library.run(stream, products_of(*a.table, true, forms ? a.residual : a.grad, a.p, a.q));
  if (forms) {
    powersgd_overwrite(
        stream,
        {.table = a.table, .marks = marks, .q = a.q, .value = std::numeric_limits<float>::quiet_NaN()});
  }
}

void powersgd_back_project(const Stream& stream, const PowerSgdBackProject& a, ThinProducts& library) {
  library.run(stream, products_of(*a.table, true, a.m, a.p, a.q));
  if (a.flags != nullptr) {
    powersgd_overwrite(stream, {.table = a.table, .marks = a.flags, .q = a.q, .value = 0.0f});
  }
}

}  // namespace by_library

}  // namespace gradwire
