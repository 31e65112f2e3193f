// Cases of PowerSGD: `size` bytes of gradients, as the matrices of a ViT-B's layers if they fit, otherwise as
// one square matrix.
#include <fmt/format.h>

#include <cmath>

#include "bench/cases/kernel_cases.h"
#include "kernels/gemm/gemm.h"
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
  // MLP, MLP, in_proj, out_proj.
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
  // Zero, so that the residual does not grow from launch to launch.
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

template <int kRank>
Problem project(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  PowerSgdProject args{m.table, m.grad, m.residual, m.pending, m.q, m.p};
  return {[args](const Stream& s) { powersgd_project(s, args); }, passes(m, 12), 2 * product(m), m.shape};
}

template <int kRank>
Problem back_project(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  PowerSgdBackProject args{m.table, m.residual, m.p, m.q, m.flags};
  return {[args](const Stream& s) { powersgd_back_project(s, args); }, passes(m, 4), product(m), m.shape};
}

template <int kRank>
Problem project_onto(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  PowerSgdProjectOnto args{m.table, m.grad, m.residual, m.pending, m.p, m.q};
  return {[args](const Stream& s) { powersgd_project_onto(s, args); }, passes(m, 12), 2 * product(m),
          m.shape};
}

template <int kRank>
Problem reconstruct(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  PowerSgdReconstruct args{.table = m.table, .p = m.p, .q = m.q, .grad = m.grad, .flags = m.flags};
  return {[args](const Stream& s) { powersgd_reconstruct(s, args); }, passes(m, 4), product(m), m.shape};
}

template <int kRank>
Problem settle(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  PowerSgdSettle args{.table = m.table, .residual = m.residual, .pending = m.pending};
  return {[args](const Stream& s) { powersgd_settle(s, args); }, passes(m, 8), product(m), m.shape};
}

template <int kRank>
Problem form(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  PowerSgdForm args{m.table, m.grad, m.residual, m.pending, m.flags};
  return {[args](const Stream& s) { powersgd_form(s, args); }, passes(m, 12), product(m), m.shape};
}

// Overwrites every matrix, which is the maximum work.
template <int kRank>
Problem overwrite(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  const auto* marks = reinterpret_cast<const int32_t*>(arena.normal(m.table->count()));  // all are nonzero
  PowerSgdOverwrite args{.table = m.table, .marks = marks, .p = m.p};
  double bytes = 0;
  for (const MatrixDescriptor& d : m.table->host()) bytes += 4.0 * (d.rows * d.rank + 1);
  return {[args](const Stream& s) { powersgd_overwrite(s, args); }, bytes, 0, m.shape};
}

// The same products with the BLAS library, one call per matrix, for comparison with the passes above. The
// library reads M once more: the passes form M while they multiply.
enum class Product { project, back_project, residual };
template <Product kProduct, int kRank>
Problem by_library(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  std::vector<Gemm> calls;
  for (const MatrixDescriptor& d : m.table->host()) {
    float *matrix = m.residual + d.offset, *p = m.p + d.p_offset, *q = m.q + d.q_offset;
    Gemm g{.m = d.rows,
           .n = d.rank,
           .k = d.cols,
           .a = matrix,
           .lda = d.cols,
           .b = q,
           .ldb = d.rank,
           .c = p,
           .ldc = d.rank};
    if constexpr (kProduct == Product::back_project) {
      g = {.transpose_a = true,
           .m = d.cols,
           .n = d.rank,
           .k = d.rows,
           .a = matrix,
           .lda = d.cols,
           .b = p,
           .ldb = d.rank};
      g.c = q;
      g.ldc = d.rank;
    } else if constexpr (kProduct == Product::residual) {
      g = {.transpose_b = true,
           .m = d.rows,
           .n = d.cols,
           .k = d.rank,
           .a = p,
           .lda = d.rank,
           .b = q,
           .ldb = d.rank};
      g.alpha = -1e-6f;
      g.beta = 1.0f;
      g.c = matrix;
      g.ldc = d.cols;
    }
    calls.push_back(g);
  }
  const double bytes = kProduct == Product::residual ? 8 : 4;
  return {[calls](const Stream& s) {
            for (const Gemm& g : calls) gemm(s, g);
          },
          passes(m, bytes), product(m), m.shape};
}

// Orthonormalizes all P of these matrices. Random columns take one pass.
template <int kRank>
Problem orthonormal(Arena& arena, int64_t size) {
  Matrices m = matrices(arena, size, kRank);
  float* out = arena.zeros<float>(m.table->p_elements());
  Orthonormalize args{.table = m.table, .which = Factor::p, .in = m.p, .out = out, .flags = m.flags};
  return {[args](const Stream& s) { orthonormalize(s, args); },
          12.0 * static_cast<double>(m.table->p_elements()), 0, m.shape};
}

const KernelCase kPowerSgdCases[] = {
    {"powersgd_project", "rank 1", "powersgd", project<1>},
    {"powersgd_project", "rank 4", "powersgd", project<4>},
    {"powersgd_project", "rank 32", "powersgd", project<32>},
    {"powersgd_project", "rank 64", "powersgd", project<64>},
    {"powersgd_back_project", "rank 1", "powersgd", back_project<1>},
    {"powersgd_back_project", "rank 4", "powersgd", back_project<4>},
    {"powersgd_back_project", "rank 32", "powersgd", back_project<32>},
    {"powersgd_back_project", "rank 64", "powersgd", back_project<64>},
    {"powersgd_project_onto", "rank 1", "powersgd", project_onto<1>},
    {"powersgd_project_onto", "rank 4", "powersgd", project_onto<4>},
    {"powersgd_project_onto", "rank 32", "powersgd", project_onto<32>},
    {"powersgd_reconstruct", "rank 1", "powersgd", reconstruct<1>},
    {"powersgd_reconstruct", "rank 4", "powersgd", reconstruct<4>},
    {"powersgd_reconstruct", "rank 32", "powersgd", reconstruct<32>},
    {"powersgd_reconstruct", "rank 64", "powersgd", reconstruct<64>},
    {"powersgd_settle", "rank 1", "powersgd", settle<1>},
    {"powersgd_settle", "rank 4", "powersgd", settle<4>},
    {"powersgd_form", "rank 1", "powersgd", form<1>},
    {"powersgd_form", "rank 32", "powersgd", form<32>},
    {"powersgd_overwrite", "rank 32", "powersgd", overwrite<32>},
    {"gemm", "P = M Q, rank 32", "powersgd-blas", by_library<Product::project, 32>},
    {"gemm", "P = M Q, rank 64", "powersgd-blas", by_library<Product::project, 64>},
    {"gemm", "Q = M^T P, rank 32", "powersgd-blas", by_library<Product::back_project, 32>},
    {"gemm", "Q = M^T P, rank 64", "powersgd-blas", by_library<Product::back_project, 64>},
    {"gemm", "E -= P Q^T, rank 32", "powersgd-blas", by_library<Product::residual, 32>},
    {"gemm", "E -= P Q^T, rank 64", "powersgd-blas", by_library<Product::residual, 64>},
    {"orthonormalize", "rank 1", "orthonormalize", orthonormal<1>},
    {"orthonormalize", "rank 4", "orthonormalize", orthonormal<4>},
    {"orthonormalize", "rank 32", "orthonormalize", orthonormal<32>},
};

}  // namespace

std::span<const KernelCase> powersgd_cases() {
  return kPowerSgdCases;
}

}  // namespace gradwire::bench
