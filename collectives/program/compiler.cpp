// Compiles a program into operations for its addresses.
//
// The compiler walks one rank's rounds. For each round it emits the kernels that must run before the
// exchange, the exchange, and the kernels that depend on the received data. put_in_order() then defers the
// kernels that can wait.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "collectives/program/program.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

size_t aligned(int64_t bytes) {
  return (static_cast<size_t>(bytes) + 255) / 256 * 256;
}

}  // namespace

class Program::Compiler {
 public:
  // Compiles for a workspace at this address.
  Compiler(const Program& program, uintptr_t workspace);
  // Returns the operations, and sets the size of the workspace.
  std::vector<Operation> compile(size_t* workspace_bytes);

 private:
  // A contribution to a chunk's sum, in a slot of the workspace.
  struct Input {
    int32_t from;
    float scale;  // scale of a single part; 1 for a sum of parts
    int slot;
  };
  // A chunk's value, encoded or exact, that can be sent.
  struct Source {
    const void* data = nullptr;
    bool available = false;
    int made_by = -1;  // index of the kernel; -1: the value was received or is in the caller's buffer
  };
  // The state of one chunk on this rank.
  struct Chunk {
    ElementRange range;
    bool owned = false;
    float* exact = nullptr;        // place of the FP32 sum and of the final value
    void* encoded = nullptr;       // place of the encoded chunk
    const float* own = nullptr;    // this rank's part; null in an all_gather if the rank has none
    float* residual = nullptr;     // residual of this rank's encode
    bool closed = false;           // the partial sum is complete and emitted, or the final value is received
    bool is_sent_encoded = false;  // this rank sends its sum of the chunk encoded, in some round
    std::vector<Input> encoded_inputs, exact_inputs;
    Source encoded_source, exact_source;
    int arrived = -1;  // the last exchange that received data of the chunk
  };

  // Choose the addresses of chunks and inputs.
  void place_chunks();
  void* reserve(int64_t bytes);
  void* place_of(const Input& input) const;

  // Properties of steps.
  const std::vector<Round>& rounds() const { return program_.schedule_.rounds[rank_]; }
  bool is_exact(const Step& step) const;
  int64_t bytes_of(const Chunk& chunk, bool exact) const;
  bool sends_a_part(int rank, int chunk, int round);

  // Process the rounds in order.
  void look_ahead();
  void compile_round(int round);
  Transfer send(const Step& step, int round);
  Transfer receive_part(const Step& step, int round);
  Transfer receive_final(const Step& step, int round);

  // Emit kernels.
  void close(int chunk);
  int add_exact_inputs(Chunk& chunk, float scale, bool feeds_encode);
  int add_encoded_inputs(Chunk& chunk, const float* own, bool own_is_sum, float scale);
  template <typename Args>
  void merge(std::vector<Input>& inputs, const Chunk& chunk, Args& args);
  template <typename Args>
  int emit(const Args& args, const Chunk& chunk);
  std::vector<Operation> put_in_order();

  [[noreturn]] void refuse(const std::string& why) const;

  const Program& program_;
  const int rank_;
  const Wire wire_;
  float part_scale_ = 1.0f;  // scale of parts while adding; 1 if the schedule adds nothing
  float result_scale_ = 1.0f;
  // The workspace: encoded chunks of a lossy format, then slots for contributions.
  const uintptr_t workspace_;
  size_t reserved_ = 0, slot_bytes_ = 0;
  std::vector<int> free_slots_;  // a slot is free again once the kernel that reads it is emitted
  int slots_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<Exchange> exchanges_;  // one per round, possibly empty
  std::vector<Kernel> kernels_;      // each kernel after its dependencies
  // [rank][chunk]: the round in which a rank first adds to a chunk; empty until requested.
  std::vector<std::vector<int>> first_sums_;
};

Program::Compiler::Compiler(const Program& program, uintptr_t workspace)
    : program_(program),
      rank_(program.transport_.rank()),
      wire_(program.options_.wire),
      workspace_(workspace),
      chunks_(program.schedule_.chunks),
      first_sums_(static_cast<size_t>(program.schedule_.world)) {
  const Schedule& schedule = program.schedule_;
  const bool adds =
      schedule.collective == Collective::allreduce || schedule.collective == Collective::reduce_scatter;
  if (adds && schedule.world > 1) part_scale_ = part_scale_for(program.options_.scale);
  result_scale_ = program.options_.scale / part_scale_;
  for (int c = 0; c < schedule.chunks; ++c) {
    chunks_[c].range = program.ranges_[c];
    chunks_[c].owned = schedule.owner[c] == rank_;
  }
  look_ahead();
  place_chunks();
}

std::vector<Program::Operation> Program::Compiler::compile(size_t* workspace_bytes) {
  for (int k = 0; k < static_cast<int>(rounds().size()); ++k) compile_round(k);
  for (int c = 0; c < static_cast<int>(chunks_.size()); ++c) {
    if (!chunks_[c].closed && chunks_[c].owned) close(c);
  }
  *workspace_bytes = reserved_ + static_cast<size_t>(slots_) * slot_bytes_;
  return put_in_order();
}

// Determines which of this rank's sums are sent over a lossy wire, and how large a slot must be.
void Program::Compiler::look_ahead() {
  std::vector<bool> final(chunks_.size());
  for (const Round& round : rounds()) {
    for (const Step& step : round) {
      Chunk& chunk = chunks_[step.chunk];
      if (step.kind == Step::Kind::recv_copy) {
        final[step.chunk] = true;
      } else if (step.kind == Step::Kind::recv_reduce) {
        slot_bytes_ = std::max(slot_bytes_, aligned(bytes_of(chunk, is_exact(step))));
      } else if (!final[step.chunk] && !is_exact(step)) {
        chunk.is_sent_encoded = true;
      }
    }
  }
}

// Places each chunk's part and result in the program's buffers where the collective allows it, otherwise in
// the workspace.
void Program::Compiler::place_chunks() {
  float *const out = program_.out_, *const residual = program_.buffers_.residual;
  int64_t shard_offset = 0;  // offset of the next owned chunk in this rank's shard
  for (Chunk& chunk : chunks_) {
    if (!wire_->exact) chunk.encoded = reserve(bytes_of(chunk, false));
    const int64_t begin = chunk.range.begin;
    switch (program_.schedule_.collective) {
      case Collective::allreduce:
        chunk.own = program_.in_ + begin;
        chunk.exact = out + begin;
        if (residual != nullptr) chunk.residual = residual + begin;
        break;
      case Collective::reduce_scatter:
        chunk.own = program_.in_ + begin;
        if (residual != nullptr) chunk.residual = residual + begin;
        chunk.exact =
            chunk.owned ? out + shard_offset : static_cast<float*>(reserve(4 * chunk.range.count()));
        break;
      case Collective::all_gather:
      case Collective::broadcast:
        chunk.own = chunk.owned ? program_.in_ + shard_offset : nullptr;
        chunk.exact = out + begin;
        if (residual != nullptr && chunk.owned) chunk.residual = residual + shard_offset;
        break;
    }
    if (chunk.owned) shard_offset += chunk.range.count();
  }
}

void* Program::Compiler::reserve(int64_t bytes) {
  void* place = reinterpret_cast<void*>(workspace_ + reserved_);
  reserved_ += aligned(bytes);
  return place;
}

void* Program::Compiler::place_of(const Input& input) const {
  return reinterpret_cast<void*>(workspace_ + reserved_ + static_cast<size_t>(input.slot) * slot_bytes_);
}

bool Program::Compiler::is_exact(const Step& step) const {
  return wire_->exact || (program_.options_.fp32_intra_node && step.intra_node);
}

int64_t Program::Compiler::bytes_of(const Chunk& chunk, bool exact) const {
  return (exact ? kFp32 : wire_)->bytes(chunk.range.count());
}

// Returns whether `rank` sends only its own part of the chunk in this round, not a sum of parts.
bool Program::Compiler::sends_a_part(int rank, int chunk, int round) {
  std::vector<int>& first = first_sums_[static_cast<size_t>(rank)];
  if (first.empty()) {
    first.resize(chunks_.size(), INT_MAX);
    const auto& theirs = program_.schedule_.rounds[static_cast<size_t>(rank)];
    for (int k = static_cast<int>(theirs.size()); k-- > 0;) {
      for (const Step& step : theirs[static_cast<size_t>(k)]) {
        if (step.kind == Step::Kind::recv_reduce) first[static_cast<size_t>(step.chunk)] = k;
      }
    }
  }
  return first[static_cast<size_t>(chunk)] >= round;
}

void Program::Compiler::compile_round(int round) {
  const Round& steps = rounds()[round];
  Exchange& exchange = exchanges_.emplace_back();
  exchange.label = {mix(program_.call_.hash, static_cast<uint64_t>(round)),
                    fmt::format("{}, round {} of {}", program_.call_.what, round + 1, rounds().size())};
  for (const Step& step : steps) {
    const Chunk& chunk = chunks_[step.chunk];
    if (step.kind == Step::Kind::send && !chunk.closed && chunk.range.count() > 0) close(step.chunk);
  }
  for (const Step& step : steps) {
    if (chunks_[step.chunk].range.count() == 0) continue;
    exchange.transfers.push_back(step.kind == Step::Kind::send          ? send(step, round)
                                 : step.kind == Step::Kind::recv_reduce ? receive_part(step, round)
                                                                        : receive_final(step, round));
  }
  for (const Step& step : steps) {
    Chunk& chunk = chunks_[step.chunk];
    if (step.kind != Step::Kind::recv_copy || is_exact(step) || chunk.range.count() == 0) continue;
    const int made_by = emit(
        Decode{chunk.encoded_source.data, chunk.exact, result_scale_, chunk.range.count(), chunk.residual},
        chunk);
    chunk.exact_source = {.data = chunk.exact, .available = true, .made_by = made_by};
  }
}

Transfer Program::Compiler::send(const Step& step, int round) {
  const Chunk& chunk = chunks_[step.chunk];
  const bool exact = is_exact(step);
  const Source& source = exact ? chunk.exact_source : chunk.encoded_source;
  if (!source.available) {
    refuse(fmt::format("sends chunk {} in round {} {}", step.chunk, round,
                       exact ? "inside its node, as FP32, after it was rounded for another node"
                             : "to another node, to be rounded, after it was sent unrounded inside its own"));
  }
  if (source.made_by >= 0) {
    int& before = kernels_[source.made_by].before;
    if (before < 0 || round < before) before = round;
  }
  return {Transfer::Kind::send, step.peer, const_cast<void*>(source.data),  // a send only reads
          static_cast<size_t>(bytes_of(chunk, exact))};
}

Transfer Program::Compiler::receive_part(const Step& step, int round) {
  Chunk& chunk = chunks_[step.chunk];
  if (chunk.closed) {
    refuse(fmt::format("adds to chunk {} in round {}, after its partial sum was sent", step.chunk, round));
  }
  const bool exact = is_exact(step);
  const bool part = part_scale_ != 1.0f && sends_a_part(step.peer, step.chunk, round);
  Input input{.from = step.peer, .scale = part ? part_scale_ : 1.0f, .slot = 0};
  if (free_slots_.empty()) {
    input.slot = slots_++;
  } else {
    input.slot = free_slots_.back();
    free_slots_.pop_back();
  }
  (exact ? chunk.exact_inputs : chunk.encoded_inputs).push_back(input);
  chunk.arrived = round;
  return {Transfer::Kind::receive, step.peer, place_of(input), static_cast<size_t>(bytes_of(chunk, exact))};
}

Transfer Program::Compiler::receive_final(const Step& step, int round) {
  Chunk& chunk = chunks_[step.chunk];
  const bool exact = is_exact(step);
  void* const to = exact ? chunk.exact : chunk.encoded;
  chunk.closed = true;  // from now on the received value is forwarded, not encoded
  chunk.arrived = round;
  (exact ? chunk.exact_source : chunk.encoded_source) = {.data = to, .available = true};
  (exact ? chunk.encoded_source : chunk.exact_source) = {};
  return {Transfer::Kind::receive, step.peer, to, static_cast<size_t>(bytes_of(chunk, exact))};
}

// Emits the kernels that encode a chunk's partial sum for sending or, at an owner that sends nothing, produce
// the result. Called when the partial sum is complete on this rank.
void Program::Compiler::close(int c) {
  Chunk& chunk = chunks_[c];
  const Collective collective = program_.schedule_.collective;
  if ((collective == Collective::all_gather || collective == Collective::broadcast) && !chunk.owned) {
    refuse(fmt::format("sends chunk {} before it was received", c));
  }
  const bool encodes = chunk.is_sent_encoded;
  if (!encodes && !chunk.owned && !chunk.encoded_inputs.empty()) {
    refuse(fmt::format("forwards chunk {} only inside its node, after parts came from other nodes", c));
  }
  chunk.closed = true;
  const float scale = chunk.owned ? result_scale_ : 1.0f;
  const bool ends_exact = !encodes && chunk.encoded_inputs.empty();
  const bool adds_exact = !chunk.exact_inputs.empty();
  const bool changes_exact = ends_exact && chunk.owned && (scale != 1.0f || chunk.own != chunk.exact);
  const float* sum = chunk.own;
  int last = -1;
  if (adds_exact || changes_exact) {
    sum = chunk.exact;
    last = add_exact_inputs(chunk, ends_exact ? scale : 1.0f, !ends_exact);
  }
  if (!ends_exact) last = add_encoded_inputs(chunk, sum, adds_exact, scale);
  chunk.encoded_source = {.data = chunk.encoded, .available = encodes, .made_by = last};
  chunk.exact_source = {
      .data = chunk.owned ? chunk.exact : sum, .available = !encodes || chunk.owned, .made_by = last};
}

// Emits the kernel for exact = scale (own part + contributions in FP32). Returns the kernel's index.
int Program::Compiler::add_exact_inputs(Chunk& chunk, float scale, bool feeds_encode) {
  Reduce args;
  merge(chunk.exact_inputs, chunk, args);
  args.own = chunk.own;
  args.own_scale = part_scale_;
  args.out = chunk.exact;
  args.scale = scale;
  const int kernel = emit(args, chunk);
  if (kernel >= 0) kernels_[kernel].feeds_next = feeds_encode;
  return kernel;
}

// Emits the kernel for encoded = own + encoded contributions + residual, and for the owner's result.
// `own_is_sum`: `own` already includes contributions.
int Program::Compiler::add_encoded_inputs(Chunk& chunk, const float* own, bool own_is_sum, float scale) {
  ReduceEncode args;
  merge(chunk.encoded_inputs, chunk, args);
  args.own = own;
  if (own_is_sum) {
    args.residual_scale = part_scale_;
  } else if (args.num_inputs > 0) {  // without contributions the part is sent unchanged
    args.own_scale = part_scale_;
  }
  args.residual = chunk.residual;
  args.wire = chunk.is_sent_encoded ? chunk.encoded : nullptr;
  args.out = chunk.owned ? chunk.exact : nullptr;
  args.out_scale = scale;
  args.rounding = program_.options_.rounding;
  args.rounding.first_element += chunk.range.begin;
  return emit(args, chunk);
}

// Fills the arguments common to all merging kernels: contributions in rank order, and the position of this
// rank's part among the contributions. Frees the slots.
template <typename Args>
void Program::Compiler::merge(std::vector<Input>& inputs, const Chunk& chunk, Args& args) {
  if (inputs.size() > kMaxInputs) {
    refuse(
        fmt::format("merges {} contributions at once, at most {} are possible", inputs.size(), kMaxInputs));
  }
  std::ranges::sort(inputs, {}, &Input::from);
  for (const Input& input : inputs) {
    args.input_scales.of[args.num_inputs] = input.scale;
    args.inputs[args.num_inputs++] =
        static_cast<std::remove_reference_t<decltype(args.inputs[0])>>(place_of(input));
    args.own_position += input.from < rank_ ? 1 : 0;
    free_slots_.push_back(input.slot);
  }
  args.count = chunk.range.count();
  inputs.clear();
}

// Appends a kernel. Returns the kernel's index; -1 for an empty chunk, which needs no kernel.
template <typename Args>
int Program::Compiler::emit(const Args& args, const Chunk& chunk) {
  if (chunk.range.count() == 0) return -1;
  kernels_.push_back({.work = args, .after = chunk.arrived});
  return static_cast<int>(kernels_.size()) - 1;
}

void Program::Compiler::refuse(const std::string& why) const {
  throw BadInput("{}: the schedule {}", program_.options_.what, why);
}

// Returns the operations in an order for streams that execute operations one after another. Kernels that the
// next exchange depends on precede kernels that can wait. A kernel that depends on exchange k follows kernels
// that do not depend on exchange k, so that the kernel runs while exchange k + 1 is in flight. Every kernel
// that closes a chunk for exchange k precedes exchange k even without another dependency, because the
// exchange may receive into a slot that the kernel reads.
std::vector<Program::Operation> Program::Compiler::put_in_order() {
  for (size_t i = kernels_.size(); i-- > 0;) {
    if (kernels_[i].feeds_next) kernels_[i].before = kernels_[i + 1].before;
  }
  // An exchange must not begin before the previous one has ended if one writes memory that the other uses.
  const auto collide = [](const Transfer& a, const Transfer& b) {
    if (a.kind == Transfer::Kind::send && b.kind == Transfer::Kind::send) return false;
    const auto begin = [](const Transfer& t) { return reinterpret_cast<uintptr_t>(t.data); };
    return begin(a) < begin(b) + b.bytes && begin(b) < begin(a) + a.bytes;
  };
  for (size_t k = 1; k < exchanges_.size(); ++k) {
    exchanges_[k].early = std::ranges::none_of(exchanges_[k - 1].transfers, [&](const Transfer& x) {
      return std::ranges::any_of(exchanges_[k].transfers, [&](const Transfer& y) { return collide(x, y); });
    });
  }
  std::vector<Operation> operations;
  // [exchange]: the position of the last kernel that the exchange depends on; -1: none.
  std::vector<int> last_for(exchanges_.size(), -1);
  // Moves the chosen kernels to the operations.
  const auto move_kernels = [&](auto chosen) {
    std::erase_if(kernels_, [&](const Kernel& kernel) {
      if (!chosen(kernel)) return false;
      if (kernel.before >= 0) last_for[kernel.before] = static_cast<int>(operations.size());
      operations.emplace_back(kernel);
      return true;
    });
  };
  for (int k = 0; k < static_cast<int>(exchanges_.size()); ++k) {
    const auto can_run_during = [k](const Kernel& e) { return e.after < k; };
    move_kernels([&](const Kernel& e) { return e.before == k; });
    if (last_for[k] >= 0) std::get<Kernel>(operations[last_for[k]]).needed = true;
    operations.emplace_back(std::move(exchanges_[k]));
    // While this exchange is in flight, run kernels that do not depend on it.
    move_kernels([&](const Kernel& e) { return e.before == k + 1 && can_run_during(e); });
    move_kernels([&](const Kernel& e) { return e.before != k + 1 && can_run_during(e); });
  }
  move_kernels([](const Kernel&) { return true; });
  return operations;
}

size_t Program::compile(uintptr_t workspace) {
  size_t bytes = 0;
  operations_ = Compiler(*this, workspace).compile(&bytes);
  return bytes;
}

}  // namespace gradwire
