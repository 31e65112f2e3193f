// A step of the low-rank codec; low_rank_codec.h lists its phases.
#include "collectives/codec/low_rank_codec.h"
#include "kernels/powersgd/normalize_columns.h"
#include "kernels/wire/fp32.h"

namespace gradwire {

void LowRankCodec::run(const Stream& stream, int64_t step, BucketPhases& phases) {
  phases.enter(stream, Phase::compress);
  residual_.begin_step(stream, phases);
  if (spec_.alternate) {
    const auto turn = static_cast<size_t>((step - spec_.policy.start) % 2);
    send_one(stream, factors_[turn], factors_[1 - turn], phases);
  } else {
    send_both(stream, phases);
  }
  residual_.store(stream, phases);
}

void LowRankCodec::send_both(const Stream& stream, BucketPhases& phases) {
  FactorState &p = factors_[0], &q = factors_[1];
  if (!spec_.wire->keeps_zero()) {  // reset the sums, including the gaps, to zero
    for (Buffer* b : {&sum_, &halves_.sum}) fill_zero(stream, b->data(), b->bytes());
  }
  if (has_matrices()) {
    if (!spec_.warm) draw_basis(stream, q);
    if (dion()) scale_gradients(stream);
    project(stream, p, q);
  }
  sum_with_dense(stream, p, phases);
  if (!has_matrices()) return;
  phases.enter(stream, Phase::compress);
  orthonormalize_sum(stream, sum_.as<const float>(), p, false);
  fill_zero(stream, halves_.lost.data(), halves_.lost.bytes());
  for (Half& half : halves_.parts) sum_half(stream, half, phases);
  for (const Half& half : halves_.parts) {
    if (halves_.parts.size() > 1) {
      phases.enter(stream, Phase::communicate, &half.allreduce->info());
      stream.wait(half.summed);
    }
    phases.enter(stream, Phase::decompress);
    if (dion()) normalize_sum(stream, half);
    reconstruct(stream, half.matrices, half.first, p.basis.as<const float>(), halves_.sum.as<const float>());
  }
  if (!dion()) keep_lost(stream, q, halves_.lost);
  settle_encoded(stream, q);
  if (!dion()) orthonormalize_sum(stream, halves_.sum.as<const float>(), q, true);
}

void LowRankCodec::send_one(const Stream& stream, FactorState& now, FactorState& other,
                            BucketPhases& phases) {
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
void LowRankCodec::project(const Stream& stream, const FactorState& now, const FactorState& other) {
  const PendingFactors pending = lazy() ? this->pending(other) : PendingFactors{};
  auto* const marks = marks_.as<int32_t>();
  if (now.which == Factor::p) {
    const PowerSgdProject args{.table = &matrices_,
                               .grad = gradients_,
                               .residual = residual_.values(),
                               .pending = pending,
                               .q = other.basis.as<const float>(),
                               .p = sum_.as<float>()};
    projections_ != nullptr ? by_library::powersgd_project(stream, args, *projections_, marks)
                            : powersgd_project(stream, args);
  } else {
    const PowerSgdProjectOnto args{.table = &matrices_,
                                   .grad = gradients_,
                                   .residual = residual_.values(),
                                   .pending = pending,
                                   .p = other.basis.as<const float>(),
                                   .q = sum_.as<float>()};
    projections_ != nullptr ? by_library::powersgd_project_onto(stream, args, *projections_, marks)
                            : powersgd_project_onto(stream, args);
  }
}

// Sums [factor | dense] over the ranks. Afterwards the dense tensors are done.
void LowRankCodec::sum_with_dense(const Stream& stream, const FactorState& factor, BucketPhases& phases) {
  pack(stream, {&factor.dense, gradients_, sum_.as<float>(), false});
  if (keeps_losses_) {
    // Only the dense tensors have a residual in lost_: the error of a factor's encode belongs to this step's
    // basis.
    fill_zero(stream, lost_.data(), lost_.bytes());
    pack(stream, {&factor.dense, residual_.values(), lost_.as<float>(), false});
  }
  factor.allreduce->run(stream, &phases);
  phases.enter(stream, Phase::decompress);
  pack(stream, {&factor.dense, gradients_, sum_.as<float>(), true});
  if (keeps_losses_) pack(stream, {&factor.dense, residual_.values(), lost_.as<float>(), true});
}

// Computes this rank's Q of the half and sums Q over the ranks. With two halves the allreduce runs on the
// stream for transfers, otherwise on `stream`.
void LowRankCodec::sum_half(const Stream& stream, Half& half, BucketPhases& phases) {
  float* const sum = halves_.sum.as<float>();
  const PowerSgdBackProject back{.table = &half.matrices,
                                 .m = residual_ ? residual_.values() : gradients_,
                                 .p = factors_[0].basis.as<const float>(),
                                 .q = sum,
                                 .flags = flags_.as<const int32_t>() + half.first};
  back_projections_ != nullptr ? by_library::powersgd_back_project(stream, back, *back_projections_)
                               : powersgd_back_project(stream, back);
  if (residual_ && !dion()) keep_own(stream, factors_[1], sum + half.q_begin, half.q_begin, half.q_count);
  if (halves_.parts.size() == 1) return half.allreduce->run(stream, &phases);
  half.ready.record(stream);
  transfers_.wait(half.ready);
  half.allreduce->run(transfers_, &phases);
  half.summed.record(transfers_);
}

void LowRankCodec::reconstruct(const Stream& stream, const MatrixTable& matrices, int first, const float* p,
                               const float* q) {
  powersgd_reconstruct(stream, {.table = &matrices,
                                .p = p,
                                .q = q,
                                .grad = gradients_,
                                .flags = flags_.as<const int32_t>() + first,
                                .residual = residual_.values()});
}

void LowRankCodec::orthonormalize_sum(const Stream& stream, const float* sum, FactorState& factor,
                                      bool keep_flags) {
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
void LowRankCodec::keep_own(const Stream& stream, FactorState& factor, const float* own, int64_t begin,
                            int64_t count) {
  fp32_reduce(stream, {.own = own, .out = factor.kept.as<float>() + begin, .scale = -1.0f, .count = count});
}

// Adds the errors of this rank's encodes to factor.kept.
void LowRankCodec::keep_lost(const Stream& stream, FactorState& factor, const Buffer& lost) {
  if (!keeps_losses_) return;
  fp32_reduce(stream, {.inputs = {lost.as<const float>()},
                       .num_inputs = 1,
                       .own = factor.kept.as<const float>(),
                       .out = factor.kept.as<float>(),
                       .count = factor.elements});
}

void LowRankCodec::scale_gradients(const Stream& stream) const {
  if (world_ == 1) return;
  for (const MatrixDescriptor& d : matrices_.host()) {
    float* const gradient = gradients_ + d.offset;
    fp32_reduce(stream, {.own = gradient,
                         .out = gradient,
                         .scale = 1.0f / static_cast<float>(world_),
                         .count = int64_t{d.rows} * d.cols});
  }
}

void LowRankCodec::normalize_sum(const Stream& stream, const Half& half) {
  float* const sum = halves_.sum.as<float>();
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

// Draws the basis by orthonormalizing zeros, which re-seeds every column.
void LowRankCodec::draw_basis(const Stream& stream, FactorState& factor) {
  fill_zero(stream, factor.basis.data(), factor.basis.bytes());
  orthonormalize_sum(stream, factor.basis.as<const float>(), factor, false);
}

void LowRankCodec::settle(const Stream& stream, const FactorState& sent, int64_t begin, int64_t end) const {
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
void LowRankCodec::settle_encoded(const Stream& stream, const FactorState& sent) {
  if (!residual_ || lazy()) return;
  powersgd_settle(stream, {.table = &matrices_, .residual = residual_.values(), .pending = pending(sent)});
}

}  // namespace gradwire
