// Cases of PowerSGD: `size` bytes of gradients, as the matrices of a ViT-B's layers if they fit, otherwise as
// one square matrix.
#include <fmt/format.h>

#include <cmath>

#include "bench/cases/kernel_cases.h"
#include "kernels/gemm/gemm.h"
#include "kernels/powersgd/normalize_columns.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire::bench {
namespace {

struct Matrices {
  const MatrixTable* table;
  float *grad, *residual, *p, *q;
  PendingFactors pending;
  int32_t* flags;
  std::string shape;
};

Matrices matrices(Arena& arena, int64_t size, int rank) {
  // Rows and columns of the layer's weights: MLP, MLP, in_proj, out_proj.
  constexpr std::pair<int32_t, int32_t> kLayer[] = {{3072, 768}, {768, 3072}, {2304, 768}, {768, 768}};
  std::vector<MatrixDescriptor> list;
  int64_t offset = 0, p = 0, q = 0;
  auto add = [&](int32_t rows, int32_t cols) {
    list.push_back(
        {offset, p, q, rows, cols, std::min({rank, rows, cols}), static_cast<int32_t>(list.size())});
    offset += int64_t{rows} * cols;
    p += int64_t{rows} * list.back().rank;
    q += int64_t{cols} * list.back().rank;
  };
  for (size_t i = 0;; ++i) {
    auto [rows, cols] = kLayer[i % std::size(kLayer)];
    if ((offset + int64_t{rows} * cols) * 4 > size) break;
    add(rows, cols);
  }
  if (list.empty()) {
    auto side = static_cast<int32_t>(std::sqrt(static_cast<double>(size / 4)));
    add(side, side);
  }
  Matrices m{};
  m.shape = list.size() == 1 ? fmt::format("{}x{} r{}", list[0].rows, list[0].cols, list[0].rank)
                             : fmt::format("{} matrices r{}", list.size(), list[0].rank);
  m.table = arena.make<MatrixTable>(arena.stream(), std::move(list));
  m.grad = arena.normal(offset);
  m.residual = arena.normal(offset);
  m.p = arena.normal(p);
  m.q = arena.normal(q);
  // One pending factor is zero, so that the residual does not grow from launch to launch.
  m.pending = {arena.zeros<float>(p), arena.normal(q)};
  m.flags = arena.zeros<int32_t>(m.table->count());
  return m;
}

double passes(const Matrices& m, double bytes_per_element) {
  return bytes_per_element * static_cast<double>(m.table->elements());
}
double product(const Matrices& m) {
  double flops = 0;
  for (const MatrixDescriptor& d : m.table->host()) flops += 2.0 * d.rows * d.cols * d.rank;
  return flops;
}

Problem project(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdProject args{m.table, m.grad, m.residual, m.pending, m.q, m.p};
  return {[args](const Stream& s) { powersgd_project(s, args); }, passes(m, 12), 2 * product(m), m.shape};
}

Problem back_project(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdBackProject args{m.table, m.residual, m.p, m.q, m.flags};
  return {[args](const Stream& s) { powersgd_back_project(s, args); }, passes(m, 4), product(m), m.shape};
}

Problem project_onto(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdProjectOnto args{m.table, m.grad, m.residual, m.pending, m.p, m.q};
  return {[args](const Stream& s) { powersgd_project_onto(s, args); }, passes(m, 12), 2 * product(m),
          m.shape};
}

Problem reconstruct(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdReconstruct args{.table = m.table, .p = m.p, .q = m.q, .grad = m.grad, .flags = m.flags};
  return {[args](const Stream& s) { powersgd_reconstruct(s, args); }, passes(m, 4), product(m), m.shape};
}

Problem settle(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdSettle args{.table = m.table, .residual = m.residual, .pending = m.pending};
  return {[args](const Stream& s) { powersgd_settle(s, args); }, passes(m, 8), product(m), m.shape};
}

Problem form(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdForm args{m.table, m.grad, m.residual, m.pending, m.flags};
  return {[args](const Stream& s) { powersgd_form(s, args); }, passes(m, 12), product(m), m.shape};
}

// Returns an overwrite of every matrix, the maximum work of the op.
Problem overwrite(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  // All marks are nonzero.
  const auto* marks = reinterpret_cast<const int32_t*>(arena.normal(m.table->count()));
  PowerSgdOverwrite args{.table = m.table, .marks = marks, .p = m.p};
  double bytes = 0;
  for (const MatrixDescriptor& d : m.table->host()) bytes += 4.0 * (d.rows * d.rank + 1);
  return {[args](const Stream& s) { powersgd_overwrite(s, args); }, bytes, 0, m.shape};
}

// The products of the passes above with the BLAS library, one call per matrix, for comparison. The library
// reads M once more, because the passes form M while they multiply.
enum class Product { project, back_project, residual };
template <Product kProduct>
Problem by_library(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  std::vector<Gemm> calls;
  for (const MatrixDescriptor& d : m.table->host()) {
    float *matrix = m.residual + d.offset, *p = m.p + d.p_offset, *q = m.q + d.q_offset;
    Gemm g{.m = d.rows, .n = d.rank, .k = d.cols};
    g.a = matrix, g.lda = d.cols, g.b = q, g.ldb = d.rank, g.c = p, g.ldc = d.rank;
    if constexpr (kProduct == Product::back_project) {
      g.transpose_a = true;
      g.m = d.cols, g.k = d.rows, g.b = p, g.c = q;
    } else if constexpr (kProduct == Product::residual) {
      g.transpose_b = true;
      g.n = d.cols, g.k = d.rank, g.a = p, g.lda = d.rank, g.c = matrix, g.ldc = d.cols;
      g.alpha = -1e-6f;
      g.beta = 1.0f;
    }
    calls.push_back(g);
  }
  const double bytes = kProduct == Product::residual ? 8 : 4;
  return {[calls](const Stream& s) {
            for (const Gemm& g : calls) gemm(s, g);
          },
          passes(m, bytes), product(m), m.shape};
}

// Returns the orthonormalization of the factors P of all matrices. Random columns take one pass.
Problem orthonormal(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  float* out = arena.zeros<float>(m.table->p_elements());
  Orthonormalize args{.table = m.table, .which = Factor::p, .in = m.p, .out = out, .flags = m.flags};
  args.scratch = arena.zeros<double>(m.table->scratch_doubles());
  return {[args](const Stream& s) { orthonormalize(s, args); },
          12.0 * static_cast<double>(m.table->p_elements()), 0, m.shape};
}

// Returns the division of the factors R of all matrices by the norms of their columns.
Problem normalized(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  int64_t count = 0;
  for (const MatrixDescriptor& d : m.table->host()) count += int64_t{d.cols} * d.rank;
  const NormalizeColumns args{m.table, m.q, arena.zeros<float>(count), m.flags};
  return {[args](const Stream& s) { normalize_columns(s, args); }, 12.0 * static_cast<double>(count), 0,
          m.shape};
}

struct CasesByRank {
  const char *op, *prefix, *family;
  Problem (*make)(Arena& arena, int64_t size, int rank);
  std::vector<int> ranks;
};

std::vector<KernelCase> make_powersgd_cases() {
  const CasesByRank table[] = {
      {"powersgd_project", "", "powersgd", project, {1, 4, 32, 64}},
      {"powersgd_back_project", "", "powersgd", back_project, {1, 4, 32, 64}},
      {"powersgd_project_onto", "", "powersgd", project_onto, {1, 4, 32}},
      {"powersgd_reconstruct", "", "powersgd", reconstruct, {1, 4, 32, 64}},
      {"powersgd_settle", "", "powersgd", settle, {1, 4}},
      {"powersgd_form", "", "powersgd", form, {1, 32}},
      {"powersgd_overwrite", "", "powersgd", overwrite, {32}},
      {"gemm", "P = M Q, ", "powersgd-blas", by_library<Product::project>, {32, 64}},
      {"gemm", "Q = M^T P, ", "powersgd-blas", by_library<Product::back_project>, {32, 64}},
      {"gemm", "E -= P Q^T, ", "powersgd-blas", by_library<Product::residual>, {32, 64}},
      {"orthonormalize", "", "orthonormalize", orthonormal, {1, 4, 32, 256}},
      {"normalize_columns", "", "normalize_columns", normalized, {4, 256}},
  };
  std::vector<KernelCase> all;
  for (const CasesByRank& cases : table) {
    for (int rank : cases.ranks) {
      all.push_back(
          {cases.op, fmt::format("{}rank {}", cases.prefix, rank), cases.family,
           [make = cases.make, rank](Arena& arena, int64_t size) { return make(arena, size, rank); }});
    }
  }
  return all;
}

}  // namespace

std::span<const KernelCase> powersgd_cases() {
  static const std::vector<KernelCase> cases = make_powersgd_cases();
  return cases;
}

}  // namespace gradwire::bench
