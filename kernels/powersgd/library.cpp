#include "kernels/powersgd/library.h"

#include <limits>
#include <vector>

namespace gradwire {
namespace {

ThinProducts* stand_in = nullptr;

// Forms M in the residual, if there is one, multiplies, and overwrites the factor `p` or `q` of matrices
// whose M is not finite.
template <typename Project>
void project(const Stream& stream, const Project& a, ThinProducts* library, int32_t* marks,
             const float* factors, float* p, float* q) {
  const bool forms = a.residual != nullptr, onto_p = q != nullptr;
  if (forms) {
    fill_zero(stream, marks, static_cast<size_t>(a.table->count()) * sizeof(int32_t));
    powersgd_form(
        stream,
        {.table = a.table, .grad = a.grad, .residual = a.residual, .pending = a.pending, .marks = marks});
  }
  const float* const m = forms ? a.residual : a.grad;
  if (library != nullptr) {
    library->run(stream, thin_gemms(*a.table, onto_p, m, factors, onto_p ? q : p));
  } else if (onto_p) {
    gradwire::powersgd_back_project(stream, {.table = a.table, .m = m, .p = factors, .q = q});
  } else {
    gradwire::powersgd_project(stream, {.table = a.table, .grad = m, .q = factors, .p = p});
  }
  if (!forms) return;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  powersgd_overwrite(stream, {.table = a.table, .marks = marks, .p = p, .q = q, .value = kNan});
}

}  // namespace

std::vector<ThinGemm> thin_gemms(const MatrixTable& table, bool onto_p, const float* m, const float* factors,
                                 float* out) {
  std::vector<ThinGemm> all;
  for (const MatrixDescriptor& d : table.host()) {
    all.push_back({.transpose_b = onto_p,
                   .m = d.rank,
                   .n = onto_p ? d.cols : d.rows,
                   .k = onto_p ? d.rows : d.cols,
                   .a = factors + (onto_p ? d.p_offset : d.q_offset),
                   .lda = d.rank,
                   .b = m + d.offset,
                   .ldb = d.cols,
                   .c = out + (onto_p ? d.q_offset : d.p_offset),
                   .ldc = d.rank});
  }
  return all;
}

ThinProducts* thin_products(const Device& device) {
  if (device.is_host()) return stand_in;
#ifdef GRADWIRE_HAS_CUDA
  static ThinProducts* const library = cuda::thin_products();
  return library;
#else
  return nullptr;
#endif
}

void stand_in_for_thin_products(ThinProducts* on_the_host) {
  stand_in = on_the_host;
}

namespace by_library {

void powersgd_project(const Stream& stream, const PowerSgdProject& a, ThinProducts* library, int32_t* marks) {
  project(stream, a, library, marks, a.q, a.p, nullptr);
}

void powersgd_project_onto(const Stream& stream, const PowerSgdProjectOnto& a, ThinProducts* library,
                           int32_t* marks) {
  project(stream, a, library, marks, a.p, nullptr, a.q);
}

void powersgd_back_project(const Stream& stream, const PowerSgdBackProject& a, ThinProducts* library) {
  if (library == nullptr) return gradwire::powersgd_back_project(stream, a);
  library->run(stream, thin_gemms(*a.table, true, a.m, a.p, a.q));
  if (a.flags != nullptr) {
    powersgd_overwrite(stream, {.table = a.table, .marks = a.flags, .q = a.q, .value = 0.0f});
  }
}

}  // namespace by_library

}  // namespace gradwire
