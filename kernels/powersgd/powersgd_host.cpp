// PowerSGD's passes on the host, each streaming the matrix once.
//
// Bytes per element: project and project_onto 12, back_project 8 (a panel of columns stays in the cache
// between its two uses), reconstruct 4 (non-temporal stores when the result is larger than a cache). Limit: memory up to
// about rank 8, then arithmetic. Work is cut into pieces that depend on the shapes alone, and each sum is
// taken within a piece in a fixed order, so results do not depend on the number of threads. Alignment: any.
// The loops are in powersgd_simd.cpp.
#include "kernels/powersgd/powersgd.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/math/bf16.h"
#include "kernels/powersgd/powersgd_simd.h"
#include "kernels/simd/simd.h"
#include "runtime/thread_pool.h"

namespace gradwire::host {
namespace {

// Enough rows to pay for transposing a piece of Q.
constexpr int64_t kTaskRows = 128;
// A thread takes adjacent tasks together: adjacent panels share the cache lines at their border, which would
// bounce between two cores (up to 2x of back_project's time where the cores share no cache).
constexpr int64_t kRunsPerThread = 16;
// Bytes of a back_project panel, whose second reading should come from a cache. In the second level where that holds a
// panel of 1 MiB (45 against 65 ms on Granite Rapids, 256 MiB); else in a core's share of the last one, since narrower
// panels lose more to short rows than they gain (37 against 26 ms on Zen 4, whose second level has 1 MiB).
int64_t panel_bytes() {
  static const bool large = sysconf(_SC_LEVEL2_CACHE_SIZE) >= 2 << 20;
  return large ? 1 << 20 : 2 << 20;
}

bool flagged(const int32_t* flags, int matrix) {
  return flags != nullptr && flags[matrix] != 0;
}

int64_t panel_columns_on_host(const MatrixDescriptor& d) {
  int64_t fit = panel_bytes() / (int64_t{4} * d.rows) / kStrip * kStrip;
  return std::clamp<int64_t>(fit, kStrip, kMaxPanelColumns);
}

// Cuts every matrix into tasks of grain(descriptor) of its lines(descriptor); runs body(matrix, begin, end).
template <typename Lines, typename Grain, typename Body>
void for_each_slice(const MatrixTable& table, const Lines& lines, const Grain& grain, const Body& body) {
  std::vector<int64_t> first_task{0};
  for (const auto& d : table.host())
    first_task.push_back(first_task.back() + (lines(d) + grain(d) - 1) / grain(d));
  int64_t run = std::max<int64_t>(1, first_task.back() / (kRunsPerThread * host_threads()));
  parallel_for(first_task.back(), run, [&](int64_t run_begin, int64_t run_end) {
    for (int64_t task = run_begin; task < run_end; ++task) {
      auto after = std::upper_bound(first_task.begin(), first_task.end(), task);
      int matrix = static_cast<int>(after - first_task.begin()) - 1;
      const auto& d = table.host()[matrix];
      int64_t begin = (task - first_task[matrix]) * grain(d);
      body(matrix, begin, std::min<int64_t>(lines(d), begin + grain(d)));
    }
  });
}

int64_t rows_of(const MatrixDescriptor& d) {
  return d.rows;
}
int64_t cols_of(const MatrixDescriptor& d) {
  return d.cols;
}
int64_t task_rows(const MatrixDescriptor&) {
  return kTaskRows;
}

// The residual M of a matrix that was not finite becomes the previous step's.
void restore_run(const float* grad, float* residual, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    if (!is_finite(grad[at])) continue;  // holds the old residual already
    float old = residual[at] - grad[at];
    residual[at] = is_finite(old) ? old : 0.0f;
  }
}

// Columns [begin, end) of a matrix that was not finite: Q = 0, and the residual becomes the previous step's.
void restore(const PowerSgdBackProject& a, const MatrixDescriptor& d, int64_t begin, int64_t end) {
  std::fill(a.q + d.q_offset + begin * d.rank, a.q + d.q_offset + end * d.rank, 0.0f);
  for (int64_t i = 0; a.residual != nullptr && i < d.rows; ++i) {
    const int64_t row = d.offset + i * d.cols;
    restore_run(a.grad, a.residual, row + begin, row + end);
  }
}

}  // namespace

void powersgd_project(const PowerSgdProject& a) {
  for_each_slice(*a.table, rows_of, task_rows, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    int64_t origin = d.offset + begin * d.cols;
    project_rows({.grad = a.grad + origin,
                  .residual = a.residual != nullptr ? a.residual + origin : nullptr,
                  .q = a.q + d.q_offset,
                  .p = a.p + d.p_offset + begin * d.rank,
                  .rows = end - begin,
                  .cols = d.cols,
                  .rank = d.rank});
  });
}

void powersgd_back_project(const PowerSgdBackProject& a) {
  for_each_slice(*a.table, cols_of, panel_columns_on_host, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    if (flagged(a.flags, matrix)) return restore(a, d, begin, end);
    const int64_t origin = d.offset + begin;
    back_project_panel({.m = (a.residual != nullptr ? a.residual : a.grad) + origin,
                        .residual = a.residual != nullptr ? a.residual + origin : nullptr,
                        .p = a.p + d.p_offset,
                        .q = a.q + d.q_offset + begin * d.rank,
                        .rows = d.rows,
                        .cols = d.cols,
                        .panel = end - begin,
                        .rank = d.rank});
  });
}

void powersgd_project_onto(const PowerSgdProjectOnto& a) {
  for_each_slice(*a.table, cols_of, panel_columns_on_host, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    const int64_t origin = d.offset + begin;
    project_onto_panel({.m = a.grad + origin,
                        .residual = a.residual != nullptr ? a.residual + origin : nullptr,
                        .p = a.p + d.p_offset,
                        .q = a.q + d.q_offset + begin * d.rank,
                        .rows = d.rows,
                        .cols = d.cols,
                        .panel = end - begin,
                        .rank = d.rank});
  });
}

void powersgd_reconstruct(const PowerSgdReconstruct& a) {
  bool stream = a.table->elements() * int64_t{sizeof(float)} >= kStreamBytes;
  for_each_slice(*a.table, rows_of, task_rows, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    int64_t origin = d.offset + begin * d.cols;
    if (flagged(a.flags, matrix)) {
      if (a.restore && a.residual != nullptr) {
        restore_run(a.grad, a.residual, origin, d.offset + end * d.cols);
      }
      std::fill(a.grad + origin, a.grad + d.offset + end * d.cols, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    ReconstructRows rows{.p = a.p + d.p_offset + begin * d.rank,
                         .q = a.q + d.q_offset,
                         .out = a.grad + origin,
                         .scale = a.scale,
                         .rows = end - begin,
                         .cols = d.cols,
                         .rank = d.rank,
                         .mode = stream ? Reconstruct::stream : Reconstruct::store};
    reconstruct_rows(rows);
    if (a.p_lost == nullptr && a.q_lost == nullptr) return;
    if (a.p_lost != nullptr) rows.p = a.p_lost + d.p_offset + begin * d.rank;
    if (a.q_lost != nullptr) rows.q = a.q_lost + d.q_offset;
    rows.out = a.residual + origin;
    rows.scale = 1.0f;
    rows.mode = Reconstruct::add_finite;
    reconstruct_rows(rows);
  });
}

}  // namespace gradwire::host
