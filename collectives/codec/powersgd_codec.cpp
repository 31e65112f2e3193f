// `powersgd`: rank-r approximation of each gradient matrix (Vogels et al., arXiv 1905.13727), one step of
// subspace iteration per training step, with the residual kept locally.
//
// One step of a bucket: two collectives; in a large bucket the second is split in two halves:
//   project        E of the last step; M = G + E (into E's memory), P = M Q   on this rank
//   pack           dense tensors (vectors, small matrices) after P
//   allreduce 1    [P | dense], mean
//   orthonormalize P; matrices with non-finite values are flagged here, identically on every rank
//   unpack         dense tensors, which are now done
//   back_project   Q = M^T P. E = M - P Q^T is computed by the next step's project, or by an earlier reader
//   allreduce 2    Q, mean. In two halves the exchange of the first overlaps with back_project of the second,
//                  and that of the second with reconstruct of the first
//   reconstruct    G = P Q^T
//   orthonormalize Q, for the next step; a column that vanished is re-seeded
//
// Conservation: sum over ranks of E_new + world * G_out = sum of (G + E_old), for every matrix, because P is
// the same on all ranks and the applied Q is the mean of theirs. With a lossy wire each encode of Q has an
// error; the encoding rank keeps it: E = M - P (Q - lost)^T. A lossy wire for P loses nothing of the
// gradient: it only tilts the subspace, identically on all ranks.
#include <fmt/format.h>

#include <algorithm>

#include "collectives/codec/powersgd_choice.h"
#include "collectives/codec/powersgd_parts.h"
#include "kernels/wire/fp32.h"

namespace gradwire {
namespace {

class PowerSgdCodec final : public Codec {
 public:
  explicit PowerSgdCodec(const BucketContext& c)
      : spec_(c.spec),
        plan_(c),
        device_(c.transport->device()),
        gradients_(c.gradients),
        step_(c.step),
        matrices_(c.stream, plan_.matrices),
        dense_(c.stream, plan_.dense_after(plan_.p_elements)),
        lossy_(!c.spec.wire->exact),
        residual_(c, spec_.error_feedback && (lossy_ || !plan_.matrices.empty())),
        p_(c.exchanged(plan_.p_elements + plan_.dense_elements)),
        basis_(make_buffer<float>(device_, plan_.p_elements)),
        p_residual_(
            make_buffer<float>(device_, with_wire_residual() ? plan_.p_elements + plan_.dense_elements : 0)),
        q_(make_buffer<float>(device_, plan_.q_elements)),
        q_sum_(c.exchanged(plan_.q_elements)),
        q_lost_(make_buffer<float>(device_, with_wire_residual() ? plan_.q_elements : 0)),
        q_kept_(make_buffer<float>(device_, residual_ ? plan_.q_elements : 0)),
        flags_(make_buffer<int32_t>(device_, matrices_.count())),
        marks_(make_buffer<int32_t>(device_, matrices_.count())),
        p_choice_(c.choose(plan_.p_elements + plan_.dense_elements, c.spec.wire)),
        p_allreduce_(
            *c.transport, p_choice_.schedule,
            {p_.data(), p_.as<float>(), p_residual_.as<float>(), plan_.p_elements + plan_.dense_elements},
            powersgd_options(c, "P and dense tensors", 0, p_choice_.slice_bytes)),
        before_start_(make_plain_start(c)),
        transfers_(c.transfers) {
    make_halves(c);
    choose(c);
    for (Buffer* b : {&p_, &basis_, &p_residual_, &q_, &q_sum_, &q_lost_, &q_kept_, &flags_}) {
      fill_zero(c.stream, b->data(), b->bytes());
    }
    draw_q(c.stream);
    if (lazy()) {
      residual_.settle_with([this](const Stream& stream, int64_t begin, int64_t end) {
        settle(stream, matrices_, residual_.values(), pending(), Factor::q, begin, end);
      });
    }
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    size_t bytes = p_allreduce_.workspace_bytes();
    if (before_start_) bytes = std::max(bytes, before_start_->workspace_bytes());
    for (const Half& half : halves_) bytes = std::max(bytes, half.allreduce->workspace_bytes());
    return residual_.workspace_bytes() + (bytes + 255) / 256 * 256;
  }

  void bind(void* workspace) override {
    workspace = residual_.bind(workspace);
    // One workspace for all: allreduces do not run concurrently.
    p_allreduce_.bind(workspace);
    for (Half& half : halves_) half.allreduce->bind(workspace);
    if (before_start_) before_start_->bind(workspace);
  }

  void rebind(float* gradients) override {
    gradients_ = gradients;
    if (before_start_) before_start_->rebind(gradients, gradients);
  }

  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    if (step < spec_.start) {
      before_start_->run(stream, &phases);
      return;
    }
    phases.enter(stream, Phase::compress);
    residual_.load(stream, phases);
    float* p = p_.as<float>();
    float* q_sum = q_sum_.as<float>();
    const bool any_matrix = matrices_.count() > 0;
    if (!spec_.wire->keeps_zero()) {  // including the gaps
      for (Buffer* b : {&p_, &q_sum_}) fill_zero(stream, b->data(), b->bytes());
    }
    if (any_matrix) {
      if (!spec_.warm) draw_q(stream);
      const PowerSgdProject project{.table = &matrices_,
                                    .grad = gradients_,
                                    .residual = residual_.values(),
                                    .pending = lazy() ? pending() : PendingFactors{},
                                    .q = q_.as<float>(),
                                    .p = p};
      project_by_ != nullptr
          ? by_library::powersgd_project(stream, project, *project_by_, marks_.as<int32_t>())
          : powersgd_project(stream, project);
    }
    pack(stream, {&dense_, gradients_, p, false});
    if (with_wire_residual()) {
      // In the next step the error of P's encode belongs to another basis: keep only that of dense tensors.
      fill_zero(stream, p_residual_.data(), p_residual_.bytes());
      pack(stream, {&dense_, residual_.values(), p_residual_.as<float>(), false});
    }
    p_allreduce_.run(stream, &phases);
    phases.enter(stream, Phase::decompress);
    pack(stream, {&dense_, gradients_, p, true});
    if (with_wire_residual()) pack(stream, {&dense_, residual_.values(), p_residual_.as<float>(), true});
    if (!any_matrix) return residual_.store(stream, phases);
    phases.enter(stream, Phase::compress);
    const float* basis = basis_.as<const float>();
    orthonormalize(stream, {.table = &matrices_,
                            .which = Factor::p,
                            .in = p,
                            .out = basis_.as<float>(),
                            .flags = flags_.as<int32_t>(),
                            .seed = spec_.seed,
                            .step = step_});
    fill_zero(stream, q_lost_.data(), q_lost_.bytes());
    const bool overlapped = halves_.size() > 1;
    for (Half& half : halves_) {
      const PowerSgdBackProject back{.table = &half.matrices,
                                     .m = residual_ ? residual_.values() : gradients_,
                                     .p = basis,
                                     .q = q_sum,
                                     .flags = flags_.as<const int32_t>() + half.first};
      half.back_project_by != nullptr ? by_library::powersgd_back_project(stream, back, *half.back_project_by)
                                      : powersgd_back_project(stream, back);
      if (residual_) {
        fp32_reduce(stream, {.own = q_sum + half.q_begin,
                             .out = q_kept_.as<float>() + half.q_begin,
                             .scale = -1.0f,
                             .count = half.q_count});
      }
      if (!overlapped) {
        half.allreduce->run(stream, &phases);
        continue;
      }
      half.ready.record(stream);
      transfers_.wait(half.ready);
      half.allreduce->run(transfers_, &phases);
      half.summed.record(transfers_);
    }
    for (Half& half : halves_) {
      if (overlapped) {
        phases.enter(stream, Phase::communicate, &half.allreduce->info());
        stream.wait(half.summed);
      }
      phases.enter(stream, Phase::decompress);
      powersgd_reconstruct(stream, {.table = &half.matrices,
                                    .p = basis,
                                    .q = q_sum,
                                    .grad = gradients_,
                                    .flags = flags_.as<const int32_t>() + half.first,
                                    .residual = residual_.values()});
    }
    if (with_wire_residual()) {
      Reduce add{.num_inputs = 1,
                 .own = q_kept_.as<const float>(),
                 .out = q_kept_.as<float>(),
                 .count = plan_.q_elements};
      add.inputs[0] = q_lost_.as<const float>();
      fp32_reduce(stream, add);
    }
    if (residual_ && !lazy()) {
      powersgd_settle(stream, {.table = &matrices_, .residual = residual_.values(), .pending = pending()});
    }
    orthonormalize(stream, {.table = &matrices_,
                            .which = Factor::q,
                            .in = q_sum,
                            .out = q_.as<float>(),
                            .flags = flags_.as<int32_t>(),
                            .keep_flags = true,
                            .seed = spec_.seed,
                            .step = step_});
    residual_.store(stream, phases);
  }

  int64_t steady_from() const override { return spec_.start; }

  Residual* residual() override { return residual_ ? &residual_ : nullptr; }

  std::vector<TensorState> tensor_state() override {
    std::vector<TensorState> all;
    for (size_t i = 0; i < plan_.matrices.size(); ++i) {
      const MatrixDescriptor& d = plan_.matrices[i];
      all.push_back({.tensor = plan_.tensors[i],
                     .kind = "factor",
                     .data = q_.as<float>() + d.q_offset,
                     .shape = {d.cols, d.rank},
                     .same_on_all_ranks = true});
    }
    return all;
  }

  int64_t state_bytes() const override {
    int64_t bytes = residual_.bytes();
    for (const Buffer* b : {&p_, &basis_, &p_residual_, &q_, &q_sum_, &q_lost_, &q_kept_, &flags_, &marks_}) {
      bytes += static_cast<int64_t>(b->bytes());
    }
    return bytes;
  }

  std::string describe() const override {
    return fmt::format(
        "powersgd rank {}: {} matrices of {} elements as {}, {} dense tensors of {}; wire {}{}{}", spec_.rank,
        matrices_.count(), matrices_.elements(), matrices_.p_elements() + matrices_.q_elements(),
        dense_.count(), plan_.dense_elements, spec_.wire->name, residual_.describe(),
        described_products(passes(), chosen()));
  }

  std::vector<PlannedAllreduce> plan() const override {
    std::vector<PlannedAllreduce> all;
    if (plan_.p_elements + plan_.dense_elements > 0) {
      all.push_back(
          {halves_.empty() ? "" : "P and dense tensors", p_choice_.schedule.kind, p_choice_.reason});
    }
    if (!halves_.empty()) all.push_back({"Q", halves_[0].choice.schedule.kind, halves_[0].choice.reason});
    return all;
  }

 private:
  // Matrices [first, first + matrices.count()) of the bucket, and the allreduce of their Q.
  struct Half {
    int first = 0;
    int64_t q_begin = 0, q_count = 0;
    MatrixTable matrices;
    SchedulePlanner::Choice choice;
    std::unique_ptr<Program> allreduce;
    ThinProducts* back_project_by = nullptr;  // null: the fused kernel
    Event ready, summed;                      // Q is complete on this rank; Q is summed over all ranks
  };

  // One part, or two of about the same size if back_project over half of the matrices takes longer than an
  // additional exchange. Measured over TCP on four hosts with one core each: a bucket of 6.5 million elements
  // takes 37 to 38 ms in one part and 40 to 41 ms in two.
  static constexpr int64_t kElementsToHalve = 32 << 20;
  void make_halves(const BucketContext& c) {
    const auto& all = plan_.matrices;
    auto add = [&](size_t begin, size_t end, const char* name) {
      const int64_t q_begin = all[begin].q_offset;
      const int64_t q_end = end < all.size() ? all[end].q_offset : plan_.q_elements;
      Half& half = halves_.emplace_back();
      half.first = static_cast<int>(begin);
      half.q_begin = q_begin;
      half.q_count = q_end - q_begin;
      half.matrices = MatrixTable(c.stream, {all.begin() + static_cast<std::ptrdiff_t>(begin),
                                             all.begin() + static_cast<std::ptrdiff_t>(end)});
      // One slice: it is small and already overlaps with kernels.
      const auto how = powersgd_options(c, name, (uint64_t{1} << 62) + static_cast<uint64_t>(q_begin), 0);
      half.choice = c.choose(q_end - q_begin, c.spec.wire);
      half.allreduce = std::make_unique<Program>(
          *c.transport, half.choice.schedule,
          ProgramBuffers{q_sum_.as<float>() + q_begin, q_sum_.as<float>() + q_begin,
                         q_lost_ ? q_lost_.as<float>() + q_begin : nullptr, q_end - q_begin},
          how);
      half.ready = Event::create(device_);
      half.summed = Event::create(device_);
    };
    if (all.empty()) return;
    size_t middle = 0;
    for (int64_t before = 0; middle < all.size() && 2 * before < matrices_.elements(); ++middle) {
      before += int64_t{all[middle].rows} * all[middle].cols;
    }
    const int64_t enough = c.slice_bytes == kAutomaticSlices ? kElementsToHalve : 16 * c.slice_bytes;
    if (!transfers_ || enough == 0 || matrices_.elements() < enough || middle == all.size()) {
      add(0, all.size(), "Q");
    } else {
      add(0, middle, "Q, first half");
      add(middle, all.size(), "Q, second half");
    }
  }

  // Returns Q's pass, then P's of each half.
  std::vector<PowerSgdPass> passes() const {
    if (matrices_.count() == 0) return {};
    std::vector<PowerSgdPass> all{
        {.kind = PowerSgdPass::project, .table = &matrices_, .forms_m = static_cast<bool>(residual_)}};
    for (const Half& half : halves_)
      all.push_back({.kind = PowerSgdPass::back_project, .table = &half.matrices});
    return all;
  }
  std::vector<ThinProducts*> chosen() const {
    std::vector<ThinProducts*> all{project_by_};
    for (const Half& half : halves_) all.push_back(half.back_project_by);
    return all;
  }
  void choose(const BucketContext& c) {
    const std::vector<ThinProducts*> libraries = choose_products(c, passes());
    if (libraries.empty()) return;
    project_by_ = libraries[0];
    for (size_t i = 0; i < halves_.size(); ++i) halves_[i].back_project_by = libraries[i + 1];
  }

  bool with_wire_residual() const { return lossy_ && spec_.error_feedback; }

  // Whether the next step computes E. Not if E is encoded at the end of this step.
  bool lazy() const { return residual_ && !residual_.encoded(); }
  PendingFactors pending() const { return {basis_.as<const float>(), q_kept_.as<const float>()}; }

  void draw_q(const Stream& stream) {
    draw_basis(stream, matrices_, Factor::q, q_, flags_.as<int32_t>(), spec_.seed, step_);
  }

  const CompressionSpec spec_;
  const PowerSgdPlan plan_;
  const Device device_;
  float* gradients_;
  const uint64_t* step_;
  MatrixTable matrices_;
  SegmentTable dense_;
  bool lossy_;
  Residual residual_;  // E, or M with `pending()`; also of dense tensors if the wire is lossy
  Buffer p_;           // [P | dense]
  Buffer basis_;       // the orthonormal P
  Buffer p_residual_;  // scratch, lossy wires only: the residual of [P | dense] during allreduce 1
  Buffer q_;           // the orthonormal Q at a step's start
  Buffer q_sum_;       // this step's Q
  Buffer q_lost_;      // lossy wires only
  Buffer q_kept_;      // lost - own, of Q; P times it: E - M
  Buffer flags_;
  Buffer marks_;                        // scratch of the library's passes
  ThinProducts* project_by_ = nullptr;  // null: the fused kernel
  SchedulePlanner::Choice p_choice_;
  Program p_allreduce_;
  std::vector<Half> halves_;  // empty without matrices
  std::unique_ptr<Program> before_start_;
  Stream transfers_;
};

}  // namespace

std::unique_ptr<Codec> make_powersgd_codec(const BucketContext& context) {
  if (context.spec.alternate) return make_acp_codec(context);
  return std::make_unique<PowerSgdCodec>(context);
}

}  // namespace gradwire
