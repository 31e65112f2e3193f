#include "collectives/program/executor_compiler.h"

#include <algorithm>

#include "runtime/error.h"
#include "runtime/mix.h"

namespace gradwire {
namespace {

// Chunks begin where a wire format's blocks do.
int64_t granularity(Wire wire) {
  return wire == Wire::fp8 ? kFp8Block : 8;
}

size_t aligned(int64_t bytes) {
  return (static_cast<size_t>(bytes) + 255) / 256 * 256;
}

}  // namespace

Allreduce::Compiler::Compiler(Allreduce& program, std::byte* base)
    : program_(program),
      wire_(program.options_.wire),
      lossy_(wire_ != Wire::fp32),
      rank_(program.transport_.rank()),
      base_(reinterpret_cast<uintptr_t>(base)),
      chunks_(program.schedule_.chunks) {
  for (int c = 0; c < program_.schedule_.chunks; ++c) {
    chunks_[c].range = chunk_range(program_.count_, program_.schedule_.chunks, c, granularity(wire_));
  }
  look_ahead();
  // Workspace: every chunk as it goes over a wire that rounds, then slots for contributions.
  for (ChunkState& chunk : chunks_) {
    chunk.encoded = encoded_bytes_;
    if (lossy_) encoded_bytes_ += aligned(bytes_of(chunk, false));
  }
}

// Which chunks this rank owns, which of its own sums cross a wire that rounds, and how large a slot must be.
void Allreduce::Compiler::look_ahead() {
  std::vector<bool> final(chunks_.size());
  for (const Round& round : rounds()) {
    for (const Step& step : round) {
      ChunkState& chunk = chunks_[step.chunk];
      if (step.kind == Step::Kind::recv_copy) {
        chunk.owner = false;
        final[step.chunk] = true;
      } else if (step.kind == Step::Kind::recv_reduce) {
        slot_bytes_ = std::max(slot_bytes_, aligned(bytes_of(chunk, exact(step))));
      } else if (!final[step.chunk] && !exact(step)) {
        chunk.sent_encoded = true;
      }
    }
  }
}

size_t Allreduce::Compiler::compile() {
  for (int k = 0; k < static_cast<int>(rounds().size()); ++k) round(k);
  for (int c = 0; c < program_.schedule_.chunks && program_.schedule_.world > 1; ++c) {
    if (!chunks_[c].closed) close(c);
  }
  put_in_order();
  return encoded_bytes_ + static_cast<size_t>(slots_) * slot_bytes_;
}

bool Allreduce::Compiler::exact(const Step& step) const {
  return !lossy_ || (program_.options_.exact_inside && step.fast);
}

int64_t Allreduce::Compiler::bytes_of(const ChunkState& chunk, bool exact) const {
  return wire_bytes(exact ? Wire::fp32 : wire_, chunk.range.count());
}

int Allreduce::Compiler::take_slot() {
  if (free_slots_.empty()) return slots_++;
  int index = free_slots_.back();
  free_slots_.pop_back();
  return index;
}

void Allreduce::Compiler::refuse(const std::string& why) const {
  throw BadInput(program_.options_.what + ": the schedule " + why);
}

void Allreduce::Compiler::round(int k) {
  const Schedule& schedule = program_.schedule_;
  Exchange& exchange = exchanges_.emplace_back();
  exchange.label = {mix(program_.call_.hash, static_cast<uint64_t>(k)),
                    "allreduce of " + program_.options_.what + " (" + std::to_string(program_.count_) +
                        " floats, " + name(wire_) + ", " + name(schedule.kind) + ", round " +
                        std::to_string(k + 1) + " of " + std::to_string(rounds().size()) + ")"};
  for (const Step& step : rounds()[k]) {
    if (step.kind == Step::Kind::send && !chunks_[step.chunk].closed) close(step.chunk);
  }
  std::vector<int> finals;
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
          refuse("adds to chunk " + std::to_string(step.chunk) + " in round " + std::to_string(k) +
                 ", after its partial sum was sent");
        }
        auto& inputs = in_fp32 ? chunk.exact_inputs : chunk.encoded_inputs;
        inputs.push_back({step.peer, take_slot()});
        chunk.arrived = k;
        exchange.transfers.push_back({Transfer::Kind::receive, step.peer, slot(inputs.back().slot), bytes});
        break;
      }
      case Step::Kind::recv_copy:
        exchange.transfers.push_back(
            {Transfer::Kind::receive, step.peer, in_fp32 ? data(chunk) : wire(chunk), bytes});
        chunk.closed = true;  // from here on it is forwarded, not encoded
        chunk.arrived = k;
        (in_fp32 ? chunk.exact_form : chunk.encoded_form) = {.there = true};
        (in_fp32 ? chunk.encoded_form : chunk.exact_form) = {};
        if (!in_fp32) finals.push_back(step.chunk);
        break;
    }
  }
  for (int c : finals) decode(chunks_[c]);
}

Transfer Allreduce::Compiler::send(const Step& step, int k) {
  ChunkState& chunk = chunks_[step.chunk];
  const bool in_fp32 = exact(step);
  const Form& form = in_fp32 ? chunk.exact_form : chunk.encoded_form;
  if (!form.there) {
    refuse("sends chunk " + std::to_string(step.chunk) + " in round " + std::to_string(k) + " over a " +
           (in_fp32 ? "fast link, as FP32, after it was rounded for a slow one"
                    : "slow link, to be rounded, after it went unrounded over a fast one"));
  }
  if (form.made_by >= 0) kernels_[form.made_by].before = std::min(kernels_[form.made_by].before, k);
  return {Transfer::Kind::send, step.peer, in_fp32 ? data(chunk) : wire(chunk),
          static_cast<size_t>(bytes_of(chunk, in_fp32))};
}

template <typename K>
int Allreduce::Compiler::add(const K& kernel, const ChunkState& chunk) {
  kernels_.push_back({.operation = {.work = kernel, .after = chunk.arrived}});
  return static_cast<int>(kernels_.size()) - 1;
}

// The partial sum of chunk c is complete on this rank: its kernels turn it into what will be sent.
void Allreduce::Compiler::close(int c) {
  ChunkState& chunk = chunks_[c];
  const bool encode = lossy_ && (chunk.sent_encoded || !program_.options_.exact_inside);
  const float scale = chunk.owner ? program_.options_.scale : 1.0f;
  chunk.closed = true;
  chunk.encoded_form.there = encode;
  chunk.exact_form.there = !encode || chunk.owner;
  if (!encode && !chunk.encoded_inputs.empty()) {
    refuse("forwards chunk " + std::to_string(c) + " over fast links only, after parts came over slow ones");
  }
  if (chunk.range.count() == 0) return;
  int last = -1;
  if (!chunk.exact_inputs.empty() || (!encode && scale != 1.0f)) {
    Fp32Reduce sum;
    merge<float>(chunk.exact_inputs, chunk, sum);
    sum.acc = data(chunk);
    sum.scale = encode ? 1.0f : scale;
    last = add(sum, chunk);
    kernels_[last].feeds_next = encode;
  }
  if (encode && wire_ == Wire::bf16) {
    last = add(hop<Bf16DecodeAddEncode, uint16_t>(chunk, scale), chunk);
  } else if (encode) {
    last = add(hop<Fp8DecodeAddEncode, uint8_t>(chunk, scale), chunk);
  }
  chunk.encoded_form.made_by = chunk.exact_form.made_by = last;
}

// What all merging kernels have in common: the contributions in rank order, this rank's own place among them.
template <typename Element, typename Args>
void Allreduce::Compiler::merge(std::vector<Input>& inputs, const ChunkState& chunk, Args& args) {
  if (inputs.size() > kMaxHopInputs) {
    refuse("merges " + std::to_string(inputs.size()) + " contributions at once, at most " +
           std::to_string(kMaxHopInputs) + " are possible");
  }
  std::sort(inputs.begin(), inputs.end(), [](auto& a, auto& b) { return a.from < b.from; });
  for (const Input& input : inputs) {
    args.inputs[args.num_inputs++] = static_cast<const Element*>(slot(input.slot));
    args.own_position += input.from < rank_ ? 1 : 0;
    free_slots_.push_back(input.slot);
  }
  args.count = chunk.range.count();
  inputs.clear();
}

template <typename Hop, typename Element>
Hop Allreduce::Compiler::hop(ChunkState& chunk, float scale) {
  Hop args;
  merge<Element>(chunk.encoded_inputs, chunk, args);
  args.grad = data(chunk);
  args.residual = program_.residual_ == nullptr ? nullptr : program_.residual_ + chunk.range.begin;
  args.wire = static_cast<Element*>(wire(chunk));
  args.out = chunk.owner ? data(chunk) : nullptr;
  args.out_scale = scale;
  args.rounding = program_.options_.rounding;
  args.rounding.first_element += chunk.range.begin;
  return args;
}

void Allreduce::Compiler::decode(ChunkState& chunk) {
  const float scale = program_.options_.scale;
  const int64_t count = chunk.range.count();
  const int by =
      wire_ == Wire::bf16
          ? add(Bf16Decode{static_cast<const uint16_t*>(wire(chunk)), data(chunk), scale, count}, chunk)
          : add(Fp8Decode{static_cast<const uint8_t*>(wire(chunk)), data(chunk), scale, count}, chunk);
  chunk.exact_form = {.there = true, .made_by = by};
}

// Kernels are written down in an order in which each comes behind what it builds on; here those that can wait
// are put off. Slots are why every kernel that closes something for exchange k must come before it, even
// where nothing else says so: the exchange may receive into a slot that the kernel reads.
void Allreduce::Compiler::put_in_order() {
  auto& operations = program_.operations_;
  operations.clear();
  for (size_t i = kernels_.size(); i-- > 0;) {
    if (kernels_[i].feeds_next) kernels_[i].before = kernels_[i + 1].before;
  }
  std::vector<const Kernel*> pending;
  for (const Kernel& kernel : kernels_) pending.push_back(&kernel);
  std::vector<int> last_for(exchanges_.size(), -1);  // where the last kernel that exchange k needs was put
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
    // While this exchange is under way, there is time for what does not need it.
    emit([&](const Kernel& kernel) { return kernel.before == k + 1 && kernel.operation.after < k; });
    emit([&](const Kernel& kernel) { return kernel.before > k + 1 && kernel.operation.after < k; });
  }
  emit([](const Kernel&) { return true; });
}

}  // namespace gradwire
