#include "collectives/program/compiler.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

size_t aligned(int64_t bytes) {
  return (static_cast<size_t>(bytes) + 255) / 256 * 256;
}

// Returns 1 if nothing is added up.
float part_scale_of(const Schedule& schedule, float scale) {
  const bool adds =
      schedule.collective == Collective::allreduce || schedule.collective == Collective::reduce_scatter;
  return adds && schedule.world > 1 ? part_scale_for(scale) : 1.0f;
}

}  // namespace

Program::Compiler::Compiler(Program& program, const float* in, float* out, std::byte* base)
    : program_(program),
      wire_(program.options_.wire),
      rank_(program.transport_.rank()),
      part_scale_(part_scale_of(program.schedule_, program.options_.scale)),
      result_scale_(program.options_.scale / part_scale_),
      base_(reinterpret_cast<uintptr_t>(base)),
      node_(program.over_node_windows() ? program.windows_.get() : nullptr),
      chunks_(program.schedule_.chunks) {
  for (int c = 0; c < program_.schedule_.chunks; ++c) {
    chunks_[c].range = program_.ranges_[c];
    chunks_[c].owner = program_.schedule_.owner[c] == rank_;
  }
  if (node_ != nullptr) {
    const auto places = places_in_windows(program_.ranges_, program_.options_);
    for (size_t c = 0; c < chunks_.size(); ++c) chunks_[c].place = places[c];
  }
  look_ahead();
  place_chunks(in, out);
}

// Exchange 0 is the reduce-scatter inside the node, whose parts are in the first half. The last one is the
// all-gather.
void* Program::Compiler::in_window_of(int rank, int k, const ChunkState& chunk) const {
  std::byte* const window = node_->memory.windows[rank - node_->first_rank];
  return window + kPeerHeaderBytes + (k == 0 ? 0 : node_->memory.half_bytes) + chunk.place;
}

// Places each chunk's parts and results: in the caller's buffers where the collective allows it, otherwise in
// the workspace. The workspace holds first the encoded chunks of a lossy wire, then slots for contributions.
void Program::Compiler::place_chunks(const float* in, float* out) {
  const Collective collective = program_.schedule_.collective;
  int64_t shard = 0;  // elements placed so far
  for (ChunkState& chunk : chunks_) {
    const int64_t begin = chunk.range.begin;
    float* const residual = program_.buffers_.residual;
    if (node_ != nullptr && !wire_->exact && !program_.options_.fp32_intra_node) {
      const int owner = program_.schedule_.owner[static_cast<size_t>(&chunk - chunks_.data())];
      const bool own_shard = owner % node_->memory.world == node_->memory.rank;
      chunk.wire = in_window_of(rank_, own_shard ? 1 : 0, chunk);
    } else if (!wire_->exact) {
      chunk.wire = reserve(bytes_of(chunk, false));
    }
    switch (collective) {
      case Collective::allreduce:
        chunk.own = in + begin;
        chunk.exact = out + begin;
        chunk.residual = residual == nullptr ? nullptr : residual + begin;
        break;
      case Collective::reduce_scatter:
        chunk.own = in + begin;
        chunk.residual = residual == nullptr ? nullptr : residual + begin;
        chunk.exact = chunk.owner ? out + shard : static_cast<float*>(reserve(4 * chunk.range.count()));
        break;
      case Collective::all_gather:
      case Collective::broadcast:
        chunk.own = chunk.owner ? in + shard : nullptr;
        chunk.exact = out + begin;
        chunk.residual = residual == nullptr || !chunk.owner ? nullptr : residual + shard;
        break;
    }
    if (chunk.owner) shard += chunk.range.count();
  }
}

void* Program::Compiler::reserve(int64_t bytes) {
  void* place = address(reserved_);
  reserved_ += aligned(bytes);
  return place;
}

// Determines which of this rank's sums are sent over a lossy wire, and how large a slot must be.
void Program::Compiler::look_ahead() {
  std::vector<bool> final(chunks_.size());
  for (const Round& round : rounds()) {
    for (const Step& step : round) {
      ChunkState& chunk = chunks_[step.chunk];
      if (step.kind == Step::Kind::recv_copy) {
        final[step.chunk] = true;
      } else if (step.kind == Step::Kind::recv_reduce) {
        if (in_window(step)) continue;
        slot_bytes_ = std::max(slot_bytes_, aligned(bytes_of(chunk, exact(step))));
      } else if (!final[step.chunk] && !exact(step)) {
        chunk.sent_encoded = true;
      }
    }
  }
}

size_t Program::Compiler::compile() {
  const Schedule& schedule = program_.schedule_;
  for (int k = 0; k < static_cast<int>(rounds().size()); ++k) round(k);
  for (int c = 0; c < schedule.chunks; ++c) {
    if (!chunks_[c].closed && chunks_[c].owner) close(c);
  }
  put_in_order();
  return reserved_ + static_cast<size_t>(slots_) * slot_bytes_;
}

bool Program::Compiler::exact(const Step& step) const {
  return wire_->exact || (program_.options_.fp32_intra_node && step.intra_node);
}

int64_t Program::Compiler::bytes_of(const ChunkState& chunk, bool exact) const {
  return (exact ? kFp32 : wire_)->bytes(chunk.range.count());
}

int Program::Compiler::take_slot() {
  if (free_slots_.empty()) return slots_++;
  int index = free_slots_.back();
  free_slots_.pop_back();
  return index;
}

void Program::Compiler::refuse(const std::string& why) const {
  throw BadInput(fmt::format("{}: the schedule {}", program_.options_.what, why));
}

void Program::Compiler::round(int k) {
  Exchange& exchange = exchanges_.emplace_back();
  exchange.label = {mix(program_.call_.hash, static_cast<uint64_t>(k)),
                    fmt::format("{}, round {} of {}", program_.call_.what, k + 1, rounds().size())};
  for (const Step& step : rounds()[k]) {
    const ChunkState& chunk = chunks_[step.chunk];
    if (step.kind == Step::Kind::send && !chunk.closed && chunk.range.count() > 0) close(step.chunk);
  }
  std::vector<int> finals;
  for (const Step& step : rounds()[k]) exchange.in_windows = exchange.in_windows || in_window(step);
  for (const Step& step : rounds()[k]) {
    ChunkState& chunk = chunks_[step.chunk];
    if (chunk.range.count() == 0) continue;
    const bool in_fp32 = exact(step);
    const auto bytes = static_cast<size_t>(bytes_of(chunk, in_fp32));
    switch (step.kind) {
      case Step::Kind::send:
        exchange.transfers.push_back(send(step, k));
        break;
      case Step::Kind::recv_reduce: {
        if (chunk.closed) {
          refuse(fmt::format("adds to chunk {} in round {}, after its partial sum was sent", step.chunk, k));
        }
        auto& inputs = in_fp32 ? chunk.exact_inputs : chunk.encoded_inputs;
        const bool part = part_scale_ != 1.0f && sends_a_part(step.peer, step.chunk, k);
        const float scale = part ? part_scale_ : 1.0f;
        inputs.push_back(in_window(step) ? Input{step.peer, -1, scale, in_window_of(step.peer, k, chunk)}
                                         : Input{step.peer, take_slot(), scale});
        chunk.arrived = k;
        exchange.transfers.push_back({Transfer::Kind::receive, step.peer, place_of(inputs.back()), bytes});
        break;
      }
      case Step::Kind::recv_copy: {
        void* to = in_window(step) ? in_window_of(step.peer, k, chunk) : in_fp32 ? chunk.exact : chunk.wire;
        exchange.transfers.push_back({Transfer::Kind::receive, step.peer, to, bytes});
        chunk.closed = true;  // from now on forwarded, not encoded
        chunk.arrived = k;
        (in_fp32 ? chunk.exact_form : chunk.encoded_form) = {.data = to, .there = true};
        (in_fp32 ? chunk.encoded_form : chunk.exact_form) = {};
        if (!in_fp32 || in_window(step)) finals.push_back(step.chunk);
        break;
      }
    }
  }
  for (int c : finals) decode(chunks_[c]);
}

bool Program::Compiler::sends_a_part(int rank, int c, int k) {
  const Schedule& schedule = program_.schedule_;
  first_sum_.resize(static_cast<size_t>(schedule.world));
  std::vector<int>& first = first_sum_[static_cast<size_t>(rank)];
  if (first.empty()) {
    first.assign(static_cast<size_t>(schedule.chunks), kNever);
    const auto& its_rounds = schedule.rounds[static_cast<size_t>(rank)];
    for (int round = static_cast<int>(its_rounds.size()); round-- > 0;) {
      for (const Step& step : its_rounds[static_cast<size_t>(round)]) {
        if (step.kind == Step::Kind::recv_reduce) first[static_cast<size_t>(step.chunk)] = round;
      }
    }
  }
  return first[static_cast<size_t>(c)] >= k;
}

Transfer Program::Compiler::send(const Step& step, int k) {
  ChunkState& chunk = chunks_[step.chunk];
  const bool in_fp32 = exact(step);
  const Form& form = in_fp32 ? chunk.exact_form : chunk.encoded_form;
  if (!form.there) {
    refuse(fmt::format("sends chunk {} in round {} {}", step.chunk, k,
                       in_fp32
                           ? "inside its node, as FP32, after it was rounded for another node"
                           : "to another node, to be rounded, after it was sent unrounded inside its own"));
  }
  if (in_window(step) && form.data != in_window_of(rank_, k, chunk)) return export_exact(step, k);
  if (form.made_by >= 0) kernels_[form.made_by].before = std::min(kernels_[form.made_by].before, k);
  // Sends only read.
  return {Transfer::Kind::send, step.peer, const_cast<void*>(form.data),
          static_cast<size_t>(bytes_of(chunk, in_fp32))};
}

// Copies FP32 from the caller's buffers, which other ranks do not read, into the window; once for all
// readers.
Transfer Program::Compiler::export_exact(const Step& step, int k) {
  ChunkState& chunk = chunks_[step.chunk];
  auto* const place = static_cast<float*>(in_window_of(rank_, k, chunk));
  if (chunk.exported != k) {
    chunk.exported = k;
    const int copy = add(Reduce{.own = static_cast<const float*>(chunk.exact_form.data),
                                .out = place,
                                .count = chunk.range.count()},
                         chunk);
    kernels_[copy].before = k;
    const int made_by = chunk.exact_form.made_by;
    if (made_by >= 0) kernels_[made_by].before = std::min(kernels_[made_by].before, k);
  }
  return {Transfer::Kind::send, step.peer, place, static_cast<size_t>(bytes_of(chunk, true))};
}

template <typename K>
int Program::Compiler::add(const K& kernel, const ChunkState& chunk) {
  kernels_.push_back({.operation = {.work = kernel, .after = chunk.arrived}});
  return static_cast<int>(kernels_.size()) - 1;
}

// Called when the partial sum of chunk c is complete on this rank. Emits the kernels that encode it for
// sending or, at an owner that sends nothing, produce the result.
void Program::Compiler::close(int c) {
  ChunkState& chunk = chunks_[c];
  const Collective collective = program_.schedule_.collective;
  if ((collective == Collective::all_gather || collective == Collective::broadcast) && !chunk.owner) {
    refuse(fmt::format("sends chunk {} before it was received", c));
  }
  const bool encode = chunk.sent_encoded;
  const float scale = chunk.owner ? result_scale_ : 1.0f;
  chunk.closed = true;
  if (!encode && !chunk.owner && !chunk.encoded_inputs.empty()) {
    refuse(fmt::format("forwards chunk {} only inside its node, after parts came from other nodes", c));
  }
  const bool last_is_exact = !encode && chunk.encoded_inputs.empty();
  const float* sum = chunk.own;
  const bool adds_exact = !chunk.exact_inputs.empty();
  int last = -1;
  const bool in_place = chunk.own == chunk.exact;
  if (adds_exact || (last_is_exact && chunk.owner && (scale != 1.0f || !in_place))) {
    Reduce add_up;
    merge(chunk.exact_inputs, chunk, add_up);
    add_up.own = chunk.own;
    add_up.own_scale = part_scale_;
    add_up.out = chunk.exact;
    add_up.scale = last_is_exact ? scale : 1.0f;
    sum = chunk.exact;
    if (chunk.range.count() > 0) last = add(add_up, chunk);
    if (last >= 0) kernels_[last].feeds_next = !last_is_exact;
  }
  if (!last_is_exact) {
    const ReduceEncode op = reduce_encode(chunk, sum, adds_exact, scale, encode);
    if (chunk.range.count() > 0) last = add(op, chunk);
  }
  chunk.encoded_form = {.data = chunk.wire, .there = encode, .made_by = last};
  chunk.exact_form = {
      .data = chunk.owner ? chunk.exact : sum, .there = !encode || chunk.owner, .made_by = last};
}

// Fills the arguments common to all merging kernels: contributions in rank order, and this rank's place among
// them.
template <typename Args>
void Program::Compiler::merge(std::vector<Input>& inputs, const ChunkState& chunk, Args& args) {
  if (inputs.size() > kMaxInputs) {
    refuse(
        fmt::format("merges {} contributions at once, at most {} are possible", inputs.size(), kMaxInputs));
  }
  std::sort(inputs.begin(), inputs.end(), [](auto& a, auto& b) { return a.from < b.from; });
  for (const Input& input : inputs) {
    args.input_scales.of[args.num_inputs] = input.scale;
    args.inputs[args.num_inputs++] =
        static_cast<std::remove_reference_t<decltype(args.inputs[0])>>(place_of(input));
    args.own_position += input.from < rank_ ? 1 : 0;
    if (input.slot >= 0) free_slots_.push_back(input.slot);
  }
  args.count = chunk.range.count();
  inputs.clear();
}

ReduceEncode Program::Compiler::reduce_encode(ChunkState& chunk, const float* own, bool own_is_sum,
                                              float scale, bool encode) {
  ReduceEncode args;
  merge(chunk.encoded_inputs, chunk, args);
  args.own = own;
  if (own_is_sum) {
    args.residual_scale = part_scale_;
  } else if (args.num_inputs > 0) {  // otherwise sent unchanged
    args.own_scale = part_scale_;
  }
  args.residual = chunk.residual;
  args.wire = encode ? chunk.wire : nullptr;
  args.out = chunk.owner ? chunk.exact : nullptr;
  args.out_scale = scale;
  args.rounding = program_.options_.rounding;
  args.rounding.first_element += chunk.range.begin;
  return args;
}

// Decodes a received final value, or copies it from a window if it is FP32.
void Program::Compiler::decode(ChunkState& chunk) {
  const int64_t count = chunk.range.count();
  int made_by = -1;
  if (chunk.encoded_form.there) {
    const Decode args{chunk.encoded_form.data, chunk.exact, result_scale_, count, chunk.residual};
    made_by = add(args, chunk);
  } else {
    const auto* in_window = static_cast<const float*>(chunk.exact_form.data);
    made_by = add(Reduce{.own = in_window, .out = chunk.exact, .count = count}, chunk);
  }
  chunk.exact_form = {.data = chunk.exact, .there = true, .made_by = made_by};
}

// Kernels were emitted after their dependencies; this defers kernels that can wait. Every kernel that closes
// a chunk for exchange k must come before that exchange even without another dependency: the exchange may
// receive into a slot that the kernel reads.
void Program::Compiler::put_in_order() {
  auto& operations = program_.operations_;
  operations.clear();
  for (size_t i = kernels_.size(); i-- > 0;) {
    if (kernels_[i].feeds_next) kernels_[i].before = kernels_[i + 1].before;
  }
  std::vector<const Kernel*> pending;
  for (const Kernel& kernel : kernels_) pending.push_back(&kernel);
  // The position of the last kernel that exchange k depends on.
  std::vector<int> last_for(exchanges_.size(), -1);
  auto emit = [&](auto chosen) {
    std::erase_if(pending, [&](const Kernel* kernel) {
      if (!chosen(*kernel)) return false;
      if (kernel->before != kNever) last_for[kernel->before] = static_cast<int>(operations.size());
      operations.push_back(kernel->operation);
      return true;
    });
  };
  for (int k = 0; k < static_cast<int>(exchanges_.size()); ++k) {
    emit([&](const Kernel& kernel) { return kernel.before == k; });
    if (last_for[k] >= 0) operations[last_for[k]].needed = true;
    operations.push_back({.work = std::move(exchanges_[k])});
    // While this exchange is in flight, run kernels that do not depend on it.
    emit([&](const Kernel& kernel) { return kernel.before == k + 1 && kernel.operation.after < k; });
    emit([&](const Kernel& kernel) { return kernel.before > k + 1 && kernel.operation.after < k; });
  }
  emit([](const Kernel&) { return true; });
}

}  // namespace gradwire
