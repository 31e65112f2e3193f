// PowerSGD's three passes over the gradient matrices of a bucket (Vogels et al., arXiv 1905.13727), fused
// with error feedback. One call handles all matrices of the bucket through a table of descriptors.
//
// Matrices are row-major M (rows, cols); the factors are row-major P (rows, rank) and Q (cols, rank).
//
//   (a) project       E = residual - P Q^T with the *last* step's P and local Q;
//                     M = grad + E, stored into residual;  P = M Q                       12 B/element
//       -- P is summed over ranks and orthonormalized --
//   (b) back_project  Q = M^T P, local to this rank                                       4 B/element
//       -- Q is summed over ranks, while (b) of other matrices still runs --
//   (c) reconstruct   grad = scale * P Q^T  with the summed Q                             4 B/element
//
// The residual E = M - P Q^T is *local*: the part lost by this rank's projection. Summed over ranks, the
// residuals and the applied gradient equal the gradients that went in, because P is the same on all ranks and
// Q enters linearly. E is computed by the next step's (a), which reads and writes the residual anyway;
// computing it in the same step would read and write M once more. Until then the residual array holds M, and
// P and -Q are *pending*. settle() computes E in place (8 B/element), for callers that need it between steps.
//
// Where P and Q alternate (ACP-SGD), a step sums one factor, computed from the other factor's orthonormal
// columns Q0 or P0:
//
//   (a) project       the same as in (a) above, with Q = Q0, or
//   (d) project_onto  the same with Q = M^T P0                                           12 B/element
//       -- P, or Q, is summed over ranks, and orthonormalized into the next step's P0 or Q0 --
//   (c) reconstruct   grad = scale * P Q0^T, or scale * P0 Q^T, with the summed factor;
//                     minus the same with this rank's local factor is pending             4 B/element
//
// Non-finite input: (a) and (d) keep the old residual where the gradient is not finite, and let the factor
// become non-finite, so that every rank detects the input after the sum. orthonormalize() then flags the
// matrix; (b) writes Q = 0, so that nothing is pending; (c) restores the old residual (M - grad where finite)
// and writes NaN over the whole matrix. Residuals never become non-finite.
//
// Sums over rows and columns have a fixed order that does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/op.h"

namespace gradwire {

// Division of matrices into blocks by the CUDA kernels of PowerSGD: all matrices of a table in one grid.
// Block b of the grid belongs to the last matrix whose first block is at most b.

// Up to this rank each thread keeps its part of the sums for all columns of P or Q; above, a warp computes
// tiles of 32 columns of P or Q at a time, with blocks of a fixed size.
inline constexpr int kMaxNarrowRank = 4;

// project(): a block processes whole rows, so that P needs no second pass.
inline constexpr int kRowTileRows = 8, kWideRowTileRows = 64;
// reconstruct(): a block writes a tile of this many rows.
inline constexpr int kTileRows = 64;
inline constexpr int kTileCols = 256;
// back_project(): a block processes a panel of whole columns, one cache line wide. For tall matrices the
// panel is half as wide, so that there are more blocks, which end sooner.
inline constexpr int kMaxPanelColumns = 32, kWidePanelColumns = 64;
GW_HD int panel_columns(int32_t rows) {
  return rows <= 1280 ? kMaxPanelColumns : kMaxPanelColumns / 2;
}

// The first block of a matrix in the grid of each kernel.
struct MatrixBlocks {
  int32_t row_tile = 0;
  int32_t panel = 0;
  int32_t tile = 0;
  int32_t wide_row_tile = 0;
  int32_t wide_panel = 0;
};

inline constexpr int kMaxPowerSgdRank = 512;

struct MatrixDescriptor {
  int64_t offset = 0;    // position of M in the gradient and residual arrays, in elements
  int64_t p_offset = 0;  // position of P in the P array, in elements
  int64_t q_offset = 0;  // position of Q in the Q array, in elements
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t rank = 0;     // 1 .. min(rows, cols, kMaxPowerSgdRank)
  int32_t seed_id = 0;  // identifies the matrix in random draws: the same on every rank
  int64_t scratch = 0;  // position in the scratch memory of orthonormalize(); MatrixTable sets it
};

// The matrices of a bucket, on the host and on the device. Built during set-up only; must outlive the ops
// that use the table.
class MatrixTable {
 public:
  MatrixTable() = default;
  // Copies the descriptors to the stream's device and synchronizes. Throws BadInput if a rank is out of
  // range.
  MatrixTable(const Stream& stream, std::vector<MatrixDescriptor> matrices);

  const std::vector<MatrixDescriptor>& host() const { return host_; }
  const MatrixDescriptor* device() const { return device_.as<const MatrixDescriptor>(); }
  // Returns the first block of each matrix, on the device or on the host; count() + 1 entries.
  const MatrixBlocks* blocks() const { return blocks_.as<const MatrixBlocks>(); }
  const std::vector<MatrixBlocks>& host_blocks() const { return host_blocks_; }
  int count() const { return static_cast<int>(host_.size()); }
  int max_rank() const { return max_rank_; }
  int64_t elements() const { return elements_; }      // sum of rows * cols
  int64_t p_elements() const { return p_elements_; }  // sum of rows * rank
  int64_t q_elements() const { return q_elements_; }  // sum of cols * rank
  // Returns the size of the scratch memory of orthonormalize(): 0 up to rank kMaxSmallRank, then 8 B for
  // each element of a square of the rank.
  int64_t scratch_doubles() const { return scratch_doubles_; }

 private:
  std::vector<MatrixDescriptor> host_;
  Buffer device_, blocks_;
  std::vector<MatrixBlocks> host_blocks_{MatrixBlocks{}};
  int max_rank_ = 0;
  int64_t elements_ = 0, p_elements_ = 0, q_elements_ = 0, scratch_doubles_ = 0;
};

// Returns whether a matrix is flagged; without flags, none is.
GW_HD bool flagged(const int32_t* flags, int matrix) {
  return flags != nullptr && flags[matrix] != 0;
}

// Restores the previous step's residual in an element of a matrix whose M was not finite: M - grad. Where the
// gradient is not finite, the residual is the old one already.
GW_HD void restore(float grad, float& residual) {
  if (!is_finite(grad)) return;
  const float old = residual - grad;
  residual = is_finite(old) ? old : 0.0f;
}

// The pending term of the residual: P Q^T, with P (rows, rank) and Q (cols, rank) at the table's offsets.
// Products of the columns k of P and Q are added in the order of k; non-finite results then become 0.
struct PendingFactors {
  const float* p = nullptr;  // null: nothing is pending
  const float* q = nullptr;
  // (table count) elements, or null: no matrix is flagged. Nonzero: nothing is pending for the matrix.
  const int32_t* flags = nullptr;

  GW_HD bool exist(int matrix) const { return p != nullptr && !flagged(flags, matrix); }
};

struct PowerSgdProject {
  const MatrixTable* table = nullptr;
  const float* grad = nullptr;
  float* residual = nullptr;  // in: E, out: M; null: no error feedback, M is grad
  PendingFactors pending = {};
  const float* q = nullptr;
  float* p = nullptr;  // out; must not be the pending P
};
GW_OP(powersgd_project, PowerSgdProject)

// Arguments of (a) and (d) without their product, which a BLAS library computes (library.h): M = grad + E,
// stored into the residual. Moves 12 B/element.
struct PowerSgdForm {
  const MatrixTable* table = nullptr;
  const float* grad = nullptr;
  float* residual = nullptr;  // in: E, out: M
  PendingFactors pending = {};
  // (table count) elements, set to 1 where M is not finite, which the residual does not show; else unchanged.
  int32_t* marks = nullptr;
};
GW_OP(powersgd_form, PowerSgdForm)

// Overwrites one factor of each marked matrix.
struct PowerSgdOverwrite {
  const MatrixTable* table = nullptr;
  const int32_t* marks = nullptr;  // (table count) elements
  float* p = nullptr;              // the factor to overwrite; null: overwrite q
  float* q = nullptr;              // the factor to overwrite; null: overwrite p
  float value = 0.0f;
};
GW_OP(powersgd_overwrite, PowerSgdOverwrite)

struct PowerSgdBackProject {
  const MatrixTable* table = nullptr;
  const float* m = nullptr;        // the residual; without error feedback the gradient
  const float* p = nullptr;        // orthonormal columns
  float* q = nullptr;              // out: M^T P, local to this rank
  const int32_t* flags = nullptr;  // (table count) elements; nonzero: the matrix was not finite
};
GW_OP(powersgd_back_project, PowerSgdBackProject)

struct PowerSgdProjectOnto {
  const MatrixTable* table = nullptr;
  const float* grad = nullptr;
  float* residual = nullptr;  // in: E, out: M; null: no error feedback, M is grad
  PendingFactors pending = {};
  const float* p = nullptr;  // orthonormal columns
  float* q = nullptr;        // out: M^T P; must not be the pending Q
};
GW_OP(powersgd_project_onto, PowerSgdProjectOnto)

struct PowerSgdReconstruct {
  const MatrixTable* table = nullptr;
  const float* p = nullptr;
  const float* q = nullptr;  // p or q is summed over ranks
  float* grad = nullptr;     // out: scale * P Q^T, or NaN where flagged
  float scale = 1.0f;
  const int32_t* flags = nullptr;
  // Restored for flagged matrices: from M to the last step's E, M - grad. null: no error feedback.
  float* residual = nullptr;
};
GW_OP(powersgd_reconstruct, PowerSgdReconstruct)

// Arguments of settling, residual += P Q^T: the same term, with the same bits, that project() would add.
struct PowerSgdSettle {
  const MatrixTable* table = nullptr;
  float* residual = nullptr;
  PendingFactors pending = {};
  int matrix = -1;  // settles only this matrix of the table; -1: all
};
GW_OP(powersgd_settle, PowerSgdSettle)

// Gathers scattered pieces of one array into another, and scatters them back, so that dense tensors share a
// collective with the PowerSGD factors. One launch handles all pieces. Bytes per element: 8. Limit: memory
// bandwidth.

struct Segment {
  int64_t scattered = 0;  // start of the piece in the scattered array, in elements
  int64_t packed = 0;     // start in the packed array, in elements
  int64_t count = 0;
};

// The pieces, on the host and on the device. Built during set-up only; must outlive the ops that use the
// table.
class SegmentTable {
 public:
  SegmentTable() = default;
  SegmentTable(const Stream& stream, std::vector<Segment> segments);

  const std::vector<Segment>& host() const { return host_; }
  const Segment* device() const { return device_.as<const Segment>(); }
  int count() const { return static_cast<int>(host_.size()); }
  int64_t longest() const { return longest_; }

 private:
  std::vector<Segment> host_;
  Buffer device_;
  int64_t longest_ = 0;
};

// Arguments of packing: packed[segment.packed + i] = scattered[segment.scattered + i] for every segment, or
// the reverse. Unpacking from null writes zeros.
struct Pack {
  const SegmentTable* table = nullptr;
  float* scattered = nullptr;
  float* packed = nullptr;
  bool unpack = false;
};
GW_OP(pack, Pack)

}  // namespace gradwire
