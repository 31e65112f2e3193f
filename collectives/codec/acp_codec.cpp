// `powersgd` with alternate=on: sends P and Q in turns, one of them in each step (ACP-SGD: Zhang et al.,
// "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023). Half of
// PowerSGD's bytes, and one collective instead of two.
//
// A step of a bucket that sends P. The next step sends Q, with P and Q, rows and columns exchanged:
//   project        E of the last step; M = G + E (into E's memory), P = M Q0    on this rank; Q0's columns
//                  are orthonormal
//   pack           dense tensors (vectors, small matrices) after P
//   allreduce      [P | dense], mean
//   unpack         dense tensors, which are now done
//   orthonormalize P into P0, which the next step projects with; matrices with non-finite values are flagged
//                  here, identically on every rank; a column that vanished is re-seeded
//   reconstruct    G = P Q0^T. E = M - P_own Q0^T, with this rank's own P, as in the paper, is computed by
//                  the next step's project, or by an earlier reader
//
// Conservation: sum over ranks of E_new + world * G_out = sum of (G + E_old), because Q0 is the same on all
// ranks and P enters linearly. On a lossy wire the error of this rank's encodes of P stays in E: E = M -
// (P_own - lost) Q0^T.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "collectives/codec/powersgd_choice.h"
#include "collectives/codec/powersgd_parts.h"
#include "kernels/wire/fp32.h"

namespace gradwire {
namespace {

class AcpCodec final : public Codec {
 public:
  explicit AcpCodec(const BucketContext& c)
      : spec_(c.spec),
        plan_(c),
        device_(c.transport->device()),
        gradients_(c.gradients),
        step_(c.step),
        matrices_(c.stream, plan_.matrices),
        put_back_(c.spec.error_feedback && !c.spec.wire->exact),
        residual_(c, spec_.error_feedback && (put_back_ || matrices_.count() > 0)),
        sum_(c.exchanged(factor_elements() + plan_.dense_elements)),
        lost_(buffer(put_back_ ? factor_elements() + plan_.dense_elements : 0)),
        flags_(make_buffer<int32_t>(device_, matrices_.count())),
        marks_(make_buffer<int32_t>(device_, matrices_.count())),
        turns_{make_turn(c, Factor::p), make_turn(c, Factor::q)},
        before_start_(make_plain_start(c)) {
    const std::vector<ThinProducts*> libraries = choose_products(c, passes());
    for (size_t i = 0; i < libraries.size(); ++i) turns_[i].by = libraries[i];
    for (Buffer* b : {&sum_, &lost_, &flags_}) {
      fill_zero(c.stream, b->data(), b->bytes());
    }
    for (Turn& turn : turns_) {
      fill_zero(c.stream, turn.kept.data(), turn.kept.bytes());
      draw_basis(c.stream, matrices_, turn.which, turn.basis, flags_.as<int32_t>(), spec_.seed, step_);
    }
    if (lazy()) {
      residual_.settle_with([this](const Stream& stream, int64_t begin, int64_t end) {
        for (const Turn& turn : turns_) {  // one of them has nothing pending
          settle(stream, matrices_, residual_.values(), pending(turn), turn.which, begin, end);
        }
      });
    }
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    size_t bytes = before_start_ ? before_start_->workspace_bytes() : 0;
    for (const Turn& turn : turns_) bytes = std::max(bytes, turn.allreduce->workspace_bytes());
    return residual_.workspace_bytes() + (bytes + 255) / 256 * 256;
  }

  void bind(void* workspace) override {
    workspace = residual_.bind(workspace);
    for (Turn& turn : turns_) turn.allreduce->bind(workspace);
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
    const size_t which = static_cast<size_t>((step - spec_.start) % 2);
    const Turn &now = turns_[which], &other = turns_[1 - which];
    residual_.load(stream, phases);
    phases.enter(stream, Phase::compress);
    // The other turn's gaps are at other places.
    if (!spec_.wire->exact) fill_zero(stream, sum_.data(), sum_.bytes());
    if (matrices_.count() > 0) project(stream, now, other);
    pack(stream, {&now.dense, gradients_, sum_.as<float>(), false});
    if (put_back_) {
      fill_zero(stream, lost_.data(), lost_.bytes());
      pack(stream, {&now.dense, residual_.values(), lost_.as<float>(), false});
    }
    now.allreduce->run(stream, &phases);
    phases.enter(stream, Phase::decompress);
    pack(stream, {&now.dense, gradients_, sum_.as<float>(), true});
    if (put_back_) pack(stream, {&now.dense, residual_.values(), lost_.as<float>(), true});
    if (matrices_.count() > 0) reconstruct(stream, now, other);
    residual_.store(stream, phases);
  }

  int64_t steady_from() const override { return spec_.start; }
  int64_t period() const override { return 2; }

  Residual* residual() override { return residual_ ? &residual_ : nullptr; }

  // Both bases, although the next step uses one: a flagged matrix keeps the older one.
  std::vector<TensorState> tensor_state() override {
    std::vector<TensorState> all;
    for (size_t i = 0; i < plan_.matrices.size(); ++i) {
      const MatrixDescriptor& d = plan_.matrices[i];
      all.push_back({.tensor = plan_.tensors[i],
                     .kind = "factor",
                     .data = turns_[1].basis.as<float>() + d.q_offset,
                     .shape = {d.cols, d.rank},
                     .same_on_all_ranks = true});
      all.push_back({.tensor = plan_.tensors[i],
                     .kind = "factor_p",
                     .data = turns_[0].basis.as<float>() + d.p_offset,
                     .shape = {d.rows, d.rank},
                     .same_on_all_ranks = true});
    }
    return all;
  }

  int64_t state_bytes() const override {
    int64_t bytes = residual_.bytes();
    for (const Buffer* b : {&sum_, &lost_, &flags_, &marks_}) bytes += static_cast<int64_t>(b->bytes());
    for (const Turn& turn : turns_) bytes += static_cast<int64_t>(turn.basis.bytes() + turn.kept.bytes());
    return bytes;
  }

  std::string describe() const override {
    return fmt::format(
        "powersgd rank {}, P and Q in turns: {} matrices of {} elements as {} or {}, {} dense tensors of {}; "
        "wire {}{}{}",
        spec_.rank, matrices_.count(), matrices_.elements(), matrices_.p_elements(), matrices_.q_elements(),
        plan_.dense.size(), plan_.dense_elements, spec_.wire->name, residual_.describe(),
        described_products(passes(), {turns_[0].by, turns_[1].by}));
  }

  std::vector<PlannedAllreduce> plan() const override {
    std::vector<PlannedAllreduce> all;
    for (const Turn& turn : turns_) {
      if (turn.elements + plan_.dense_elements > 0) {
        all.push_back({turn.part, turn.choice.schedule.kind, turn.choice.reason});
      }
      if (matrices_.count() == 0) break;  // both sum only the dense tensors
    }
    return all;
  }

 private:
  // The state of the steps that send one of the factors.
  struct Turn {
    Factor which = Factor::p;
    std::string part = {};
    int64_t elements = 0;     // of the factor
    SegmentTable dense = {};  // packed after it
    Buffer basis = {};        // the factor's orthonormal columns; the other turn projects with them
    Buffer kept = {};         // lost - own, of the factor; times the other's basis: E - M
    SchedulePlanner::Choice choice = {};
    std::unique_ptr<Program> allreduce = {};  // of [factor | dense], in sum_
    ThinProducts* by = nullptr;               // computes the factor's products; null: the fused kernel
  };

  Turn make_turn(const BucketContext& c, Factor which) const {
    const bool p = which == Factor::p;
    Turn turn{.which = which,
              .part = matrices_.count() == 0 ? ""
                      : p                    ? "P and dense tensors"
                                             : "Q and dense tensors",
              .elements = p ? plan_.p_elements : plan_.q_elements};
    const int64_t all = turn.elements + plan_.dense_elements;
    turn.dense = SegmentTable(c.stream, plan_.dense_after(turn.elements));
    turn.basis = buffer(turn.elements);
    turn.kept = buffer(residual_ ? turn.elements : 0);
    turn.choice = c.choose(all, spec_.wire);
    turn.allreduce = std::make_unique<Program>(
        *c.transport, turn.choice.schedule,
        ProgramBuffers{sum_.data(), sum_.as<float>(), lost_.as<float>(), all},
        powersgd_options(c, p ? "P and dense tensors" : "Q and dense tensors", 0, turn.choice.slice_bytes));
    return turn;
  }

  // Whether the next step computes E. Not if E is encoded at the end of this step.
  bool lazy() const { return residual_ && !residual_.encoded(); }
  // Returns the part of E that a step sending `turn`'s factor leaves pending.
  PendingFactors pending(const Turn& turn) const {
    const bool p = turn.which == Factor::p;
    return {.p = (p ? turn.kept : turns_[0].basis).as<const float>(),
            .q = (p ? turns_[1].basis : turn.kept).as<const float>(),
            .flags = flags_.as<const int32_t>()};
  }

  void project(const Stream& stream, const Turn& now, const Turn& other) {
    float* residual = residual_.values();
    const PendingFactors pending = lazy() ? this->pending(other) : PendingFactors{};
    if (now.which == Factor::p) {
      const PowerSgdProject args{.table = &matrices_,
                                 .grad = gradients_,
                                 .residual = residual,
                                 .pending = pending,
                                 .q = other.basis.as<const float>(),
                                 .p = sum_.as<float>()};
      now.by != nullptr ? by_library::powersgd_project(stream, args, *now.by, marks_.as<int32_t>())
                        : powersgd_project(stream, args);
    } else {
      const PowerSgdProjectOnto args{.table = &matrices_,
                                     .grad = gradients_,
                                     .residual = residual,
                                     .pending = pending,
                                     .p = other.basis.as<const float>(),
                                     .q = sum_.as<float>()};
      now.by != nullptr ? by_library::powersgd_project_onto(stream, args, *now.by, marks_.as<int32_t>())
                        : powersgd_project_onto(stream, args);
    }
    if (residual_) {
      fill_zero(stream, other.kept.data(), other.kept.bytes());
      fp32_reduce(stream, {.own = sum_.as<const float>(),
                           .out = now.kept.as<float>(),
                           .scale = -1.0f,
                           .count = now.elements});
    }
  }

  void reconstruct(const Stream& stream, const Turn& now, const Turn& other) {
    orthonormalize(stream, {.table = &matrices_,
                            .which = now.which,
                            .in = sum_.as<const float>(),
                            .out = now.basis.as<float>(),
                            .flags = flags_.as<int32_t>(),
                            .seed = spec_.seed,
                            .step = step_});
    if (put_back_) {
      Reduce add{.num_inputs = 1,
                 .own = now.kept.as<const float>(),
                 .out = now.kept.as<float>(),
                 .count = now.elements};
      add.inputs[0] = lost_.as<const float>();
      fp32_reduce(stream, add);
    }
    const bool p = now.which == Factor::p;
    const float *sum = sum_.as<const float>(), *basis = other.basis.as<const float>();
    powersgd_reconstruct(stream, {.table = &matrices_,
                                  .p = p ? sum : basis,
                                  .q = p ? basis : sum,
                                  .grad = gradients_,
                                  .flags = flags_.as<const int32_t>(),
                                  .residual = residual_.values()});
    if (residual_ && !lazy()) {
      powersgd_settle(stream, {.table = &matrices_, .residual = residual_.values(), .pending = pending(now)});
    }
  }

  std::vector<PowerSgdPass> passes() const {
    if (matrices_.count() == 0) return {};
    const auto forms = static_cast<bool>(residual_);
    return {{.kind = PowerSgdPass::project, .table = &matrices_, .forms_m = forms},
            {.kind = PowerSgdPass::project_onto, .table = &matrices_, .forms_m = forms}};
  }

  int64_t factor_elements() const { return std::max(plan_.p_elements, plan_.q_elements); }
  Buffer buffer(int64_t elements) const { return make_buffer<float>(device_, elements); }

  const CompressionSpec spec_;
  const PowerSgdPlan plan_;
  const Device device_;
  float* gradients_;
  const uint64_t* step_;
  MatrixTable matrices_;
  const bool put_back_;  // error feedback over a lossy wire
  // E, or M with a pending part; also of dense tensors if the wire is lossy.
  Residual residual_;
  Buffer sum_;   // [P | dense] or [Q | dense]: first this rank's, then the mean
  Buffer lost_;  // [P | dense] or [Q | dense], lossy wires only: the allreduce's residual
  Buffer flags_;
  Buffer marks_;               // scratch of the library's passes
  std::array<Turn, 2> turns_;  // P's, then Q's
  std::unique_ptr<Program> before_start_;
};

}  // namespace

std::unique_ptr<Codec> make_acp_codec(const BucketContext& context) {
  return std::make_unique<AcpCodec>(context);
}

}  // namespace gradwire
