// Fixture for tests of PowerSGD's passes: buckets of matrices on a backend, and functions that run the passes
// on arrays.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/powersgd/powersgd.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {

struct MatrixShape {
  int32_t rows, cols, rank;
};

// The matrices of a bucket, `gap` elements apart. A pass must not write to the gaps.
struct MatrixBucket {
  MatrixTable table;
  int64_t elements = 0, p_elements = 0, q_elements = 0;
};

inline std::vector<float> gather(const std::vector<float>& all, int64_t offset, int64_t count) {
  return {all.begin() + offset, all.begin() + offset + count};
}

// Returns the largest |got - want| relative to `scale`.
inline double worst(const std::vector<float>& got, const std::vector<float>& want, double scale) {
  EXPECT_EQ(got.size(), want.size());
  double most = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    double difference = std::fabs(static_cast<double>(got[i]) - want[i]);
    if (std::isnan(difference)) return difference;
    most = std::max(most, difference);
  }
  return most / scale;
}

// Pending factors of a residual. An empty `p` means that no factors are pending.
struct Pending {
  std::vector<float> p = {}, q = {};
  std::vector<int32_t> flags = {};
  PendingFactors args() const {
    return {p.empty() ? nullptr : p.data(), q.data(), flags.empty() ? nullptr : flags.data()};
  }
};

inline std::vector<float> negated(std::vector<float> values) {
  for (float& x : values) x = -x;
  return values;
}

class PowerSgdFixture : public OpTest {
 public:
  MatrixBucket bucket(const std::vector<MatrixShape>& shapes, int64_t gap) {
    MatrixBucket b;
    std::vector<MatrixDescriptor> matrices;
    for (const auto& s : shapes) {
      matrices.push_back({.offset = b.elements + gap,
                          .p_offset = b.p_elements + gap,
                          .q_offset = b.q_elements + gap,
                          .rows = s.rows,
                          .cols = s.cols,
                          .rank = s.rank,
                          .seed_id = static_cast<int32_t>(matrices.size())});
      b.elements += int64_t{s.rows} * s.cols + gap;
      b.p_elements += int64_t{s.rows} * s.rank + gap;
      b.q_elements += int64_t{s.cols} * s.rank + gap;
    }
    b.elements += gap, b.p_elements += gap, b.q_elements += gap;
    b.table = MatrixTable(stream, std::move(matrices));
    return b;
  }

  // Returns P, the projection onto Q. Adds the gradient and the pending factors to the residual.
  std::vector<float> project(const MatrixBucket& b, const std::vector<float>& grad,
                             std::vector<float>* residual, const std::vector<float>& q,
                             const Pending& pending = {}) {
    return pass(
        b, grad, residual, q, pending, b.p_elements,
        [&](float* g, float* e, const float* factor, float* p, const PendingFactors& held) {
          GW_RUN(powersgd_project,
                 (PowerSgdProject{
                     .table = &b.table, .grad = g, .residual = e, .pending = held, .q = factor, .p = p}));
        },
        &MatrixDescriptor::p_offset, [](const auto& d) { return d.rows * d.rank; });
  }
  // Returns Q, the projection onto P. Adds the gradient and the pending factors to the residual.
  std::vector<float> project_onto(const MatrixBucket& b, const std::vector<float>& grad,
                                  std::vector<float>* residual, const std::vector<float>& p,
                                  const Pending& pending = {}) {
    return pass(
        b, grad, residual, p, pending, b.q_elements,
        [&](float* g, float* e, const float* factor, float* q, const PendingFactors& held) {
          GW_RUN(powersgd_project_onto,
                 (PowerSgdProjectOnto{
                     .table = &b.table, .grad = g, .residual = e, .pending = held, .p = factor, .q = q}));
        },
        &MatrixDescriptor::q_offset, [](const auto& d) { return d.cols * d.rank; });
  }
  // Returns the projection onto P if `onto_p`, otherwise onto Q.
  std::vector<float> project(bool onto_p, const MatrixBucket& b, const std::vector<float>& grad,
                             std::vector<float>* residual, const std::vector<float>& factor,
                             const Pending& pending = {}) {
    return onto_p ? project_onto(b, grad, residual, factor, pending)
                  : project(b, grad, residual, factor, pending);
  }

  std::vector<float> back_project(const MatrixBucket& b, const std::vector<float>& m,
                                  const std::vector<float>& p, const std::vector<int32_t>& flags) {
    auto m_array = array(m), q = array<float>(b.q_elements), p_array = array(p);
    auto f = array(flags);
    PowerSgdBackProject args{.table = &b.table, .m = m_array.data(), .p = p_array.data(), .q = q.data()};
    args.flags = flags.empty() ? nullptr : f.data();
    GW_RUN(powersgd_back_project, args);
    for (auto* a : {&m_array, &q}) a->expect_guards_intact("back_project");
    expect_same_bits(m_array.host(), m, "M is read only");
    expect_gaps_untouched(b, q.host(), &MatrixDescriptor::q_offset,
                          [](const auto& d) { return d.cols * d.rank; });
    return q.host();
  }

  // Returns the reconstruction P Q^T times `scale`. With error feedback, and for a flagged matrix, `grad` is
  // the pass's input and `residual` is M.
  std::vector<float> reconstruct(const MatrixBucket& b, const std::vector<float>& p,
                                 const std::vector<float>& q, float scale, const std::vector<int32_t>& flags,
                                 const std::vector<float>* grad = nullptr,
                                 std::vector<float>* residual = nullptr) {
    auto g = array<float>(b.elements), p_array = array(p), q_array = array(q);
    if (grad != nullptr) g.set(*grad);
    auto e = array(residual != nullptr ? *residual : q);
    auto f = array(flags);
    PowerSgdReconstruct args{.table = &b.table, .p = p_array.data(), .q = q_array.data(), .grad = g.data()};
    args.scale = scale;
    args.flags = flags.empty() ? nullptr : f.data();
    if (residual != nullptr) args.residual = e.data();
    GW_RUN(powersgd_reconstruct, args);
    for (auto* a : {&g, &e}) a->expect_guards_intact("reconstruct");
    if (residual != nullptr) *residual = e.host();
    if (grad == nullptr) {
      expect_gaps_untouched(b, g.host(), &MatrixDescriptor::offset,
                            [](const auto& d) { return int64_t{d.rows} * d.cols; });
    }
    return g.host();
  }

  void settle(const MatrixBucket& b, std::vector<float>& residual, const Pending& pending, int matrix = -1) {
    auto e = array(residual);
    OnDevice there(*this, pending);
    GW_RUN(
        powersgd_settle,
        (PowerSgdSettle{.table = &b.table, .residual = e.data(), .pending = there.args(), .matrix = matrix}));
    e.expect_guards_intact("settle");
    residual = e.host();
  }

  // Pending factors in the backend's memory.
  struct OnDevice {
    OnDevice(PowerSgdFixture& fixture, const Pending& from)
        : none(from.p.empty()),
          none_flagged(from.flags.empty()),
          p(fixture.array(from.p)),
          q(fixture.array(from.q)),
          flags(fixture.array(from.flags)) {}
    PendingFactors args() const {
      return {none ? nullptr : p.data(), q.data(), none_flagged ? nullptr : flags.data()};
    }
    bool none, none_flagged;
    Array<float> p, q;
    Array<int32_t> flags;
  };

  template <typename Run, typename Size>
  std::vector<float> pass(const MatrixBucket& b, const std::vector<float>& grad, std::vector<float>* residual,
                          const std::vector<float>& factor, const Pending& pending, int64_t count,
                          const Run& run, int64_t MatrixDescriptor::*offset, Size size) {
    auto g = array(grad), e = array(residual != nullptr ? *residual : grad), out = array<float>(count);
    auto in = array(factor);
    OnDevice there(*this, pending);
    const bool with_residual = residual != nullptr;
    run(g.data(), with_residual ? e.data() : nullptr, in.data(), out.data(),
        with_residual ? there.args() : PendingFactors{});
    for (auto* a : {&g, &e, &out}) a->expect_guards_intact("projection");
    expect_same_bits(g.host(), grad, "grad is read only");
    if (with_residual) *residual = e.host();
    expect_gaps_untouched(b, out.host(), offset, size);
    return out.host();
  }

  // Expects the poison between the matrices to be unchanged.
  template <typename Size>
  void expect_gaps_untouched(const MatrixBucket& b, std::vector<float> all, int64_t MatrixDescriptor::*offset,
                             Size size) {
    uint32_t poison = 0xcdcdcdcdu;
    for (const auto& d : b.table.host()) {
      std::fill_n(all.begin() + d.*offset, size(d), bits_float(poison));
    }
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(float_bits(all[i]), poison) << "gap element " << i;
  }
};

struct PowerSgdCase {
  const char* name;
  std::vector<MatrixShape> shapes;
  int64_t gap;
};

// Returns cases that are small enough for the CPU shim and lie on both sides of every block boundary of the
// kernels.
inline std::vector<PowerSgdCase> powersgd_cases() {
  return {
      {"one element", {{1, 1, 1}}, 0},
      {"row and column", {{1, 9, 1}, {9, 1, 1}, {1, 1100, 1}, {1100, 1, 1}}, 3},
      {"square, aligned", {{64, 64, 4}, {16, 16, 4}}, 0},
      {"square, odd", {{63, 65, 3}, {33, 31, 5}}, 1},
      {"tall", {{577, 5, 2}, {1290, 9, 7}}, 4},
      {"very tall", {{3000, 8, 4}}, 0},
      {"wide", {{5, 1030, 2}, {7, 1025, 7}, {9, 2052, 4}}, 4},
      {"vit block", {{48, 16, 4}, {16, 16, 4}, {64, 16, 4}, {16, 64, 4}, {10, 16, 4}}, 0},
      {"rank 1", {{36, 260, 1}, {37, 41, 1}}, 2},
      {"rank 2", {{36, 260, 2}, {37, 41, 2}}, 2},
      {"rank 8", {{36, 260, 8}, {37, 41, 8}}, 0},
      {"rank 9", {{36, 44, 9}}, 0},
      {"rank 16", {{16, 1028, 16}, {65, 20, 16}}, 8},
      {"rank 32", {{65, 34, 32}, {32, 32, 32}}, 5},
      {"rank 64", {{64, 68, 64}, {65, 67, 64}}, 0},
      {"rank 70", {{75, 70, 70}, {72, 133, 66}, {20, 31, 4}}, 3},
      {"mixed ranks", {{20, 60, 1}, {20, 60, 4}, {30, 60, 23}, {40, 41, 40}}, 1},
  };
}

// Returns |grad + old - (applied + residual)| relative to |grad + old|, which is 0 if the pass conserves the
// input.
inline double loss_of(const MatrixBucket& b, const std::vector<float>& grad, const std::vector<float>& old,
                      const std::vector<float>& applied, const std::vector<float>& residual) {
  double in = 0.0, lost = 0.0;
  for (const auto& d : b.table.host()) {
    for (int64_t at = d.offset; at < d.offset + int64_t{d.rows} * d.cols; ++at) {
      const double m = static_cast<double>(grad[at]) + old[at],
                   out = static_cast<double>(applied[at]) + residual[at];
      in += m * m;
      lost += (m - out) * (m - out);
    }
  }
  return std::sqrt(lost / in);
}

// Returns cases with the sizes of real layers, for devices that are fast enough.
inline std::vector<PowerSgdCase> larger_powersgd_cases() {
  return {
      {"large", {{768, 700, 4}, {16, 4096, 4}, {3500, 12, 4}, {700, 7, 7}}, 4},
#ifndef GRADWIRE_SANITIZED
      {"large, rank 512", {{520, 600, 512}, {300, 700, 257}, {130, 1030, 130}}, 4},
      {"large, rank 64", {{100, 260, 64}, {67, 1033, 64}, {300, 2100, 33}}, 0},
#endif
  };
}

// Returns all cases for a backend.
inline std::vector<PowerSgdCase> all_powersgd_cases(const Backend& backend) {
  auto all = powersgd_cases();
  if (!backend.simt) {
    for (auto& c : larger_powersgd_cases()) all.push_back(c);
  }
  return all;
}

}  // namespace gradwire::testing
