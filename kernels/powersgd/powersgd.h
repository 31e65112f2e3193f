// PowerSGD's three passes over the gradient matrices of a bucket (Vogels et al., arXiv 1905.13727), fused
// with error feedback. One call handles all matrices of the bucket through a table of descriptors.
//
// Matrices are row-major M (rows, cols); the factors are row-major P (rows, rank) and Q (cols, rank).
//
//   (a) project       M = grad + residual, stored into residual;  P = M Q                12 B/element
//       -- P is summed over ranks and orthonormalized --
//   (b) back_project  Q = M^T P;  residual = M - P Q^T  with this rank's own Q            8 B/element
//       -- Q is summed over ranks, while (b) of other matrices still runs --
//   (c) reconstruct   grad = scale * P Q^T  with the summed Q                             4 B/element
//
// Where P and Q alternate (ACP-SGD), a step sums one of them, with the other's orthonormal columns Q0 or P0:
//
//   (a) project       as above with Q = Q0, or
//   (d) project_onto  M = grad + residual, stored into residual;  Q = M^T P0             12 B/element
//       -- P, or Q, is summed over ranks, and orthonormalized into the next step's P0 or Q0 --
//   (c) reconstruct   grad = scale * P Q0^T, or scale * P0 Q^T, with the summed factor;
//                     residual = M minus the same with this rank's own                   12 B/element
//
// The residual is *local*: what this rank's own projection lost. Summed over ranks, the residuals
// and the applied gradient equal the gradients that went in, because P is the same on all ranks
// and Q enters linearly.
//
// Non-finite input: (a) keeps the old residual where the gradient is not finite, and lets P become
// non-finite, so that after the sum every rank sees it. orthonormalize() then flags the matrix; (b) restores
// the old residual (M - grad where finite), writes Q = 0; (c) writes NaN over the whole matrix. (d) does as
// (a), and (c) with `restore` as (b). Factors and residuals never become non-finite.
//
// Sums over rows and columns are taken in a fixed order that does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/op.h"
#include "kernels/powersgd/blocks.h"

namespace gradwire {

inline constexpr int kMaxPowerSgdRank = 64;

struct MatrixDescriptor {
  int64_t offset = 0;    // of M in the gradient and residual arrays, in elements
  int64_t p_offset = 0;  // of P in the P array, in elements
  int64_t q_offset = 0;  // of Q in the Q array, in elements
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t rank = 0;     // 1 .. min(rows, cols, kMaxPowerSgdRank)
  int32_t seed_id = 0;  // names the matrix in random draws: the same on every rank
};

// The matrices of a bucket, on the host and on the device. Set-up only; outlives the ops that use it.
class MatrixTable {
 public:
  MatrixTable() = default;
  // Copies the descriptors to the stream's device and synchronizes. Throws BadInput on a rank out of range.
  MatrixTable(const Stream& stream, std::vector<MatrixDescriptor> matrices);

  const std::vector<MatrixDescriptor>& host() const { return host_; }
  const MatrixDescriptor* device() const { return device_.as<const MatrixDescriptor>(); }
  // Where each matrix's blocks begin, on the device; count() + 1 entries, the last of which is also here.
  const MatrixBlocks* blocks() const { return blocks_.as<const MatrixBlocks>(); }
  const MatrixBlocks& total_blocks() const { return total_blocks_; }
  int count() const { return static_cast<int>(host_.size()); }
  int max_rank() const { return max_rank_; }
  int64_t elements() const { return elements_; }      // sum of rows * cols
  int64_t p_elements() const { return p_elements_; }  // sum of rows * rank
  int64_t q_elements() const { return q_elements_; }  // sum of cols * rank

 private:
  std::vector<MatrixDescriptor> host_;
  Buffer device_, blocks_;
  MatrixBlocks total_blocks_;
  int max_rank_ = 0;
  int64_t elements_ = 0, p_elements_ = 0, q_elements_ = 0;
};

struct PowerSgdProject {
  const MatrixTable* table = nullptr;
  const float* grad = nullptr;
  float* residual = nullptr;  // in: E, out: M; null: no error feedback, M is grad
  const float* q = nullptr;
  float* p = nullptr;  // out
};
GW_SIDES(powersgd_project, PowerSgdProject)
inline void powersgd_project(const Stream& stream, const PowerSgdProject& args) {
  detail::dispatch(stream, args, host::powersgd_project, GW_CUDA_SIDE(powersgd_project), "powersgd_project");
}

struct PowerSgdBackProject {
  const MatrixTable* table = nullptr;
  const float* grad = nullptr;     // M itself when residual is null; otherwise read for flagged matrices only
  float* residual = nullptr;       // in: M, out: M - P Q^T; null: no error feedback
  const float* p = nullptr;        // orthonormal columns
  float* q = nullptr;              // out: M^T P, this rank's own
  const int32_t* flags = nullptr;  // (table count) nonzero: the matrix was not finite
};
GW_SIDES(powersgd_back_project, PowerSgdBackProject)
inline void powersgd_back_project(const Stream& stream, const PowerSgdBackProject& args) {
  detail::dispatch(stream, args, host::powersgd_back_project, GW_CUDA_SIDE(powersgd_back_project),
                   "powersgd_back_project");
}

struct PowerSgdProjectOnto {
  const MatrixTable* table = nullptr;
  const float* grad = nullptr;
  float* residual = nullptr;  // in: E, out: M; null: no error feedback, M is grad
  const float* p = nullptr;   // orthonormal columns
  float* q = nullptr;         // out: M^T P
};
GW_SIDES(powersgd_project_onto, PowerSgdProjectOnto)
inline void powersgd_project_onto(const Stream& stream, const PowerSgdProjectOnto& args) {
  detail::dispatch(stream, args, host::powersgd_project_onto, GW_CUDA_SIDE(powersgd_project_onto),
                   "powersgd_project_onto");
}

struct PowerSgdReconstruct {
  const MatrixTable* table = nullptr;
  const float* p = nullptr;
  const float* q = nullptr;  // p or q is summed over ranks
  float* grad = nullptr;     // out: scale * P Q^T, or NaN where flagged
  float scale = 1.0f;
  const int32_t* flags = nullptr;
  // What this rank's part of the summed factor lost, added back to the residual: residual += p_lost Q^T, or
  // residual += P q_lost^T (12 B/element instead of 4). At most one of them, and then `residual`.
  const float* p_lost = nullptr;
  const float* q_lost = nullptr;
  float* residual = nullptr;
  // The residual holds M: where flagged, it becomes the previous step's, M - grad. Otherwise a flagged matrix's
  // residual stays.
  bool restore = false;
};
GW_SIDES(powersgd_reconstruct, PowerSgdReconstruct)
inline void powersgd_reconstruct(const Stream& stream, const PowerSgdReconstruct& args) {
  detail::dispatch(stream, args, host::powersgd_reconstruct, GW_CUDA_SIDE(powersgd_reconstruct),
                   "powersgd_reconstruct");
}

}  // namespace gradwire
