// Construction and reports of the low-rank codec.
#include "collectives/codec/low_rank_codec.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/codec/policy_codec.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/wire/floats.h"

namespace gradwire {
namespace {

// With alternate=off, larger buckets sum Q in two halves, because back_project over half of the matrices
// takes longer than an additional exchange. Measured over TCP on four hosts with one core each: a bucket of
// 6.5 million elements takes 37 to 38 ms in one part and 40 to 41 ms in two parts.
constexpr int64_t kElementsToHalve = 32 << 20;

// From these ranks on, cuBLAS computes the products of a pass. On an H200, 151 matrices of 1 GiB in total
// with error feedback take at rank 32, fused and with cuBLAS: 3.8 and 3.5 ms to project, 6.1 and 3.1 ms to
// project_onto; to back_project 1.4 and 1.9 ms at rank 32, 2.7 and 2.1 ms at rank 64
// (docs/results/2026-11-26-gpu).
constexpr int kLibraryRank = 32, kBackProjectLibraryRank = 64;

}  // namespace

// Factors and dense pieces begin at multiples of 4 elements for vectorized kernels, or at blocks of the wire
// format. The gaps are zero.
PowerSgdPlan::PowerSgdPlan(const BucketContext& c) {
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

std::vector<Segment> PowerSgdPlan::dense_after(int64_t elements) const {
  std::vector<Segment> all = dense;
  for (Segment& s : all) s.packed += elements;
  return all;
}

LowRankCodec::LowRankCodec(const BucketContext& c)
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
  const auto library = [&](int least) {  // on the host only tests have one, and use it at every rank
    return device.is_host() || matrices_.max_rank() >= least ? thin_products(device) : nullptr;
  };
  projections_ = library(kLibraryRank);
  back_projections_ = library(kBackProjectLibraryRank);
  clear(c.stream);
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

LowRankCodec::FactorState LowRankCodec::make_factor(const BucketContext& c, Factor which) {
  const bool p = which == Factor::p;
  FactorState factor{.which = which, .elements = p ? plan_.p_elements : plan_.q_elements};
  const bool keeps = residual_ && (spec_.alternate || !p);
  factor.basis = make_buffer<float>(c.transport->device(), factor.elements);
  factor.kept = make_buffer<float>(c.transport->device(), keeps ? factor.elements : 0);
  if (spec_.alternate || p) add_allreduce(c, factor);
  return factor;
}

int64_t LowRankCodec::sum_elements() const {
  const int64_t q_elements = spec_.alternate ? plan_.q_elements : 0;
  return std::max(plan_.p_elements, q_elements) + plan_.dense_elements;
}

void LowRankCodec::add_allreduce(const BucketContext& c, FactorState& factor) const {
  const int64_t elements = factor.elements + plan_.dense_elements;
  const char* const part = factor.which == Factor::p ? "P and dense tensors" : "Q and dense tensors";
  factor.part = has_matrices() ? part : "";
  factor.dense = SegmentTable(c.stream, plan_.dense_after(factor.elements));
  factor.choice = c.choose(elements, spec_.wire);
  factor.allreduce =
      std::make_unique<Program>(*c.transport, factor.choice.schedule,
                                ProgramBuffers{sum_.data(), sum_.as<float>(), lost_.as<float>(), elements},
                                c.compressed_options(part, factor.choice.slice_bytes));
}

void LowRankCodec::make_halves(const BucketContext& c) {
  halves_.sum = make_buffer<float>(c.transport->device(), plan_.q_elements);
  halves_.lost = make_buffer<float>(c.transport->device(), keeps_losses_ && !dion() ? plan_.q_elements : 0);
  const auto& all = plan_.matrices;
  if (all.empty()) return;
  size_t middle = 0;
  for (int64_t before = 0; middle < all.size() && 2 * before < matrices_.elements(); ++middle) {
    before += int64_t{all[middle].rows} * all[middle].cols;
  }
  const int64_t enough = c.slice_bytes == kAutomaticSlices ? kElementsToHalve : 16 * c.slice_bytes;
  if (!transfers_ || enough == 0 || matrices_.elements() < enough || middle == all.size()) {
    add_half(c, 0, all.size(), "Q");
  } else {
    add_half(c, 0, middle, "Q, first half");
    add_half(c, middle, all.size(), "Q, second half");
  }
}

void LowRankCodec::add_half(const BucketContext& c, size_t begin, size_t end, const char* name) {
  const auto& all = plan_.matrices;
  Half& half = halves_.parts.emplace_back();
  half.first = static_cast<int>(begin);
  half.q_begin = all[begin].q_offset;
  half.q_count = (end < all.size() ? all[end].q_offset : plan_.q_elements) - half.q_begin;
  half.matrices = MatrixTable(c.stream, {all.begin() + static_cast<std::ptrdiff_t>(begin),
                                         all.begin() + static_cast<std::ptrdiff_t>(end)});
  half.choice = c.choose(half.q_count, spec_.wire);
  // Use one slice, because the allreduce is small and already overlaps with kernels.
  Program::Options options = c.compressed_options(name, 0);
  options.rounding.first_element +=
      (int64_t{1} << 62) + half.q_begin;  // random bits that differ from the bits for P
  float* const sum = halves_.sum.as<float>() + half.q_begin;
  half.allreduce = std::make_unique<Program>(
      *c.transport, half.choice.schedule,
      ProgramBuffers{sum, sum, halves_.lost ? halves_.lost.as<float>() + half.q_begin : nullptr,
                     half.q_count},
      options);
  half.ready = Event::create(c.transport->device());
  half.summed = Event::create(c.transport->device());
}

void LowRankCodec::clear(const Stream& stream) {
  for (const Buffer* b : buffers()) fill_zero(stream, b->data(), b->bytes());
  for (FactorState& factor : factors_) {
    if (!spec_.alternate && factor.which == Factor::p) continue;
    if (has_matrices()) draw_basis(stream, factor);
  }
}

std::vector<const Buffer*> LowRankCodec::buffers() const {
  std::vector<const Buffer*> all{&sum_, &lost_, &flags_, &marks_, &scratch_, &halves_.sum, &halves_.lost};
  for (const FactorState& factor : factors_) all.insert(all.end(), {&factor.basis, &factor.kept});
  return all;
}

// All allreduces share one workspace, because they do not run concurrently.
size_t LowRankCodec::workspace_bytes() const {
  size_t bytes = 0;
  for (const FactorState& factor : factors_) {
    if (factor.allreduce) bytes = std::max(bytes, factor.allreduce->workspace_bytes());
  }
  for (const Half& half : halves_.parts) bytes = std::max(bytes, half.allreduce->workspace_bytes());
  return residual_.workspace_bytes() + (bytes + 255) / 256 * 256;
}

void LowRankCodec::bind(void* workspace) {
  workspace = residual_.bind(workspace);
  for (FactorState& factor : factors_) {
    if (factor.allreduce) factor.allreduce->bind(workspace);
  }
  for (Half& half : halves_.parts) half.allreduce->bind(workspace);
}

void LowRankCodec::rebind(float* gradients) {
  gradients_ = gradients;
}

// With alternate=on the state has both bases, although the next step uses one basis, because a flagged matrix
// keeps the older basis.
std::vector<TensorState> LowRankCodec::tensor_state() {
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

int64_t LowRankCodec::state_bytes() const {
  int64_t bytes = residual_.bytes();
  for (const Buffer* b : buffers()) bytes += static_cast<int64_t>(b->bytes());
  return bytes;
}

std::string LowRankCodec::describe() const {
  const int64_t p = matrices_.p_elements(), q = matrices_.q_elements();
  return fmt::format("{} rank {}{}: {} matrices of {} elements as {}, {} dense tensors of {}; wire {}{}{}",
                     dion() ? "dion" : "powersgd", spec_.rank, spec_.alternate ? ", P and Q in turns" : "",
                     matrices_.count(), matrices_.elements(),
                     spec_.alternate ? fmt::format("{} or {}", p, q) : fmt::to_string(p + q),
                     plan_.dense.size(), plan_.dense_elements, spec_.wire->name, residual_.describe(),
                     projections_ == nullptr ? "" : "; products by " + projections_->name());
}

std::vector<PlannedAllreduce> LowRankCodec::plan() const {
  std::vector<PlannedAllreduce> all;
  for (const FactorState& factor : factors_) {
    if (factor.allreduce && factor.elements + plan_.dense_elements > 0) {
      all.push_back({factor.part, factor.choice.schedule.kind, factor.choice.reason});
    }
    if (!has_matrices()) break;  // without matrices the other factor sums the same dense tensors
  }
  if (!halves_.parts.empty()) {
    const SchedulePlanner::Choice& choice = halves_.parts[0].choice;
    all.push_back({"Q", choice.schedule.kind, choice.reason});
  }
  return all;
}

PendingFactors LowRankCodec::pending(const FactorState& sent) const {
  const bool p = sent.which == Factor::p;
  return {.p = (p ? sent.kept : factors_[0].basis).as<const float>(),
          .q = (p ? factors_[1].basis : sent.kept).as<const float>(),
          .flags = spec_.alternate || dion() ? flags_.as<const int32_t>() : nullptr};
}

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

// A step of the low-rank codec; low_rank_codec.h lists its phases.

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
