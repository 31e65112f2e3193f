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
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/library.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"
#include "kernels/wire/floats.h"

namespace gradwire {
namespace {

// With alternate=off, larger buckets sum Q in two halves, because back_project over half of the matrices
// takes longer than an additional exchange. Measured over TCP on four hosts with one core each: a bucket of
// 6.5 million elements takes 37 to 38 ms in one part and 40 to 41 ms in two parts.
constexpr int64_t kElementsToHalve = 32 << 20;

// From this rank on, cuBLAS computes the products of the passes on a GPU. On an H200, back_project of 151
// matrices of 1 GiB in total takes 1.9 and 2.1 ms with cuBLAS at rank 32 and 64
// (docs/results/2026-11-26-gpu); FMAs limit Gradwire's kernels to 0.3 ms for each 32 columns. Awaits
// measurement (gradwire-bench kernels).
constexpr int kLibraryRank = 128;
// Above these ranks, passes on a GPU form M first, with 4 more bytes per element: project, because pending
// factors do not fit in shared memory, and project_onto, because it reads them again for every row. (At rank
// 4, project_onto takes 1.23 ms for the same matrices, which is as long as both steps take.)
constexpr int kMaxFusedRank = 32, kMaxFusedOntoRank = 4;

// The compressed tensors, and their positions in the packed factors. Factors and dense pieces begin at
// multiples of 4 elements for vectorized kernels, or at blocks of the wire format. The gaps are zero.
struct PowerSgdPlan {
  std::vector<MatrixDescriptor> matrices;
  std::vector<int> tensors;    // tensor of each matrix
  std::vector<Segment> dense;  // packed from 0 on
  int64_t p_elements = 0, q_elements = 0, dense_elements = 0;

  explicit PowerSgdPlan(const BucketContext& c) {
    const int64_t unit = packing_unit(c.spec.wire, 4);
    const auto up = [unit](int64_t x) { return (x + unit - 1) / unit * unit; };
    std::vector<BucketTensor> others;
    for (const BucketTensor& t : c.tensors) {
      if (int rank = powersgd_rank(c.spec, t.rows, t.cols)) {
        matrices.push_back({t.offset, p_elements, q_elements, static_cast<int32_t>(t.rows),
                            static_cast<int32_t>(t.cols), rank, t.index});
        tensors.push_back(t.index);
        p_elements += up(t.rows * rank);
        q_elements += up(t.cols * rank);
      } else {
        others.push_back(t);
      }
    }
    dense = pack_tensors(others, unit);
    dense_elements = packed_elements(dense, unit);
  }
};

class LowRankCodec final : public Codec {
 public:
  explicit LowRankCodec(const BucketContext& c)
      : spec_(c.spec),
        plan_(c),
        world_(c.transport->world()),
        r_scale_(1.0f / (c.scale * static_cast<float>(world_))),
        gradients_(c.gradients),
        step_(c.step),
        matrices_(c.stream, plan_.matrices),
        keeps_losses_(c.spec.policy.keeps_errors() && !c.spec.wire->exact),
        residual_(c, spec_.policy.keeps_errors() && (keeps_losses_ || has_matrices())),
        sum_(make_buffer<float>(c.transport->device(), sum_elements())),
        lost_(make_buffer<float>(c.transport->device(), keeps_losses_ ? sum_elements() : 0)),
        flags_(make_buffer<int32_t>(c.transport->device(), matrices_.count())),
        marks_(make_buffer<int32_t>(c.transport->device(), matrices_.count())),
        scratch_(make_buffer<double>(c.transport->device(), matrices_.scratch_doubles())),
        factors_{make_factor(c, Factor::p), make_factor(c, Factor::q)},
        transfers_(c.transfers) {
    if (!spec_.alternate) make_halves(c);
    // A rank that cannot load cuBLAS has other last bits in its products. The ranks' results are the same
    // anyway, because every product is summed over the ranks.
    const Device device = c.transport->device();
    const int rank = matrices_.max_rank();
    // On the host only tests have a library, and use it at every rank.
    if (device.is_host() || rank >= kLibraryRank) products_ = thin_products(device);
    forms_first_ = products_ != nullptr || (!device.is_host() && rank > kMaxFusedRank);
    forms_first_onto_ = forms_first_ || (!device.is_host() && rank > kMaxFusedOntoRank);
    for (const Buffer* b : buffers()) fill_zero(c.stream, b->data(), b->bytes());
    for (FactorState& factor : factors_) {
      if (has_matrices() && (spec_.alternate || factor.which == Factor::q)) draw_basis(c.stream, factor);
    }
    if (lazy()) {
      residual_.settle_with([this](const Stream& stream, int64_t begin, int64_t end) {
        for (const FactorState& factor : factors_) {  // with alternate=on only one factor has a pending part
          if (!spec_.alternate && factor.which == Factor::p) continue;
          settle(stream, factor, begin, end);
        }
      });
    }
    c.stream.synchronize();
  }

  // All allreduces share one workspace, because they do not run concurrently.
  size_t workspace_bytes() const override {
    size_t bytes = 0;
    for (const Program* program : programs()) bytes = std::max(bytes, program->workspace_bytes());
    return residual_.workspace_bytes() + (bytes + 255) / 256 * 256;
  }

  void bind(void* workspace) override {
    workspace = residual_.bind(workspace);
    for (Program* program : programs()) program->bind(workspace);
  }

  void rebind(float* gradients) override { gradients_ = gradients; }

  // The comment at the top of the file lists the phases.
  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    phases.enter(stream, Phase::compress);
    residual_.load(stream, phases, true);
    if (spec_.alternate) {
      const auto turn = static_cast<size_t>((step - spec_.policy.start) % 2);
      send_one(stream, factors_[turn], factors_[1 - turn], phases);
    } else {
      send_both(stream, phases);
    }
    residual_.store(stream, phases);
  }

  int64_t period() const override { return spec_.alternate ? 2 : 1; }
  Residual* residual() override { return residual_ ? &residual_ : nullptr; }
  // With alternate=on the state has both bases, although the next step uses one basis, because a flagged
  // matrix keeps the older basis.
  std::vector<TensorState> tensor_state() override {
    std::vector<TensorState> all;
    for (size_t i = 0; i < plan_.matrices.size(); ++i) {
      const MatrixDescriptor& d = plan_.matrices[i];
      all.push_back({.tensor = plan_.tensors[i],
                     .kind = "factor",
                     .data = factors_[1].basis.as<float>() + d.q_offset,
                     .shape = {d.cols, d.rank},
                     .same_on_all_ranks = true});
      if (!spec_.alternate) continue;
      all.push_back({.tensor = plan_.tensors[i],
                     .kind = "factor_p",
                     .data = factors_[0].basis.as<float>() + d.p_offset,
                     .shape = {d.rows, d.rank},
                     .same_on_all_ranks = true});
    }
    return all;
  }

  int64_t state_bytes() const override {
    int64_t bytes = residual_.bytes();
    for (const Buffer* b : buffers()) bytes += static_cast<int64_t>(b->bytes());
    return bytes;
  }

  std::string describe() const override {
    const int64_t p = matrices_.p_elements(), q = matrices_.q_elements();
    return fmt::format("{} rank {}{}: {} matrices of {} elements as {}, {} dense tensors of {}; wire {}{}{}",
                       dion() ? "dion" : "powersgd", spec_.rank, spec_.alternate ? ", P and Q in turns" : "",
                       matrices_.count(), matrices_.elements(),
                       spec_.alternate ? fmt::format("{} or {}", p, q) : fmt::to_string(p + q),
                       plan_.dense.size(), plan_.dense_elements, spec_.wire->name, residual_.describe(),
                       products_ == nullptr ? "" : "; products by " + products_->name());
  }

  PlannedAllreduces plan() const override {
    PlannedAllreduces all;
    for (const FactorState& factor : factors_) {
      if (factor.allreduce.program && factor.elements + plan_.dense_elements > 0) {
        all.emplace_back(factor.part, &factor.allreduce.choice);
      }
      if (!has_matrices()) break;  // without matrices the other factor sums the same dense tensors
    }
    if (!halves_.empty()) all.emplace_back("Q", &halves_[0].allreduce.choice);
    return all;
  }

 private:
  // P or Q.
  struct FactorState {
    Factor which = Factor::p;
    int64_t elements = 0;
    Buffer basis = {};  // orthonormal columns, with which the other factor is projected
    Buffer kept = {};   // lost - own; its product with the other factor's basis is E - M
    // The allreduce of [factor | dense] in sum_; no program: the factor is summed in halves.
    BucketAllreduce allreduce = {};
    SegmentTable dense = {};
    std::string part = {};  // description of the allreduce
  };
  // Matrices [first, first + matrices.count()) of the bucket, and the allreduce of these matrices' Q.
  struct Half {
    int first = 0;
    int64_t q_begin = 0, q_count = 0;
    MatrixTable matrices;
    BucketAllreduce allreduce;
    Event ready, summed;  // Q is complete on this rank; Q is summed over all ranks
  };

  FactorState make_factor(const BucketContext& c, Factor which) const {
    const bool p = which == Factor::p;
    FactorState factor{.which = which, .elements = p ? plan_.p_elements : plan_.q_elements};
    const bool keeps = residual_ && (spec_.alternate || !p);
    factor.basis = make_buffer<float>(c.transport->device(), factor.elements);
    factor.kept = make_buffer<float>(c.transport->device(), keeps ? factor.elements : 0);
    if (!spec_.alternate && !p) return factor;
    const char* const part = p ? "P and dense tensors" : "Q and dense tensors";
    if (has_matrices()) factor.part = part;
    std::vector<Segment> dense = plan_.dense;
    for (Segment& segment : dense) segment.packed += factor.elements;
    factor.dense = SegmentTable(c.stream, std::move(dense));
    factor.allreduce = c.allreduce(
        part, spec_.wire,
        {sum_.data(), sum_.as<float>(), lost_.as<float>(), factor.elements + plan_.dense_elements});
    return factor;
  }

  void make_halves(const BucketContext& c) {
    q_sum_ = make_buffer<float>(c.transport->device(), plan_.q_elements);
    q_lost_ = make_buffer<float>(c.transport->device(), keeps_losses_ && !dion() ? plan_.q_elements : 0);
    const auto& all = plan_.matrices;
    if (all.empty()) return;
    const auto add = [&](size_t begin, size_t end, const char* name) {
      Half& half = halves_.emplace_back();
      half.first = static_cast<int>(begin);
      half.q_begin = all[begin].q_offset;
      half.q_count = (end < all.size() ? all[end].q_offset : plan_.q_elements) - half.q_begin;
      half.matrices = MatrixTable(c.stream, {all.begin() + static_cast<std::ptrdiff_t>(begin),
                                             all.begin() + static_cast<std::ptrdiff_t>(end)});
      float* const sum = q_sum_.as<float>() + half.q_begin;
      float* const lost = q_lost_ ? q_lost_.as<float>() + half.q_begin : nullptr;
      // The random bits differ from the bits for P. One slice, because the allreduce is small and already
      // overlaps with kernels.
      half.allreduce = c.allreduce(name, spec_.wire, {sum, sum, lost, half.q_count},
                                   (int64_t{1} << 62) + half.q_begin, false);
      half.ready = Event::create(c.transport->device());
      half.summed = Event::create(c.transport->device());
    };
    size_t middle = 0;
    for (int64_t before = 0; middle < all.size() && 2 * before < matrices_.elements(); ++middle) {
      before += int64_t{all[middle].rows} * all[middle].cols;
    }
    const int64_t enough = c.slice_bytes == kAutomaticSlices ? kElementsToHalve : 16 * c.slice_bytes;
    if (!transfers_ || enough == 0 || matrices_.elements() < enough || middle == all.size()) {
      return add(0, all.size(), "Q");
    }
    add(0, middle, "Q, first half");
    add(middle, all.size(), "Q, second half");
  }

  int64_t sum_elements() const {
    return std::max(plan_.p_elements, spec_.alternate ? plan_.q_elements : 0) + plan_.dense_elements;
  }
  std::vector<Program*> programs() const {
    std::vector<Program*> all;
    for (const FactorState& factor : factors_) {
      if (factor.allreduce.program) all.push_back(factor.allreduce.program.get());
    }
    for (const Half& half : halves_) all.push_back(half.allreduce.program.get());
    return all;
  }

  void send_both(const Stream& stream, BucketPhases& phases) {
    FactorState &p = factors_[0], &q = factors_[1];
    if (!spec_.wire->keeps_zero()) {  // reset the sums, including the gaps, to zero
      for (Buffer* b : {&sum_, &q_sum_}) fill_zero(stream, b->data(), b->bytes());
    }
    if (has_matrices()) {
      if (!spec_.warm) draw_basis(stream, q);
      // Dion's momentum adds up gradients divided by the number of ranks.
      for (size_t i = 0; dion() && world_ > 1 && i < plan_.matrices.size(); ++i) {
        const MatrixDescriptor& d = plan_.matrices[i];
        float* const gradient = gradients_ + d.offset;
        const float scale = 1.0f / static_cast<float>(world_);
        const int64_t count = int64_t{d.rows} * d.cols;
        fp32_reduce(stream, {.own = gradient, .out = gradient, .scale = scale, .count = count});
      }
      project(stream, p, q);
    }
    sum_with_dense(stream, p, phases);
    if (!has_matrices()) return;
    phases.enter(stream, Phase::compress);
    orthonormalize_sum(stream, sum_.as<const float>(), p, false);
    fill_zero(stream, q_lost_.data(), q_lost_.bytes());
    for (Half& half : halves_) sum_half(stream, half, phases);
    for (const Half& half : halves_) {
      if (halves_.size() > 1) {
        phases.enter(stream, Phase::communicate, &half.allreduce.program->info());
        stream.wait(half.summed);
      }
      phases.enter(stream, Phase::decompress);
      if (dion()) normalize_sum(stream, half);
      reconstruct(stream, half.matrices, half.first, p.basis.as<const float>(), q_sum_.as<const float>());
    }
    if (!dion()) keep_lost(stream, q, q_lost_);
    settle_encoded(stream, q);
    if (!dion()) orthonormalize_sum(stream, q_sum_.as<const float>(), q, true);
  }

  void send_one(const Stream& stream, FactorState& now, FactorState& other, BucketPhases& phases) {
    // The gaps of the other factor are at other places.
    if (!spec_.wire->exact) fill_zero(stream, sum_.data(), sum_.bytes());
    const float* const sum = sum_.as<const float>();
    if (has_matrices()) {
      project(stream, now, other);
      if (residual_) {
        fill_zero(stream, other.kept.data(), other.kept.bytes());
        keep_own(stream, now, sum, 0, now.elements);
      }
    }
    sum_with_dense(stream, now, phases);
    if (!has_matrices()) return;
    orthonormalize_sum(stream, sum, now, false);
    keep_lost(stream, now, lost_);
    const bool p = now.which == Factor::p;
    const float* const basis = other.basis.as<const float>();
    reconstruct(stream, matrices_, 0, p ? sum : basis, p ? basis : sum);
    settle_encoded(stream, now);
  }

  // Computes this rank's factor into sum_, and M into the residual.
  void project(const Stream& stream, const FactorState& now, const FactorState& other) {
    const PendingFactors pending = lazy() ? this->pending(other) : PendingFactors{};
    auto* const marks = marks_.as<int32_t>();
    if (now.which == Factor::p) {
      const PowerSgdProject args{.table = &matrices_,
                                 .grad = gradients_,
                                 .residual = residual_.values(),
                                 .pending = pending,
                                 .q = other.basis.as<const float>(),
                                 .p = sum_.as<float>()};
      forms_first_ ? by_library::powersgd_project(stream, args, products_, marks)
                   : powersgd_project(stream, args);
    } else {
      const PowerSgdProjectOnto args{.table = &matrices_,
                                     .grad = gradients_,
                                     .residual = residual_.values(),
                                     .pending = pending,
                                     .p = other.basis.as<const float>(),
                                     .q = sum_.as<float>()};
      forms_first_onto_ ? by_library::powersgd_project_onto(stream, args, products_, marks)
                        : powersgd_project_onto(stream, args);
    }
  }

  // Sums [factor | dense] over the ranks. Afterwards the dense tensors are done.
  void sum_with_dense(const Stream& stream, const FactorState& factor, BucketPhases& phases) {
    pack(stream, {&factor.dense, gradients_, sum_.as<float>(), false});
    if (keeps_losses_) {
      // Only the dense tensors have a residual in lost_: the error of a factor's encode belongs to this
      // step's basis.
      fill_zero(stream, lost_.data(), lost_.bytes());
      pack(stream, {&factor.dense, residual_.values(), lost_.as<float>(), false});
    }
    factor.allreduce.program->run(stream, &phases);
    phases.enter(stream, Phase::decompress);
    pack(stream, {&factor.dense, gradients_, sum_.as<float>(), true});
    if (keeps_losses_) pack(stream, {&factor.dense, residual_.values(), lost_.as<float>(), true});
  }

  // Computes this rank's Q of the half and sums Q over the ranks. With two halves the allreduce runs on the
  // stream for transfers, otherwise on `stream`.
  void sum_half(const Stream& stream, Half& half, BucketPhases& phases) {
    float* const sum = q_sum_.as<float>();
    const PowerSgdBackProject back{.table = &half.matrices,
                                   .m = residual_ ? residual_.values() : gradients_,
                                   .p = factors_[0].basis.as<const float>(),
                                   .q = sum,
                                   .flags = flags_.as<const int32_t>() + half.first};
    by_library::powersgd_back_project(stream, back, products_);
    if (residual_ && !dion()) keep_own(stream, factors_[1], sum + half.q_begin, half.q_begin, half.q_count);
    if (halves_.size() == 1) return half.allreduce.program->run(stream, &phases);
    half.ready.record(stream);
    transfers_.wait(half.ready);
    half.allreduce.program->run(transfers_, &phases);
    half.summed.record(transfers_);
  }

  void reconstruct(const Stream& stream, const MatrixTable& matrices, int first, const float* p,
                   const float* q) {
    powersgd_reconstruct(stream, {.table = &matrices,
                                  .p = p,
                                  .q = q,
                                  .grad = gradients_,
                                  .flags = flags_.as<const int32_t>() + first,
                                  .residual = residual_.values()});
  }

  void orthonormalize_sum(const Stream& stream, const float* sum, FactorState& factor, bool keep_flags) {
    orthonormalize(stream, {.table = &matrices_,
                            .which = factor.which,
                            .in = sum,
                            .out = factor.basis.as<float>(),
                            .flags = flags_.as<int32_t>(),
                            .keep_flags = keep_flags,
                            .seed = spec_.seed,
                            .step = step_,
                            .scratch = scratch_.as<double>()});
  }

  // Sets `count` elements of factor.kept from `begin` on to -own.
  void keep_own(const Stream& stream, FactorState& factor, const float* own, int64_t begin, int64_t count) {
    fp32_reduce(stream, {.own = own, .out = factor.kept.as<float>() + begin, .scale = -1.0f, .count = count});
  }

  // Adds the errors of this rank's encodes to factor.kept.
  void keep_lost(const Stream& stream, FactorState& factor, const Buffer& lost) {
    if (!keeps_losses_) return;
    fp32_reduce(stream, {.inputs = {lost.as<const float>()},
                         .num_inputs = 1,
                         .own = factor.kept.as<const float>(),
                         .out = factor.kept.as<float>(),
                         .count = factor.elements});
  }

  // Draws random orthonormal columns, the same on every rank, by orthonormalizing zeros, which re-seeds every
  // column.
  void draw_basis(const Stream& stream, FactorState& factor) {
    fill_zero(stream, factor.basis.data(), factor.basis.bytes());
    orthonormalize_sum(stream, factor.basis.as<const float>(), factor, false);
  }

  // Dion: normalizes Q, and keeps its part of M.
  void normalize_sum(const Stream& stream, const Half& half) {
    float* const sum = q_sum_.as<float>();
    fp32_reduce(stream, {.own = sum + half.q_begin,
                         .out = factors_[1].kept.as<float>() + half.q_begin,
                         .scale = -r_scale_ * static_cast<float>(1 - spec_.mu),
                         .count = half.q_count});
    if (spec_.orth) {
      orthonormalize(stream, {.table = &half.matrices,
                              .which = Factor::q,
                              .in = sum,
                              .out = factors_[1].basis.as<float>(),
                              .flags = flags_.as<int32_t>() + half.first,
                              .keep_flags = true,
                              .seed = spec_.seed,
                              .step = step_,
                              .scratch = scratch_.as<double>()});
    }
    normalize_columns(stream, {.table = &half.matrices,
                               .q = sum,
                               .basis = factors_[1].basis.as<float>(),
                               .flags = flags_.as<const int32_t>() + half.first,
                               .orthonormal = spec_.orth});
  }

  // Adds the parts that `sent` left pending to the residual of all matrices that overlap elements [begin,
  // end). Afterwards nothing remains pending for these matrices.
  void settle(const Stream& stream, const FactorState& sent, int64_t begin, int64_t end) const {
    for (int matrix = 0; matrix < matrices_.count(); ++matrix) {
      const MatrixDescriptor& d = matrices_.host()[matrix];
      if (d.offset >= end || d.offset + int64_t{d.rows} * d.cols <= begin) continue;
      powersgd_settle(
          stream,
          {.table = &matrices_, .residual = residual_.values(), .pending = pending(sent), .matrix = matrix});
      const bool p = sent.which == Factor::p;
      float* const kept = sent.kept.as<float>() + (p ? d.p_offset : d.q_offset);
      fill_zero(stream, kept, sizeof(float) * (p ? d.rows : d.cols) * d.rank);
    }
  }

  // Computes E now if the residual is encoded at the end of this step.
  void settle_encoded(const Stream& stream, const FactorState& sent) {
    if (!residual_ || lazy()) return;
    powersgd_settle(stream, {.table = &matrices_, .residual = residual_.values(), .pending = pending(sent)});
  }

  // Returns the part of E that a step which sent this factor last leaves pending.
  PendingFactors pending(const FactorState& sent) const {
    const bool p = sent.which == Factor::p;
    return {.p = (p ? sent.kept : factors_[0].basis).as<const float>(),
            .q = (p ? factors_[1].basis : sent.kept).as<const float>(),
            .flags = spec_.alternate || dion() ? flags_.as<const int32_t>() : nullptr};
  }

  std::vector<const Buffer*> buffers() const {
    std::vector<const Buffer*> all{&sum_, &lost_, &flags_, &marks_, &scratch_, &q_sum_, &q_lost_};
    for (const FactorState& factor : factors_) all.insert(all.end(), {&factor.basis, &factor.kept});
    return all;
  }

  bool dion() const { return spec_.method == CompressionSpec::Method::dion; }
  bool has_matrices() const { return matrices_.count() > 0; }
  // Returns whether the next step computes E. False if E is encoded at the end of this step.
  bool lazy() const { return residual_ && !residual_.encoded(); }

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
  Buffer marks_;                                         // scratch of the library's passes
  Buffer scratch_;                                       // of orthonormalize()
  ThinProducts* products_ = nullptr;                     // the library for products; null: Gradwire's kernels
  bool forms_first_ = false, forms_first_onto_ = false;  // project and project_onto by two steps
  std::array<FactorState, 2> factors_;                   // P, Q
  // alternate=off: this step's Q, and one or two halves of it; no halves without matrices. q_lost_: only with
  // error feedback and a lossy format.
  Buffer q_sum_, q_lost_;
  std::vector<Half> halves_;
  Stream transfers_;
};

}  // namespace

int powersgd_rank(const CompressionSpec& spec, int64_t rows, int64_t cols) {
  if (rows <= 1 || cols <= 1) return 0;
  const int64_t rank = std::min({rows, cols, int64_t{spec.rank}});
  const bool worth_it = spec.method == CompressionSpec::Method::dion ||
                        static_cast<double>((rows + cols) * rank) * spec.min_ratio <
                            static_cast<double>(rows) * static_cast<double>(cols);
  const bool addressable = rows < (1 << 30) && cols < (1 << 30) && rows * cols < (int64_t{1} << 40);
  return worth_it && addressable ? static_cast<int>(rank) : 0;
}

std::unique_ptr<Codec> make_powersgd_codec(const BucketContext& context) {
  return std::make_unique<LowRankCodec>(context);
}

}  // namespace gradwire
