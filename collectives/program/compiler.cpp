#include "collectives/program/compiler.h"

#include <algorithm>
#include <type_traits>

#include "collectives/program/program.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

size_t aligned(int64_t bytes) {
  return (static_cast<size_t>(bytes) + 255) / 256 * 256;
}

// Returns the scale of the parts while adding; 1 if the schedule adds nothing.
float part_scale_of(const Schedule& schedule, float scale) {
  const bool adds =
      schedule.collective == Collective::allreduce || schedule.collective == Collective::reduce_scatter;
  return adds && schedule.world > 1 ? part_scale_for(scale) : 1.0f;
}

class Compiler {
 public:
  Compiler(const ProgramPlan& plan, const ProgramMemory& memory);
  CompiledProgram compile();

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
    ChunkRange range;
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
  void place_chunks(const ProgramMemory& memory);
  void place_buffers(Chunk& chunk, const ProgramMemory& memory, int64_t shard_offset);
  void* reserve(int64_t bytes);
  void* address(size_t offset) const { return reinterpret_cast<void*>(workspace_ + offset); }
  int take_slot();
  void* place_of(const Input& input) const;

  // Properties of steps.
  const std::vector<Round>& rounds() const { return plan_.schedule.rounds[plan_.rank()]; }
  bool is_exact(const Step& step) const;
  int64_t bytes_of(const Chunk& chunk, bool exact) const;

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
  void produce_final(Chunk& chunk);
  template <typename Args>
  void merge(std::vector<Input>& inputs, const Chunk& chunk, Args& args);
  template <typename Args>
  int emit(const Args& args, const Chunk& chunk);
  void must_precede(int kernel, int exchange);

  [[noreturn]] void refuse(const std::string& why) const;

  const ProgramPlan& plan_;
  const Wire wire_;
  const float part_scale_, result_scale_;  // scales of parts while adding, and of their sum
  // The workspace: encoded chunks of a lossy format, then slots for contributions.
  const uintptr_t workspace_;
  size_t reserved_ = 0, slot_bytes_ = 0;
  std::vector<int> free_slots_;  // a slot is free again once the kernel that reads it is emitted
  int slots_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<Exchange> exchanges_;  // one per round, possibly empty
  std::vector<EmittedKernel> kernels_;
  FirstSums first_sums_;
};

Compiler::Compiler(const ProgramPlan& plan, const ProgramMemory& memory)
    : plan_(plan),
      wire_(plan.options.wire),
      part_scale_(part_scale_of(plan.schedule, plan.options.scale)),
      result_scale_(plan.options.scale / part_scale_),
      workspace_(memory.workspace),
      chunks_(plan.schedule.chunks),
      first_sums_(plan.schedule) {
  for (int c = 0; c < plan.schedule.chunks; ++c) {
    chunks_[c].range = plan.ranges[c];
    chunks_[c].owned = plan.schedule.owner[c] == plan.rank();
  }
  look_ahead();
  place_chunks(memory);
}

CompiledProgram Compiler::compile() {
  for (int k = 0; k < static_cast<int>(rounds().size()); ++k) compile_round(k);
  for (int c = 0; c < plan_.schedule.chunks; ++c) {
    if (!chunks_[c].closed && chunks_[c].owned) close(c);
  }
  return {put_in_order(std::move(kernels_), std::move(exchanges_)),
          reserved_ + static_cast<size_t>(slots_) * slot_bytes_};
}

// Determines which of this rank's sums are sent over a lossy wire, and how large a slot must be.
void Compiler::look_ahead() {
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

void Compiler::place_chunks(const ProgramMemory& memory) {
  int64_t shard_offset = 0;  // offset of the next owned chunk in this rank's shard
  for (Chunk& chunk : chunks_) {
    if (!wire_->exact) chunk.encoded = reserve(bytes_of(chunk, false));
    place_buffers(chunk, memory, shard_offset);
    if (chunk.owned) shard_offset += chunk.range.count();
  }
}

// Places a chunk's part and result in the caller's buffers where the collective allows it, otherwise in the
// workspace.
void Compiler::place_buffers(Chunk& chunk, const ProgramMemory& memory, int64_t shard_offset) {
  const int64_t begin = chunk.range.begin;
  switch (plan_.schedule.collective) {
    case Collective::allreduce:
      chunk.own = memory.in + begin;
      chunk.exact = memory.out + begin;
      if (memory.residual != nullptr) chunk.residual = memory.residual + begin;
      break;
    case Collective::reduce_scatter:
      chunk.own = memory.in + begin;
      if (memory.residual != nullptr) chunk.residual = memory.residual + begin;
      chunk.exact =
          chunk.owned ? memory.out + shard_offset : static_cast<float*>(reserve(4 * chunk.range.count()));
      break;
    case Collective::all_gather:
    case Collective::broadcast:
      chunk.own = chunk.owned ? memory.in + shard_offset : nullptr;
      chunk.exact = memory.out + begin;
      if (memory.residual != nullptr && chunk.owned) chunk.residual = memory.residual + shard_offset;
      break;
  }
}

void* Compiler::reserve(int64_t bytes) {
  void* place = address(reserved_);
  reserved_ += aligned(bytes);
  return place;
}

int Compiler::take_slot() {
  if (free_slots_.empty()) return slots_++;
  const int slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void* Compiler::place_of(const Input& input) const {
  return address(reserved_ + static_cast<size_t>(input.slot) * slot_bytes_);
}

bool Compiler::is_exact(const Step& step) const {
  return wire_->exact || (plan_.options.fp32_intra_node && step.intra_node);
}

int64_t Compiler::bytes_of(const Chunk& chunk, bool exact) const {
  return (exact ? kFp32 : wire_)->bytes(chunk.range.count());
}

void Compiler::compile_round(int round) {
  const Round& steps = rounds()[round];
  Exchange& exchange = exchanges_.emplace_back();
  exchange.label = {mix(plan_.call.hash, static_cast<uint64_t>(round)),
                    fmt::format("{}, round {} of {}", plan_.call.what, round + 1, rounds().size())};
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
    if (step.kind == Step::Kind::recv_copy && !is_exact(step) && chunk.range.count() > 0)
      produce_final(chunk);
  }
}

Transfer Compiler::send(const Step& step, int round) {
  const Chunk& chunk = chunks_[step.chunk];
  const bool exact = is_exact(step);
  const Source& source = exact ? chunk.exact_source : chunk.encoded_source;
  if (!source.available) {
    refuse(fmt::format("sends chunk {} in round {} {}", step.chunk, round,
                       exact ? "inside its node, as FP32, after it was rounded for another node"
                             : "to another node, to be rounded, after it was sent unrounded inside its own"));
  }
  must_precede(source.made_by, round);
  return {Transfer::Kind::send, step.peer, const_cast<void*>(source.data),  // a send only reads
          static_cast<size_t>(bytes_of(chunk, exact))};
}

Transfer Compiler::receive_part(const Step& step, int round) {
  Chunk& chunk = chunks_[step.chunk];
  if (chunk.closed) {
    refuse(fmt::format("adds to chunk {} in round {}, after its partial sum was sent", step.chunk, round));
  }
  const bool exact = is_exact(step);
  const bool part = part_scale_ != 1.0f && first_sums_.sends_a_part(step.peer, step.chunk, round);
  const Input input{.from = step.peer, .scale = part ? part_scale_ : 1.0f, .slot = take_slot()};
  (exact ? chunk.exact_inputs : chunk.encoded_inputs).push_back(input);
  chunk.arrived = round;
  return {Transfer::Kind::receive, step.peer, place_of(input), static_cast<size_t>(bytes_of(chunk, exact))};
}

Transfer Compiler::receive_final(const Step& step, int round) {
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
void Compiler::close(int c) {
  Chunk& chunk = chunks_[c];
  const Collective collective = plan_.schedule.collective;
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
int Compiler::add_exact_inputs(Chunk& chunk, float scale, bool feeds_encode) {
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
int Compiler::add_encoded_inputs(Chunk& chunk, const float* own, bool own_is_sum, float scale) {
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
  args.rounding = plan_.options.rounding;
  args.rounding.first_element += chunk.range.begin;
  return emit(args, chunk);
}

// Decodes a received final value.
void Compiler::produce_final(Chunk& chunk) {
  const int made_by =
      emit(Decode{chunk.encoded_source.data, chunk.exact, result_scale_, chunk.range.count(), chunk.residual},
           chunk);
  chunk.exact_source = {.data = chunk.exact, .available = true, .made_by = made_by};
}

// Fills the arguments common to all merging kernels: contributions in rank order, and the position of this
// rank's part among the contributions. Frees the slots.
template <typename Args>
void Compiler::merge(std::vector<Input>& inputs, const Chunk& chunk, Args& args) {
  if (inputs.size() > kMaxInputs) {
    refuse(
        fmt::format("merges {} contributions at once, at most {} are possible", inputs.size(), kMaxInputs));
  }
  std::ranges::sort(inputs, {}, &Input::from);
  for (const Input& input : inputs) {
    args.input_scales.of[args.num_inputs] = input.scale;
    args.inputs[args.num_inputs++] =
        static_cast<std::remove_reference_t<decltype(args.inputs[0])>>(place_of(input));
    args.own_position += input.from < plan_.rank() ? 1 : 0;
    free_slots_.push_back(input.slot);
  }
  args.count = chunk.range.count();
  inputs.clear();
}

// Appends a kernel. Returns the kernel's index; -1 for an empty chunk, which needs no kernel.
template <typename Args>
int Compiler::emit(const Args& args, const Chunk& chunk) {
  if (chunk.range.count() == 0) return -1;
  kernels_.push_back({.kernel = {.work = args, .after = chunk.arrived}});
  return static_cast<int>(kernels_.size()) - 1;
}

void Compiler::must_precede(int kernel, int exchange) {
  if (kernel < 0) return;
  int& before = kernels_[kernel].before;
  if (before == EmittedKernel::kNoExchange || exchange < before) before = exchange;
}

void Compiler::refuse(const std::string& why) const {
  throw BadInput("{}: the schedule {}", plan_.options.what, why);
}

}  // namespace

CompiledProgram compile(const ProgramPlan& plan, const ProgramMemory& memory) {
  return Compiler(plan, memory).compile();
}

namespace {

// Returns whether one transfer writes memory that the other reads or writes.
bool collide(const Transfer& a, const Transfer& b) {
  if (a.kind == Transfer::Kind::send && b.kind == Transfer::Kind::send) return false;
  const auto begin = [](const Transfer& t) { return reinterpret_cast<uintptr_t>(t.data); };
  return begin(a) < begin(b) + b.bytes && begin(b) < begin(a) + a.bytes;
}

bool collide(const Exchange& a, const Exchange& b) {
  return std::ranges::any_of(a.transfers, [&](const Transfer& x) {
    return std::ranges::any_of(b.transfers, [&](const Transfer& y) { return collide(x, y); });
  });
}

int64_t total_bytes(const std::vector<Transfer>& transfers, Transfer::Kind kind) {
  int64_t bytes = 0;
  for (const Transfer& t : transfers) bytes += t.kind == kind ? static_cast<int64_t>(t.bytes) : 0;
  return bytes;
}

}  // namespace

int64_t Exchange::bytes_sent() const {
  return total_bytes(transfers, Transfer::Kind::send);
}
int64_t Exchange::bytes_received() const {
  return total_bytes(transfers, Transfer::Kind::receive);
}

void Kernel::launch(const Stream& stream, Wire wire) const {
  if (const auto* encode = std::get_if<ReduceEncode>(&work)) {
    wire->reduce_encode(stream, *encode);
  } else if (const auto* decode = std::get_if<Decode>(&work)) {
    wire->decode(stream, *decode);
  } else {
    fp32_reduce(stream, std::get<Reduce>(work));
  }
}

// Puts operations in order. Every kernel that closes a chunk for exchange k precedes exchange k even without
// another dependency, because the exchange may receive into a slot that the kernel reads.
std::vector<Operation> put_in_order(std::vector<EmittedKernel> kernels, std::vector<Exchange> exchanges) {
  for (size_t i = kernels.size(); i-- > 0;) {
    if (kernels[i].feeds_next) kernels[i].before = kernels[i + 1].before;
  }
  for (size_t k = 1; k < exchanges.size(); ++k) exchanges[k].early = !collide(exchanges[k - 1], exchanges[k]);
  std::vector<Operation> operations;
  // [exchange]: the position of the last kernel that the exchange depends on; -1: none.
  std::vector<int> last_for(exchanges.size(), -1);
  // Moves the chosen kernels to the operations.
  const auto emit = [&](auto chosen) {
    std::erase_if(kernels, [&](const EmittedKernel& kernel) {
      if (!chosen(kernel)) return false;
      if (kernel.before >= 0) last_for[kernel.before] = static_cast<int>(operations.size());
      operations.emplace_back(kernel.kernel);
      return true;
    });
  };
  for (int k = 0; k < static_cast<int>(exchanges.size()); ++k) {
    const auto can_run_during = [k](const EmittedKernel& e) { return e.kernel.after < k; };
    emit([&](const EmittedKernel& e) { return e.before == k; });
    if (last_for[k] >= 0) std::get<Kernel>(operations[last_for[k]]).needed = true;
    operations.emplace_back(std::move(exchanges[k]));
    // While this exchange is in flight, run kernels that do not depend on it.
    emit([&](const EmittedKernel& e) { return e.before == k + 1 && can_run_during(e); });
    emit([&](const EmittedKernel& e) { return e.before != k + 1 && can_run_during(e); });
  }
  emit([](const EmittedKernel&) { return true; });
  return operations;
}

}  // namespace gradwire
