#include "collectives/executor.h"

#include <algorithm>

#include "kernels/error.h"

namespace gradwire {
namespace {

int wire_bytes(Wire wire) {
  return wire == Wire::bf16 ? 2 : 4;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

// What one rank holds of one chunk while its schedule is walked.
struct ChunkState {
  struct Input {
    int32_t from;
    int slot;
  };
  std::vector<Input> inputs;  // received contributions that wait for the hop
  bool closed = false;        // the hop was emitted
  bool owner = true;          // no recv_copy will come: what this rank closes is final
};

}  // namespace

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

size_t Allreduce::compile(std::byte* base) {
  operations_.clear();
  const int rank = transport_.rank();
  const bool lossy = options_.wire != Wire::fp32;
  const size_t element = wire_bytes(options_.wire);
  const auto& rounds = schedule_.rounds[rank];
  auto range = [&](int chunk) { return chunk_range(count_, schedule_.chunks, chunk); };

  std::vector<ChunkState> chunks(schedule_.chunks);
  int64_t longest = 0;
  for (int c = 0; c < schedule_.chunks; ++c) longest = std::max(longest, range(c).count());
  for (const Round& round : rounds) {
    for (const Step& step : round) {
      if (step.kind == Step::Kind::recv_copy) chunks[step.chunk].owner = false;
    }
  }

  // Workspace: the encoded buffer (lossy wires only), then slots for contributions, reused as soon as
  // consumed.
  const size_t align = 256;
  auto aligned = [&](size_t bytes) { return (bytes + align - 1) / align * align; };
  const size_t encoded_bytes = lossy ? aligned(static_cast<size_t>(count_) * element) : 0;
  const size_t slot_bytes = aligned(static_cast<size_t>(longest) * element);
  std::vector<int> free_slots;
  int slots = 0;
  // Computed as integers: in the first pass, which only measures, there is no base to add to.
  auto address = [&](size_t offset) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(base) + offset);
  };
  auto slot_address = [&](int slot) {
    return address(encoded_bytes + static_cast<size_t>(slot) * slot_bytes);
  };
  auto wire_address = [&](int c) -> void* {
    return lossy ? address(static_cast<size_t>(range(c).begin) * element)
                 : static_cast<void*>(data_ + range(c).begin);
  };

  auto close = [&](int c) {
    ChunkState& state = chunks[c];
    state.closed = true;
    ChunkRange r = range(c);
    std::sort(state.inputs.begin(), state.inputs.end(), [](auto& a, auto& b) { return a.from < b.from; });
    if (state.inputs.size() > kMaxHopInputs) {
      throw BadInput(options_.what + ": the schedule merges " + std::to_string(state.inputs.size()) +
                     " contributions at once, at most " + std::to_string(kMaxHopInputs) + " are possible");
    }
    int own = 0;
    while (own < static_cast<int>(state.inputs.size()) && state.inputs[own].from < rank) ++own;
    const float scale = state.owner ? options_.scale : 1.0f;
    if (r.count() > 0 && lossy) {
      Bf16DecodeAddEncode hop;
      for (size_t i = 0; i < state.inputs.size(); ++i) {
        hop.inputs[i] = static_cast<const uint16_t*>(slot_address(state.inputs[i].slot));
      }
      hop.num_inputs = static_cast<int>(state.inputs.size());
      hop.own_position = own;
      hop.grad = data_ + r.begin;
      hop.residual = residual_ == nullptr ? nullptr : residual_ + r.begin;
      hop.wire = static_cast<uint16_t*>(wire_address(c));
      hop.out = state.owner ? data_ + r.begin : nullptr;
      hop.out_scale = scale;
      hop.count = r.count();
      hop.rounding = options_.rounding;
      hop.rounding.first_element += r.begin;
      operations_.emplace_back(hop);
    } else if (r.count() > 0 && (!state.inputs.empty() || scale != 1.0f)) {
      Fp32Reduce reduce;
      for (size_t i = 0; i < state.inputs.size(); ++i) {
        reduce.inputs[i] = static_cast<const float*>(slot_address(state.inputs[i].slot));
      }
      reduce.num_inputs = static_cast<int>(state.inputs.size());
      reduce.own_position = own;
      reduce.acc = data_ + r.begin;
      reduce.scale = scale;
      reduce.count = r.count();
      operations_.emplace_back(reduce);
    }
    for (const auto& input : state.inputs) free_slots.push_back(input.slot);
    state.inputs.clear();
  };

  uint64_t tag = mix(mix(0, static_cast<uint64_t>(count_)),
                     static_cast<uint64_t>(options_.wire) * 16 + static_cast<uint64_t>(schedule_.kind));
  for (char c : options_.what) tag = mix(tag, static_cast<uint64_t>(c));
  const std::string prefix = "allreduce of " + options_.what + " (" + std::to_string(count_) + " floats, " +
                             name(options_.wire) + ", " + name(schedule_.kind) + ", round ";
  for (size_t k = 0; k < rounds.size(); ++k) {
    Exchange exchange;
    exchange.label = {mix(tag, k),
                      prefix + std::to_string(k + 1) + " of " + std::to_string(rounds.size()) + ")"};
    for (const Step& step : rounds[k]) {
      if (step.kind == Step::Kind::send && !chunks[step.chunk].closed) close(step.chunk);
    }
    std::vector<Bf16Decode> decodes;
    for (const Step& step : rounds[k]) {
      ChunkRange r = range(step.chunk);
      if (r.count() == 0) continue;
      size_t bytes = static_cast<size_t>(r.count()) * element;
      switch (step.kind) {
        case Step::Kind::send:
          exchange.transfers.push_back({Transfer::Kind::send, step.peer, wire_address(step.chunk), bytes});
          break;
        case Step::Kind::recv_reduce: {
          if (chunks[step.chunk].closed) {
            throw BadInput(options_.what + ": the schedule adds to chunk " + std::to_string(step.chunk) +
                           " in round " + std::to_string(k) + ", after its partial sum was sent");
          }
          int slot = slots;
          if (free_slots.empty()) {
            ++slots;
          } else {
            slot = free_slots.back();
            free_slots.pop_back();
          }
          chunks[step.chunk].inputs.push_back({step.peer, slot});
          exchange.transfers.push_back({Transfer::Kind::receive, step.peer, slot_address(slot), bytes});
          break;
        }
        case Step::Kind::recv_copy:
          exchange.transfers.push_back({Transfer::Kind::receive, step.peer, wire_address(step.chunk), bytes});
          chunks[step.chunk].closed = true;  // from here on it is forwarded, not encoded
          if (lossy) {
            decodes.push_back({static_cast<const uint16_t*>(wire_address(step.chunk)), data_ + r.begin,
                               options_.scale, r.count()});
          }
          break;
      }
    }
    if (!exchange.transfers.empty()) operations_.emplace_back(std::move(exchange));
    for (const Bf16Decode& decode : decodes) operations_.emplace_back(decode);
  }
  for (int c = 0; c < schedule_.chunks; ++c) {
    if (!chunks[c].closed && schedule_.world > 1) close(c);
  }
  return encoded_bytes + static_cast<size_t>(slots) * slot_bytes;
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
    } else {
      fp32_reduce(stream, std::get<Fp32Reduce>(operation));
    }
  }
}

}  // namespace gradwire
