// `powersgd`: rank-r approximation of each gradient matrix M by the factors P Q^T, with the residual kept
// locally: one step of subspace iteration per training step. `alternate` chooses between two algorithms.
//
// alternate=off (Vogels et al., arXiv 1905.13727) sends both factors in each step, in two collectives:
//   project        computes E of the last step, M = G + E (into E's memory) and P = M Q on this rank
//   pack           dense tensors (vectors, small matrices) after P
//   allreduce 1    [P | dense], mean
//   orthonormalize P; flags matrices with non-finite values, identically on every rank
//   unpack         dense tensors, which are now done
//   back_project   Q = M^T P. The next step's project, or an earlier reader, computes E = M - P Q^T
//   allreduce 2    Q, mean. In a large bucket Q is summed in two halves: the exchange of the first half
//                  overlaps with back_project of the second half, and the exchange of the second half
//                  overlaps with reconstruct of the first half
//   reconstruct    G = P Q^T
//   orthonormalize Q, for the next step; a column that vanished is re-seeded
// Conservation: sum over ranks of E_new + world * G_out = sum of (G + E_old), for every matrix, because P is
// the same on all ranks and the applied Q is the mean of the ranks' Qs. With a lossy format each encode of Q
// has an error, which the encoding rank keeps: E = M - P (Q - lost)^T. A lossy format for P loses nothing of
// the gradient, but tilts the subspace, identically on all ranks.
//
// alternate=on (ACP-SGD: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed
// Deep Learning", ICDCS 2023) sends one factor in each step, P and Q alternately. This takes half of the
// bytes and one collective. The list shows a step that sends P; in the next step P and Q, and rows and
// columns, swap their roles:
//   project        E of the last step; M = G + E (into E's memory), P = M Q0    on this rank; Q0's columns
//                  are orthonormal
//   pack           dense tensors after P
//   allreduce      [P | dense], mean
//   unpack         dense tensors, which are now done
//   orthonormalize P into P0, which the next step uses to project; flags and re-seeds as above
//   reconstruct    G = P Q0^T. The next step's project, or an earlier reader, computes E = M - P_own Q0^T
//                  with this rank's P (P_own), as in the paper
// Conservation holds as above, because Q0 is the same on all ranks and P enters linearly. With a lossy format
// E keeps the error of this rank's encodes of P: E = M - (P_own - lost) Q0^T.
//
// `dion` (Ahn et al., arXiv 2504.05295) is an optimizer: P Q^T is a step, not an approximation of the
// gradient. The residual is the momentum, of which only the mean over the ranks matters. In the steps of
// alternate=off:
//   project        M += G / world; P = M Q. So the sum of M over the ranks is the momentum of the mean
//                  gradient, in any world
//   allreduce 2    R = M^T P
//   normalize      Q = the columns of R divided by their norms or, with orth=on, orthonormalized
//   reconstruct    G = sqrt(rows / cols) P Q^T, the direction of the step. The next step's project, or an
//                  earlier reader, computes M - (1 - mu) P R^T, with the R that all ranks received: what a
//                  lossy format has lost stays in the momentum
// Conservation: the sum over ranks and steps of G / world equals the sum of M plus that of (1 - mu) P R^T.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/library.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire {

// The compressed tensors, and their positions in the packed factors.
struct PowerSgdPlan {
  std::vector<MatrixDescriptor> matrices;
  std::vector<int> tensors;    // tensor of each matrix
  std::vector<Segment> dense;  // packed from 0 on
  int64_t p_elements = 0, q_elements = 0, dense_elements = 0;

  explicit PowerSgdPlan(const BucketContext& context);
  // Returns the dense pieces, packed after `elements` elements of a factor.
  std::vector<Segment> dense_after(int64_t elements) const;
};

class LowRankCodec final : public Codec {
 public:
  explicit LowRankCodec(const BucketContext& context);

  size_t workspace_bytes() const override;
  void bind(void* workspace) override;
  void rebind(float* gradients) override;
  void run(const Stream& stream, int64_t step, BucketPhases& phases) override;
  int64_t period() const override { return spec_.alternate ? 2 : 1; }
  Residual* residual() override { return residual_ ? &residual_ : nullptr; }
  std::vector<TensorState> tensor_state() override;
  int64_t state_bytes() const override;
  std::string describe() const override;
  std::vector<PlannedAllreduce> plan() const override;

 private:
  // P or Q.
  struct FactorState {
    Factor which = Factor::p;
    int64_t elements = 0;
    Buffer basis = {};  // orthonormal columns, with which the other factor is projected
    Buffer kept = {};   // lost - own; its product with the other factor's basis is E - M
    // The allreduce of [factor | dense] in sum_; null: the factor is summed in halves.
    std::unique_ptr<Program> allreduce = {};
    SchedulePlanner::Choice choice = {};
    SegmentTable dense = {};
    std::string part = {};  // description of the allreduce
  };
  // Matrices [first, first + matrices.count()) of the bucket, and the allreduce of these matrices' Q.
  struct Half {
    int first = 0;
    int64_t q_begin = 0, q_count = 0;
    MatrixTable matrices;
    SchedulePlanner::Choice choice;
    std::unique_ptr<Program> allreduce;
    Event ready, summed;  // Q is complete on this rank; Q is summed over all ranks
  };
  // alternate=off: this step's Q.
  struct Halves {
    Buffer sum, lost;         // `lost` is used only with error feedback and a lossy format
    std::vector<Half> parts;  // one or two halves; empty without matrices
  };

  // Construction.
  int64_t sum_elements() const;
  FactorState make_factor(const BucketContext& context, Factor which);
  void add_allreduce(const BucketContext& context, FactorState& factor) const;
  void make_halves(const BucketContext& context);
  void add_half(const BucketContext& context, size_t begin, size_t end, const char* name);
  void clear(const Stream& stream);

  // Run the phases of a step.
  void send_both(const Stream& stream, BucketPhases& phases);
  void send_one(const Stream& stream, FactorState& now, FactorState& other, BucketPhases& phases);
  void project(const Stream& stream, const FactorState& now, const FactorState& other);
  void sum_with_dense(const Stream& stream, const FactorState& factor, BucketPhases& phases);
  void sum_half(const Stream& stream, Half& half, BucketPhases& phases);
  void reconstruct(const Stream& stream, const MatrixTable& matrices, int first, const float* p,
                   const float* q);
  void orthonormalize_sum(const Stream& stream, const float* sum, FactorState& factor, bool keep_flags);
  void keep_own(const Stream& stream, FactorState& factor, const float* own, int64_t begin, int64_t count);
  void keep_lost(const Stream& stream, FactorState& factor, const Buffer& lost);
  // Draws random orthonormal columns, the same on every rank.
  void draw_basis(const Stream& stream, FactorState& factor);
  // Dion: divides the matrices' gradients by the number of ranks; and normalizes Q, keeping its part of M.
  void scale_gradients(const Stream& stream) const;
  void normalize_sum(const Stream& stream, const Half& half);
  // Adds the parts that `sent` left pending to the residual of all matrices that overlap elements [begin,
  // end). Afterwards nothing remains pending for these matrices.
  void settle(const Stream& stream, const FactorState& sent, int64_t begin, int64_t end) const;
  void settle_encoded(const Stream& stream, const FactorState& sent);

  bool dion() const { return spec_.method == CompressionSpec::Method::dion; }
  bool has_matrices() const { return matrices_.count() > 0; }
  // Returns whether the next step computes E. False if E is encoded at the end of this step.
  bool lazy() const { return residual_ && !residual_.encoded(); }
  // Returns the part of E that a step which sent this factor last leaves pending.
  PendingFactors pending(const FactorState& sent) const;
  std::vector<const Buffer*> buffers() const;

  const CompressionSpec spec_;
  const PowerSgdPlan plan_;
  const int world_;
  const float r_scale_;  // Dion: from the programs' R to the sum over ranks of M^T P, divided by world_
  float* gradients_;
  const uint64_t* step_;
  MatrixTable matrices_;
  const bool keeps_losses_;  // error feedback with a lossy format
  Residual residual_;  // E, or M with a pending part. Dense tensors have a residual if the format is lossy
  Buffer sum_;         // [P | dense] or [Q | dense]: first the values of this rank, then the mean
  Buffer lost_;        // with keeps_losses_: the residual of the allreduce of sum_
  Buffer flags_;
  Buffer marks_;    // scratch of the library's passes
  Buffer scratch_;  // of orthonormalize()
  // The library for the products with P and Q, and for those of back_project; null: the fused kernels.
  ThinProducts* projections_ = nullptr;
  ThinProducts* back_projections_ = nullptr;
  std::array<FactorState, 2> factors_;  // P, Q
  Halves halves_;
  Stream transfers_;
};

}  // namespace gradwire
