// PowerSGD's passes on the host; each streams the matrix once.
//
// Bytes per element: project, project_onto and form 12, back_project 4, reconstruct 4 (non-temporal stores
// when the result is larger than a cache), settle 8. Limit: memory up to about rank 8, then arithmetic. Rows
// are read in memory order, because hardware prefetches only along rows. Pieces depend on the shapes alone.
// Sums within a piece, and over pieces, have a fixed order, so results do not depend on the number of
// threads. Alignment: any. The loops are in powersgd_simd.cpp.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"
#include "kernels/powersgd/powersgd_simd.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"

namespace gradwire::host {
namespace {

// Rows per task: enough to amortize transposing a piece of Q.
constexpr int64_t kTaskRows = 128;
// Elements of a piece of back_project: about a megabyte, with enough rows that its sums are small in
// comparison.
constexpr int64_t kPieceElements = 256 * 1024;
constexpr int64_t kPieceRowsPerRank = 64;

int64_t pieces_in(int64_t size, int64_t piece) {
  return (size + piece - 1) / piece;
}

// Runs body(matrix, begin, end) for kTaskRows rows at a time of every matrix, or of matrix `only`.
template <typename Body>
void for_rows(const MatrixTable& table, const Body& body, int only = -1) {
  const auto index = [&](const MatrixDescriptor& d) { return static_cast<int>(&d - table.host().data()); };
  for_parts(
      table.host(),
      [&](const auto& d) { return only < 0 || only == index(d) ? pieces_in(d.rows, kTaskRows) : 0; },
      [&](const auto& d, int64_t task) {
        const int64_t begin = task * kTaskRows;
        body(index(d), begin, std::min<int64_t>(d.rows, begin + kTaskRows));
      });
}

// Returns rows and columns of a matrix, starting at (row, column), with the pending factors; pending_p is
// null where nothing is pending.
MatrixPart part_of(const MatrixTable& table, int matrix, const float* grad, float* residual,
                   const PendingFactors& pending, int64_t row, int64_t rows, int64_t column,
                   int64_t columns) {
  const MatrixDescriptor& d = table.host()[matrix];
  const int64_t origin = d.offset + row * d.cols + column;
  const bool pends = pending.exist(matrix);
  return {.grad = grad + origin,
          .residual = residual != nullptr ? residual + origin : nullptr,
          .pending_p = pends ? pending.p + d.p_offset + row * d.rank : nullptr,
          .pending_q = pends ? pending.q + d.q_offset + column * d.rank : nullptr,
          .rows = rows,
          .columns = columns,
          .cols = d.cols,
          .rank = d.rank};
}

// Adds the pending product to whole rows of the residual, if there is one.
void settle_rows(const MatrixPart& m) {
  if (m.pending_p == nullptr) return;
  reconstruct_rows({.p = m.pending_p,
                    .q = m.pending_q,
                    .out = m.residual,
                    .scale = 1.0f,
                    .rows = m.rows,
                    .cols = m.cols,
                    .rank = m.rank,
                    .mode = Reconstruct::settle});
}

// The columns of a matrix that one thread sums, in pieces of rows whose sums are stored in sequence.
struct ColumnSums {
  int matrix;
  int64_t column, columns, stride;
  int64_t piece_rows, pieces;
  int64_t sums;  // offset of the sums of these columns
};

// Computes Q = M^T P of the matrices that are not flagged. `m` is M; with a residual, it is the gradient, and
// M is formed in the residual.
void project_transposed(const MatrixTable& table, const int32_t* flags, const float* p, float* q,
                        const float* m, float* residual, const PendingFactors& pending) {
  std::vector<ColumnSums> all;
  int64_t floats = 0;
  for (int matrix = 0; matrix < table.count(); ++matrix) {
    const auto& d = table.host()[matrix];
    const int64_t most = piece_columns(d.rank, d.cols);
    const int64_t piece_rows = std::max(kPieceElements / most, kPieceRowsPerRank * d.rank);
    for (int64_t column = 0; column < d.cols; column += most) {
      const int64_t columns = std::min<int64_t>(most, d.cols - column);
      const int64_t stride = pieces_in(columns, kStrip) * kStrip, count = pieces_in(d.rows, piece_rows);
      all.push_back({matrix, column, columns, stride, piece_rows, count, floats});
      floats += count * d.rank * stride;
    }
  }
  const auto sums = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(floats));
  for_parts(
      all, [](const ColumnSums& c) { return c.pieces; },
      [&](const ColumnSums& c, int64_t piece) {
        const auto& d = table.host()[c.matrix];
        if (flagged(flags, c.matrix)) return;
        const int64_t row = piece * c.piece_rows, rows = std::min(c.piece_rows, d.rows - row);
        back_project_piece(part_of(table, c.matrix, m, residual, pending, row, rows, c.column, c.columns),
                           p + d.p_offset + row * d.rank, sums.get() + c.sums + piece * d.rank * c.stride,
                           c.stride);
      });
  parallel_for(static_cast<int64_t>(all.size()), 1, [&](int64_t begin, int64_t) {
    const ColumnSums& c = all[begin];
    const auto& d = table.host()[c.matrix];
    float* to = q + d.q_offset + c.column * d.rank;
    if (flagged(flags, c.matrix)) {
      std::fill(to, to + c.columns * d.rank, 0.0f);
    } else {
      add_pieces(sums.get() + c.sums, c.pieces, c.columns, c.stride, d.rank, to);
    }
  });
}

}  // namespace

void powersgd_project(const PowerSgdProject& a) {
  for_rows(*a.table, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    project_rows(part_of(*a.table, matrix, a.grad, a.residual, a.pending, begin, end - begin, 0, d.cols),
                 a.q + d.q_offset, a.p + d.p_offset + begin * d.rank);
  });
}

void powersgd_form(const PowerSgdForm& a) {
  for_rows(*a.table, [&](int matrix, int64_t begin, int64_t end) {
    const MatrixPart part = part_of(*a.table, matrix, a.grad, a.residual, a.pending, begin, end - begin, 0,
                                    a.table->host()[matrix].cols);
    settle_rows(part);
    bool finite = true;
    for (int64_t i = 0; i < part.rows * part.cols; ++i) {
      const float grad = part.grad[i], sum = grad + part.residual[i];
      finite &= is_finite(sum);
      if (is_finite(grad)) part.residual[i] = std::clamp(sum, -FLT_MAX, FLT_MAX);
    }
    // The store is atomic because several threads may have rows of one matrix.
    if (!finite) std::atomic_ref(a.marks[matrix]).store(1, std::memory_order_relaxed);
  });
}

void powersgd_overwrite(const PowerSgdOverwrite& a) {
  reference::powersgd_overwrite(a);
}

void powersgd_back_project(const PowerSgdBackProject& a) {
  project_transposed(*a.table, a.flags, a.p, a.q, a.m, nullptr, {});
}

void powersgd_project_onto(const PowerSgdProjectOnto& a) {
  project_transposed(*a.table, nullptr, a.p, a.q, a.grad, a.residual, a.pending);
}

void powersgd_reconstruct(const PowerSgdReconstruct& a) {
  bool stream = a.table->elements() * int64_t{sizeof(float)} >= kStreamBytes;
  for_rows(*a.table, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    const int64_t origin = d.offset + begin * d.cols, after = d.offset + end * d.cols;
    if (flagged(a.flags, matrix)) {
      for (int64_t i = origin; a.residual != nullptr && i < after; ++i) restore(a.grad[i], a.residual[i]);
      std::fill(a.grad + origin, a.grad + after, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    reconstruct_rows({.p = a.p + d.p_offset + begin * d.rank,
                      .q = a.q + d.q_offset,
                      .out = a.grad + origin,
                      .scale = a.scale,
                      .rows = end - begin,
                      .cols = d.cols,
                      .rank = d.rank,
                      .mode = stream ? Reconstruct::stream : Reconstruct::store});
  });
}

void powersgd_settle(const PowerSgdSettle& a) {
  for_rows(
      *a.table,
      [&](int matrix, int64_t begin, int64_t end) {
        settle_rows(part_of(*a.table, matrix, a.residual, a.residual, a.pending, begin, end - begin, 0,
                            a.table->host()[matrix].cols));
      },
      a.matrix);
}

}  // namespace gradwire::host

namespace gradwire {

MatrixTable::MatrixTable(const Stream& stream, std::vector<MatrixDescriptor> matrices)
    : host_(std::move(matrices)) {
  std::vector<MatrixBlocks>& starts = host_blocks_;
  for (MatrixDescriptor& d : host_) {
    int32_t most = std::min({d.rows, d.cols, static_cast<int32_t>(kMaxPowerSgdRank)});
    if (d.rank < 1 || d.rank > most) {
      throw BadInput("PowerSGD: rank {} for a {} x {} matrix; it must be from 1 to {}", d.rank, d.rows,
                     d.cols, most);
    }
    elements_ += int64_t{d.rows} * d.cols;
    p_elements_ += int64_t{d.rows} * d.rank;
    q_elements_ += int64_t{d.cols} * d.rank;
    max_rank_ = std::max(max_rank_, d.rank);
    d.scratch = scratch_doubles_;
    scratch_doubles_ += large_scratch_doubles(d.rank);
    auto pieces = [](int32_t size, int32_t piece) { return (size + piece - 1) / piece; };
    starts.push_back({.row_tile = starts.back().row_tile + pieces(d.rows, kRowTileRows),
                      .panel = starts.back().panel + pieces(d.cols, panel_columns(d.rows)),
                      .tile = starts.back().tile + pieces(d.rows, kTileRows) * pieces(d.cols, kTileCols),
                      .wide_row_tile = starts.back().wide_row_tile + pieces(d.rows, kWideRowTileRows),
                      .wide_panel = starts.back().wide_panel + pieces(d.cols, kWidePanelColumns)});
  }
  device_ = make_buffer<MatrixDescriptor>(stream.device(), count());
  to_device(stream, device_.as<MatrixDescriptor>(), std::span<const MatrixDescriptor>(host_));
  blocks_ = make_buffer<MatrixBlocks>(stream.device(), count() + 1);
  to_device(stream, blocks_.as<MatrixBlocks>(), std::span<const MatrixBlocks>(starts));
}

SegmentTable::SegmentTable(const Stream& stream, std::vector<Segment> segments) : host_(std::move(segments)) {
  for (const Segment& s : host_) longest_ = std::max(longest_, s.count);
  device_ = make_buffer<Segment>(stream.device(), count());
  to_device(stream, device_.as<Segment>(), std::span<const Segment>(host_));
}

void host::pack(const Pack& a) {
  for (const Segment& s : a.table->host()) {
    float* scattered = a.scattered + s.scattered;
    if (a.unpack && a.packed == nullptr) {
      std::fill_n(scattered, s.count, 0.0f);
      continue;
    }
    float* packed = a.packed + s.packed;
    std::memcpy(a.unpack ? scattered : packed, a.unpack ? packed : scattered, s.count * sizeof(float));
  }
}

}  // namespace gradwire
