#include "collectives/executor.h"

#include <algorithm>

#include "kernels/error.h"

namespace gradwire {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

// Chunks begin where a wire format's blocks do.
int64_t granularity(Wire wire) {
  return wire == Wire::fp8 ? kFp8Block : 8;
}

}  // namespace

int64_t wire_bytes(Wire wire, int64_t count) {
  switch (wire) {
    case Wire::fp32:
      return 4 * count;
    case Wire::bf16:
      return 2 * count;
    case Wire::fp8:
      return fp8_wire_bytes(count);
  }
  throw Error("wire_bytes: unknown wire");
}

Allreduce::Allreduce(Transport& transport, const Schedule& schedule, float* data, float* residual,
                     int64_t count, Options options)
    : transport_(transport),
      schedule_(schedule),
      data_(data),
      residual_(residual),
      count_(count),
      options_(std::move(options)) {
  if (schedule.world != transport.world()) {
    throw BadInput(options_.what + ": a schedule for " + std::to_string(schedule.world) +
                   " ranks on a transport of " + std::to_string(transport.world()));
  }
  workspace_bytes_ = compile(nullptr);
}

void Allreduce::bind(void* workspace) {
  workspace_ = workspace;
  compile(static_cast<std::byte*>(workspace));
  bound_ = true;
}

void Allreduce::rebind(float* data) {
  data_ = data;
  if (bound_) compile(static_cast<std::byte*>(workspace_));
}

// Walks one rank's part of a schedule and writes down the operations. Runs twice: without a workspace, to
// learn how much is needed, and with it.
class Allreduce::Compiler {
 public:
  Compiler(Allreduce& program, std::byte* base)
      : program_(program),
        wire_(program.options_.wire),
        lossy_(wire_ != Wire::fp32),
        rank_(program.transport_.rank()),
        base_(reinterpret_cast<uintptr_t>(base)),
        chunks_(program.schedule_.chunks) {
    // Workspace: every chunk as it goes over the wire (lossy wires only), then slots for contributions.
    for (int c = 0; c < program_.schedule_.chunks; ++c) {
      ChunkState& chunk = chunks_[c];
      chunk.range = chunk_range(program_.count_, program_.schedule_.chunks, c, granularity(wire_));
      size_t bytes = aligned(wire_bytes(wire_, chunk.range.count()));
      slot_bytes_ = std::max(slot_bytes_, bytes);
      chunk.encoded = encoded_bytes_;
      if (lossy_) encoded_bytes_ += bytes;
    }
    for (const Round& round : rounds()) {
      for (const Step& step : round) {
        if (step.kind == Step::Kind::recv_copy) chunks_[step.chunk].owner = false;
      }
    }
  }

  // Returns the workspace's size in bytes.
  size_t compile() {
    program_.operations_.clear();
    for (size_t k = 0; k < rounds().size(); ++k) round(k);
    for (int c = 0; c < program_.schedule_.chunks && program_.schedule_.world > 1; ++c) {
      if (!chunks_[c].closed) close(c);
    }
    return encoded_bytes_ + static_cast<size_t>(slots_) * slot_bytes_;
  }

 private:
  struct Input {
    int32_t from;
    int slot;
  };
  // What this rank holds of one chunk.
  struct ChunkState {
    ChunkRange range;
    size_t encoded = 0;         // where its wire bytes lie in the workspace
    std::vector<Input> inputs;  // received contributions that wait for the hop
    bool closed = false;        // the hop was emitted, or the final value has come
    bool owner = true;          // no recv_copy will come: what this rank closes is final
  };

  static size_t aligned(int64_t bytes) { return (static_cast<size_t>(bytes) + 255) / 256 * 256; }
  const std::vector<Round>& rounds() const { return program_.schedule_.rounds[rank_]; }
  float* data(const ChunkState& chunk) const { return program_.data_ + chunk.range.begin; }
  // Addresses are computed as integers, because in the measuring pass there is no base to add to.
  void* address(size_t offset) const { return reinterpret_cast<void*>(base_ + offset); }
  void* wire(const ChunkState& chunk) const { return lossy_ ? address(chunk.encoded) : data(chunk); }
  void* slot(int index) const { return address(encoded_bytes_ + static_cast<size_t>(index) * slot_bytes_); }

  int take_slot() {
    if (free_slots_.empty()) return slots_++;
    int index = free_slots_.back();
    free_slots_.pop_back();
    return index;
  }

  void round(size_t k) {
    const auto& schedule = program_.schedule_;
    const std::string& what = program_.options_.what;
    Exchange exchange;
    exchange.label = {mix(program_.tag(), k),
                      "allreduce of " + what + " (" + std::to_string(program_.count_) + " floats, " +
                          name(wire_) + ", " + name(schedule.kind) + ", round " + std::to_string(k + 1) +
                          " of " + std::to_string(rounds().size()) + ")"};
    for (const Step& step : rounds()[k]) {
      if (step.kind == Step::Kind::send && !chunks_[step.chunk].closed) close(step.chunk);
    }
    std::vector<int> arrived;
    for (const Step& step : rounds()[k]) {
      ChunkState& chunk = chunks_[step.chunk];
      if (chunk.range.count() == 0) continue;
      auto bytes = static_cast<size_t>(wire_bytes(wire_, chunk.range.count()));
      switch (step.kind) {
        case Step::Kind::send:
          exchange.transfers.push_back({Transfer::Kind::send, step.peer, wire(chunk), bytes});
          break;
        case Step::Kind::recv_reduce:
          if (chunk.closed) {
            throw BadInput(what + ": the schedule adds to chunk " + std::to_string(step.chunk) +
                           " in round " + std::to_string(k) + ", after its partial sum was sent");
          }
          chunk.inputs.push_back({step.peer, take_slot()});
          exchange.transfers.push_back(
              {Transfer::Kind::receive, step.peer, slot(chunk.inputs.back().slot), bytes});
          break;
        case Step::Kind::recv_copy:
          exchange.transfers.push_back({Transfer::Kind::receive, step.peer, wire(chunk), bytes});
          chunk.closed = true;  // from here on it is forwarded, not encoded
          arrived.push_back(step.chunk);
          break;
      }
    }
    if (!exchange.transfers.empty()) program_.operations_.emplace_back(std::move(exchange));
    for (int c : arrived) decode(chunks_[c]);
  }

  // The partial sum of chunk c is complete on this rank: one kernel turns it into what will be sent.
  void close(int c) {
    ChunkState& chunk = chunks_[c];
    chunk.closed = true;
    std::sort(chunk.inputs.begin(), chunk.inputs.end(), [](auto& a, auto& b) { return a.from < b.from; });
    if (chunk.inputs.size() > kMaxHopInputs) {
      throw BadInput(program_.options_.what + ": the schedule merges " + std::to_string(chunk.inputs.size()) +
                     " contributions at once, at most " + std::to_string(kMaxHopInputs) + " are possible");
    }
    const float scale = chunk.owner ? program_.options_.scale : 1.0f;
    if (chunk.range.count() > 0) {
      if (wire_ == Wire::bf16) {
        program_.operations_.emplace_back(hop<Bf16DecodeAddEncode, uint16_t>(chunk, scale));
      } else if (wire_ == Wire::fp8) {
        program_.operations_.emplace_back(hop<Fp8DecodeAddEncode, uint8_t>(chunk, scale));
      } else if (!chunk.inputs.empty() || scale != 1.0f) {
        Fp32Reduce reduce;
        merge<float>(chunk, reduce);
        reduce.acc = data(chunk);
        reduce.scale = scale;
        program_.operations_.emplace_back(reduce);
      }
    }
    for (const Input& input : chunk.inputs) free_slots_.push_back(input.slot);
    chunk.inputs.clear();
  }

  // What all merging kernels have in common: the contributions in rank order, this rank's own place among
  // them.
  template <typename Element, typename Args>
  void merge(const ChunkState& chunk, Args& args) const {
    for (const Input& input : chunk.inputs) {
      args.inputs[args.num_inputs++] = static_cast<const Element*>(slot(input.slot));
      args.own_position += input.from < rank_ ? 1 : 0;
    }
    args.count = chunk.range.count();
  }

  template <typename Hop, typename Element>
  Hop hop(const ChunkState& chunk, float scale) const {
    Hop args;
    merge<Element>(chunk, args);
    args.grad = data(chunk);
    args.residual = program_.residual_ == nullptr ? nullptr : program_.residual_ + chunk.range.begin;
    args.wire = static_cast<Element*>(wire(chunk));
    args.out = chunk.owner ? data(chunk) : nullptr;
    args.out_scale = scale;
    args.rounding = program_.options_.rounding;
    args.rounding.first_element += chunk.range.begin;
    return args;
  }

  void decode(const ChunkState& chunk) {
    const float scale = program_.options_.scale;
    if (wire_ == Wire::bf16) {
      program_.operations_.emplace_back(
          Bf16Decode{static_cast<const uint16_t*>(wire(chunk)), data(chunk), scale, chunk.range.count()});
    } else if (wire_ == Wire::fp8) {
      program_.operations_.emplace_back(
          Fp8Decode{static_cast<const uint8_t*>(wire(chunk)), data(chunk), scale, chunk.range.count()});
    }
  }

  Allreduce& program_;
  const Wire wire_;
  const bool lossy_;
  const int rank_;
  const uintptr_t base_;
  std::vector<ChunkState> chunks_;
  size_t encoded_bytes_ = 0, slot_bytes_ = 0;
  std::vector<int> free_slots_;  // a slot is free again once its hop is emitted
  int slots_ = 0;
};

size_t Allreduce::compile(std::byte* base) {
  return Compiler(*this, base).compile();
}

// Ranks that run different programs notice by it.
uint64_t Allreduce::tag() const {
  uint64_t tag = mix(mix(0, static_cast<uint64_t>(count_)),
                     static_cast<uint64_t>(options_.wire) * 16 + static_cast<uint64_t>(schedule_.kind));
  for (char c : options_.what) tag = mix(tag, static_cast<uint64_t>(c));
  return tag;
}

void Allreduce::run(const Stream& stream) const {
  if (!bound_ && workspace_bytes_ > 0) throw Error(options_.what + ": Allreduce::run before bind");
  for (const Operation& operation : operations_) {
    if (const auto* exchange = std::get_if<Exchange>(&operation)) {
      transport_.exchange(stream, exchange->transfers, exchange->label);
    } else if (const auto* hop = std::get_if<Bf16DecodeAddEncode>(&operation)) {
      bf16_decode_add_encode(stream, *hop);
    } else if (const auto* decode = std::get_if<Bf16Decode>(&operation)) {
      bf16_decode(stream, *decode);
    } else if (const auto* fp8_hop = std::get_if<Fp8DecodeAddEncode>(&operation)) {
      fp8_decode_add_encode(stream, *fp8_hop);
    } else if (const auto* decode8 = std::get_if<Fp8Decode>(&operation)) {
      fp8_decode(stream, *decode8);
    } else {
      fp32_reduce(stream, std::get<Fp32Reduce>(operation));
    }
  }
}

}  // namespace gradwire
