// Saves and loads a reducer's checkpoint.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "runtime/device/device.h"
#include "runtime/device/device_cuda.h"
#include "runtime/util/hash.h"

namespace gradwire::c_api {

// The bytes of a reducer's checkpoint: one self-describing block of memory. docs/checkpoints.md documents the
// layout for readers. A change of the layout must change docs/checkpoints.md and kVersion.
//
//   header    magic "GRADWIRE", version, CRC-32 of everything after the header, total bytes, steps, tensors
//   identity  length and text: what the loading reducer must match
//   tensors   each: name, rows, cols and its entries; each entry: kind, dtype, count and the elements
// Integers and floats are little-endian, and texts and elements are not padded. Values are stored by tensor
// rather than by bucket, so that a state can be loaded with another bucket size.

// A piece of a tensor's state, in the bytes of a checkpoint.
struct SavedEntry {
  std::string kind;
  DType dtype = DType::f32;
  uint64_t count = 0;
  const char* data = nullptr;  // not aligned

  size_t bytes() const { return count * static_cast<size_t>(bytes_of(dtype)); }
  bool is_zero() const;
  // Returns a copy of the elements, which must be FP32.
  std::vector<float> floats() const;
};

struct SavedTensor {
  int64_t rows = 0, cols = 0;
  std::string name = {};
  std::vector<SavedEntry> entries = {};
};

// The run and the rank that a state belongs to.
struct SavedIdentity {
  std::string run;  // spec, mean or sum, seed
  int rank = 0, world = 0;

  // Parses "spec S; rank R of N; mean; seed 0".
  static SavedIdentity parse(const std::string& text);
  std::string place() const;
};

struct SavedState {
  std::string identity_text;
  SavedIdentity identity = {};
  int64_t steps = 0;
  std::vector<SavedTensor> tensors = {};

  // Parses untrusted bytes, which must outlive the result. Throws BadInput for an invalid state.
  static SavedState parse(const void* state, size_t size);
};

// Writes a state. The caller determines the state's size with size() and the static functions.
class StateWriter {
 public:
  static size_t header_bytes(const std::string& identity);
  static size_t tensor_bytes(const std::string& name);
  static size_t entry_bytes(const std::string& kind, size_t bytes);

  // Writes the identity to `state`. Later calls append entries.
  StateWriter(void* state, const std::string& identity);
  void add_tensor(int64_t rows, int64_t cols, const std::string& name, size_t entries);
  // Adds an entry. Returns the memory for the entry's elements, (count), which the caller fills.
  std::byte* add_entry(DType dtype, int64_t count, const std::string& kind);
  // Writes the header, after the caller has filled in all elements.
  void finish(int64_t steps);

 private:
  void put(const void* from, size_t bytes);

  char* const begin_;
  char* at_;
  const uint32_t identity_bytes_;
  uint32_t tensors_ = 0;
};

namespace {

int64_t rows_of(const GradientTensor& t) {
  return t.shape[0];
}
int64_t cols_of(const GradientTensor& t) {
  return t.shape.size() > 1 ? t.shape[1] : 1;
}

// Returns the ranks whose residuals are in the states, with digests of the residuals.
std::vector<LoadedResidual> residuals_in(const std::vector<SavedState>& states) {
  std::vector<LoadedResidual> found;
  for (const SavedState& state : states) {
    uint64_t digest = 0;
    bool zero = true;
    for (const SavedTensor& tensor : state.tensors) {
      for (const SavedEntry& e : tensor.entries) {
        if (e.kind != kResidualKind || e.is_zero()) continue;
        zero = false;
        digest = mix(digest, crc32(e.data, e.bytes()));
      }
    }
    if (!zero) found.push_back({state.identity.rank, state.identity.world, digest});
  }
  return found;
}

// Removes the residuals from the states. Returns the non-zero sums of the residuals by tensor.
std::map<size_t, std::vector<float>> take_residuals(std::vector<SavedState>& states,
                                                    const std::vector<GradientTensor>& tensors) {
  std::map<size_t, std::vector<float>> sums;
  for (SavedState& state : states) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      std::erase_if(state.tensors[i].entries, [&](const SavedEntry& e) {
        if (e.kind != kResidualKind || e.is_zero()) return false;
        require(e.dtype == DType::f32 && e.count == static_cast<uint64_t>(tensors[i].count()),
                "the residual of '{}' has {} elements of {} in the state, {} of F32 in the reducer",
                tensors[i].name, e.count, name(e.dtype), tensors[i].count());
        add_residual(sums[i], e.floats());
        return true;
      });
    }
  }
  return sums;
}

}  // namespace

// The places from which a reducer's state is loaded. Removes the entries that it uses from the saved states.
class ApiReducer::Sources {
 public:
  Sources(const std::vector<TensorState>& targets, const ApiReducer& reducer, std::vector<SavedState>& states)
      : targets_(targets),
        reducer_(reducer),
        saved_world_(states[0].identity.world),
        world_(reducer.comm->communicator->world()) {
    for (const TensorState& target : targets_) of_.push_back(take(target, states[0]));
    for (size_t k = 1; k < states.size(); ++k) add_residuals(states[k]);
    for (const SavedState& state : states) check_rest(state);
  }

  // Enqueues the copies. The states must stay valid until `stream` has executed the copies.
  void load(const Stream& stream) const {
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (of_[k] != nullptr || !targets_[k].same_on_all_ranks) targets_[k].clear(stream);
    }
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (of_[k] == nullptr) continue;
      const auto* source = reinterpret_cast<const std::byte*>(of_[k]);
      targets_[k].write(stream, 0, {source, static_cast<size_t>(targets_[k].bytes())});
    }
  }

  // Returns a digest of the state that is the same on all ranks.
  uint64_t replicated_digest() const {
    uint64_t digest = 0;
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (!targets_[k].same_on_all_ranks || of_[k] == nullptr) continue;
      digest = mix(digest, crc32(of_[k], static_cast<size_t>(targets_[k].bytes())));
    }
    return digest;
  }

 private:
  // Returns the saved elements for `target`; null: the target becomes zero.
  const char* take(const TensorState& target, SavedState& state) const {
    auto& entries = state.tensors[static_cast<size_t>(target.tensor)].entries;
    const std::string& tensor = reducer_.tensors[static_cast<size_t>(target.tensor)].name;
    const auto entry = std::ranges::find(entries, target.kind, &SavedEntry::kind);
    if (entry == entries.end()) {
      const bool alone = saved_world_ == 1;  // a world of 1 saves no factors, because it has no codec
      require(target.kind == kResidualKind || alone, "the state has no '{}' of '{}'", target.kind, tensor);
      return nullptr;
    }
    require(entry->count == static_cast<uint64_t>(target.count()) && entry->dtype == target.dtype,
            "'{}' of '{}' has {} elements of {} in the state, {} of {} in the reducer", target.kind, tensor,
            entry->count, name(entry->dtype), target.count(), name(target.dtype));
    const char* const data = entry->data;
    entries.erase(entry);
    return is_loaded(target.kind, target.same_on_all_ranks, saved_world_, world_) ? data : nullptr;
  }

  // Adds another rank's residuals to the sources of residuals.
  void add_residuals(SavedState& state) {
    for (size_t k = 0; k < targets_.size(); ++k) {
      if (targets_[k].kind != kResidualKind) continue;
      auto& entries = state.tensors[static_cast<size_t>(targets_[k].tensor)].entries;
      const auto count = static_cast<size_t>(targets_[k].count());
      const auto entry = std::ranges::find_if(entries, [&](const SavedEntry& e) {
        return e.kind == kResidualKind && e.dtype == DType::f32 && e.count == count;
      });
      if (entry == entries.end()) continue;
      std::vector<float> sum;
      if (of_[k] != nullptr) sum = SavedEntry{kResidualKind, DType::f32, count, of_[k]}.floats();
      add_residual(sum, entry->floats());
      sums_.push_back(std::move(sum));
      of_[k] = reinterpret_cast<const char*>(sums_.back().data());
      entries.erase(entry);
    }
  }

  // Throws BadInput if a state has entries that the reducer does not load. With an FP32 format a dense tensor
  // has a residual, always zero, only if its bucket also holds a matrix. So zeros may remain.
  void check_rest(const SavedState& state) const {
    for (size_t i = 0; i < state.tensors.size(); ++i) {
      for (const SavedEntry& e : state.tensors[i].entries) {
        if ((saved_world_ != world_ || world_ == 1) && e.kind != kResidualKind) continue;
        require(e.is_zero(), "'{}' has a '{}' in the state only", reducer_.tensors[i].name, e.kind);
      }
    }
  }

  const std::vector<TensorState>& targets_;
  const ApiReducer& reducer_;
  const int saved_world_, world_;
  std::vector<const char*> of_;           // [target]; null: the target becomes zero
  std::vector<std::vector<float>> sums_;  // sums of residuals of several ranks, to which sources point
};

std::string ApiReducer::identity() const {
  CompressionSpec same = spec;
  same.residual = kFp32;  // residuals are saved as FP32 whatever their format
  return fmt::format("spec {}; rank {} of {}; {}; seed {}", same.to_string(), comm->communicator->rank(),
                     comm->communicator->world(), options.average ? "mean" : "sum", options.seed);
}

void ApiReducer::check_between_steps() const {
  require(ready_ == 0, "in the middle of a step: {} tensors are ready; finish it with gw_reducer_wait",
          ready_);
}

size_t ApiReducer::state_size() const {
  size_t bytes = StateWriter::header_bytes(identity());
  for (const GradientTensor& t : tensors) bytes += StateWriter::tensor_bytes(t.name);
  for (const TensorState& s : reducer.tensor_state()) {
    bytes += StateWriter::entry_bytes(s.kind, static_cast<size_t>(s.bytes()));
  }
  for (const auto& [tensor, residual] : unsent_) {
    bytes += StateWriter::entry_bytes(kResidualKind, residual.size() * sizeof(float));
  }
  return bytes;
}

void ApiReducer::save_state(void* state, size_t size) const {
  require(state != nullptr, "state is null");
  check_between_steps();
  const size_t bytes = state_size();
  require(size >= bytes, "capacity is {}, the state needs {}", size, bytes);
  const FinishOnError finish(comm->stream);  // the caller may free `state`
  StateWriter writer(state, identity());
  const std::vector<TensorState> all = reducer.tensor_state();
  auto state_of = all.begin();  // the states of `all` have the order of the tensors
  for (int i = 0; i < reducer.tensors(); ++i) {
    const GradientTensor& t = tensors[static_cast<size_t>(i)];
    const auto end = std::find_if(state_of, all.end(), [i](const TensorState& s) { return s.tensor != i; });
    const auto unsent = unsent_.find(static_cast<size_t>(i));
    const auto entries = static_cast<size_t>(end - state_of) + (unsent != unsent_.end() ? 1 : 0);
    writer.add_tensor(rows_of(t), cols_of(t), t.name, entries);
    if (unsent != unsent_.end()) {
      const std::vector<float>& values = unsent->second;
      std::memcpy(writer.add_entry(DType::f32, std::ssize(values), kResidualKind), values.data(),
                  values.size() * sizeof(float));
    }
    for (; state_of != end; ++state_of) {
      // The copy runs in stream order, hence after the step. Elements need not be aligned in the state.
      state_of->read(comm->stream, 0,
                     {writer.add_entry(state_of->dtype, state_of->count(), state_of->kind),
                      static_cast<size_t>(state_of->bytes())});
    }
  }
  comm->stream.synchronize();
  writer.finish(reducer.steps());
}

// Parses a state of this run. Returns the state with the tensors in the reducer's order.
SavedState ApiReducer::read_state(const void* bytes, size_t size) const {
  SavedState state = SavedState::parse(bytes, size);
  require(state.identity.run == SavedIdentity::parse(identity()).run,
          "the state is of another reducer: '{}', this one is '{}'", state.identity_text, identity());
  require(state.tensors.size() == tensors.size(), "the state has {} tensors, the reducer {}",
          state.tensors.size(), tensors.size());
  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  std::vector<SavedTensor> ordered(tensors.size());
  for (SavedTensor& t : state.tensors) {
    const auto found = index.find(t.name);
    require(found != index.end(), "tensor '{}' in the state is unknown to the reducer, or a duplicate",
            t.name);
    const size_t i = found->second;
    index.erase(found);
    require(t.rows == rows_of(tensors[i]) && t.cols == cols_of(tensors[i]),
            "tensor '{}' is {} x {} in the state, {} x {} in the reducer", t.name, t.rows, t.cols,
            rows_of(tensors[i]), cols_of(tensors[i]));
    ordered[i] = std::move(t);
  }
  state.tensors = std::move(ordered);
  return state;
}

void ApiReducer::load_state(const void* bytes, size_t size) {
  check_between_steps();
  SavedState state = read_state(bytes, size);
  const SavedIdentity ours = SavedIdentity::parse(identity());
  require(state.identity.world != ours.world || state.identity.rank == ours.rank,
          "the state is that of {}, this is {}: give each rank its own", state.identity.place(),
          ours.place());
  restore({std::move(state)});
}

void ApiReducer::load_states(const void* const* states, const size_t* sizes, int32_t n) {
  check_between_steps();
  require(n > 0 && states != nullptr && sizes != nullptr, "no states are given");
  std::map<int, SavedState> by_rank;
  for (int32_t k = 0; k < n; ++k) {
    SavedState state = read_state(states[k], sizes[k]);
    const SavedState& first = by_rank.empty() ? state : by_rank.begin()->second;
    require(state.identity.world == first.identity.world, "the states are of runs with {} and {} ranks",
            first.identity.world, state.identity.world);
    require(state.steps == first.steps, "the states are of steps {} and {}", first.steps, state.steps);
    const std::string place = state.identity.place();
    require(by_rank.emplace(state.identity.rank, std::move(state)).second, "two states are of {}", place);
  }
  const SavedIdentity ours = SavedIdentity::parse(identity());
  const int world = by_rank.begin()->second.identity.world;
  std::vector<SavedState> mine;
  for (int r : merged_ranks(ours.rank, ours.world, world)) {
    const auto found = by_rank.find(r);
    require(found != by_rank.end(),
            "{} needs the state that rank {} of {} saved; pass the states of all ranks", ours.place(), r,
            world);
    mine.push_back(std::move(found->second));
  }
  if (mine.empty()) {  // a new rank starts from the replicated state
    mine.push_back(std::move(by_rank.begin()->second));
    for (SavedTensor& tensor : mine[0].tensors) {
      std::erase_if(tensor.entries, [](const SavedEntry& e) { return e.kind == kResidualKind; });
    }
  }
  restore(std::move(mine));
}

// Loads the states. Checks all states before the first copy, because a rejected state must leave the reducer
// unchanged.
void ApiReducer::restore(std::vector<SavedState> states) {
  std::vector<LoadedResidual> residuals = residuals_in(states);
  std::map<size_t, std::vector<float>> unsent;
  // Without buckets, in a world of 1, no codec holds residuals.
  if (reducer.buckets() == 0) unsent = take_residuals(states, tensors);
  const std::vector<TensorState> targets = reducer.tensor_state();
  const Sources sources(targets, *this, states);

  const FinishOnError finish(comm->stream);  // the caller may free the states
  sources.load(comm->stream);
  comm->stream.synchronize();
  unsent_ = std::move(unsent);
  first_step_ = states[0].steps;
  reducer.resume_at(first_step_);
  loaded_.call.what = fmt::format("{} continues from a loaded state of step {}, factors {:08x}", options.name,
                                  first_step_, sources.replicated_digest() >> 32);
  loaded_.call.hash = mix(0x6c6f6164, loaded_.call.what);
  loaded_.residuals = std::move(residuals);
  loaded_.unannounced = true;
}

namespace {

static_assert(std::endian::native == std::endian::little, "the state is written in memory order");

constexpr char kMagic[8] = {'G', 'R', 'A', 'D', 'W', 'I', 'R', 'E'};
constexpr uint32_t kVersion = 2;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t crc;
  uint64_t bytes;
  int64_t steps;
  uint32_t tensors;
  uint32_t identity_bytes;
};
static_assert(sizeof(Header) == 40);

struct TensorHeader {
  int64_t rows, cols;
  uint64_t entries, name_bytes;
};
static_assert(sizeof(TensorHeader) == 32);

struct EntryHeader {
  char dtype[8];  // padded with zeros
  uint64_t count, kind_bytes;
};
static_assert(sizeof(EntryHeader) == 24);

// Reads untrusted bytes, and never reads past the end of the bytes.
class Cursor {
 public:
  Cursor(const void* data, size_t bytes) : at_(static_cast<const char*>(data)), left_(bytes) {}
  const char* take(size_t bytes) {
    require(bytes <= left_, "the state is truncated");
    const char* from = at_;
    at_ += bytes, left_ -= bytes;
    return from;
  }
  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string take_text(size_t bytes) { return {take(bytes), bytes}; }
  size_t left() const { return left_; }

 private:
  const char* at_;
  size_t left_;
};

SavedTensor take_tensor(Cursor& cursor) {
  const auto header = cursor.take<TensorHeader>();
  SavedTensor tensor{.rows = header.rows, .cols = header.cols};
  tensor.name = cursor.take_text(header.name_bytes);
  for (uint64_t i = 0; i < header.entries; ++i) {
    const auto entry = cursor.take<EntryHeader>();
    const std::string text(entry.dtype, strnlen(entry.dtype, sizeof entry.dtype));
    const std::optional<DType> dtype = find_dtype(text);
    require(dtype.has_value(), "'{}' has elements of an unknown type, '{}'", tensor.name, text);
    std::string kind = cursor.take_text(entry.kind_bytes);
    require(entry.count <= cursor.left() / static_cast<size_t>(bytes_of(*dtype)),
            "the state is truncated: '{}' of '{}' has {} elements", kind, tensor.name, entry.count);
    SavedEntry& added = tensor.entries.emplace_back(SavedEntry{std::move(kind), *dtype, entry.count});
    added.data = cursor.take(added.bytes());
  }
  return tensor;
}

}  // namespace

bool SavedEntry::is_zero() const {
  return std::all_of(data, data + bytes(), [](char c) { return c == 0; });
}

std::vector<float> SavedEntry::floats() const {
  std::vector<float> values(count);
  std::memcpy(values.data(), data, bytes());
  return values;
}

std::string SavedIdentity::place() const {
  return fmt::format("rank {} of {}", rank, world);
}

SavedIdentity SavedIdentity::parse(const std::string& text) {
  SavedIdentity identity;
  const size_t place = text.find("; rank ");
  const size_t end = place == std::string::npos ? place : text.find(';', place + 1);
  int length = 0;
  const bool found = end != std::string::npos && std::sscanf(text.c_str() + place, "; rank %d of %d%n",
                                                             &identity.rank, &identity.world, &length) == 2;
  require(found && place + static_cast<size_t>(length) == end && identity.rank >= 0 &&
              identity.rank < identity.world,
          "the state's identity is '{}', expected a text such as 'spec int8; rank 0 of 2; mean; seed 0'",
          text);
  identity.run = text.substr(0, place) + text.substr(end);
  return identity;
}

SavedState SavedState::parse(const void* state, size_t size) {
  require(state != nullptr, "state is null");
  Cursor cursor(state, size);
  const auto header = cursor.take<Header>();
  require(std::memcmp(header.magic, kMagic, sizeof kMagic) == 0,
          "this is not a state of gw_reducer_state_save");
  require(header.version == kVersion, "the state has version {}, this library reads version {}",
          header.version, kVersion);
  require(header.bytes == size, "the state has {} bytes, size is {}", header.bytes, size);
  require(header.crc == crc32(static_cast<const char*>(state) + sizeof header, size - sizeof header),
          "the state is damaged: its checksum does not match");
  require(header.steps >= 0, "the state has {} steps, must not be negative", header.steps);
  SavedState saved{.identity_text = cursor.take_text(header.identity_bytes), .steps = header.steps};
  saved.identity = SavedIdentity::parse(saved.identity_text);
  for (uint32_t k = 0; k < header.tensors; ++k) saved.tensors.push_back(take_tensor(cursor));
  require(cursor.left() == 0, "the state has {} bytes after its end", cursor.left());
  return saved;
}

size_t StateWriter::header_bytes(const std::string& identity) {
  return sizeof(Header) + identity.size();
}
size_t StateWriter::tensor_bytes(const std::string& name) {
  return sizeof(TensorHeader) + name.size();
}
size_t StateWriter::entry_bytes(const std::string& kind, size_t bytes) {
  return sizeof(EntryHeader) + kind.size() + bytes;
}

StateWriter::StateWriter(void* state, const std::string& identity)
    : begin_(static_cast<char*>(state)),
      at_(begin_ + sizeof(Header)),
      identity_bytes_(static_cast<uint32_t>(identity.size())) {
  put(identity.data(), identity.size());
}

void StateWriter::put(const void* from, size_t bytes) {
  std::memcpy(at_, from, bytes);
  at_ += bytes;
}

void StateWriter::add_tensor(int64_t rows, int64_t cols, const std::string& name, size_t entries) {
  const TensorHeader header{rows, cols, entries, name.size()};
  put(&header, sizeof header);
  put(name.data(), name.size());
  ++tensors_;
}

std::byte* StateWriter::add_entry(DType dtype, int64_t count, const std::string& kind) {
  EntryHeader entry{{}, static_cast<uint64_t>(count), kind.size()};
  std::memcpy(entry.dtype, name(dtype), std::strlen(name(dtype)));
  put(&entry, sizeof entry);
  put(kind.data(), kind.size());
  auto* const elements = reinterpret_cast<std::byte*>(at_);
  at_ += count * bytes_of(dtype);
  return elements;
}

void StateWriter::finish(int64_t steps) {
  const auto bytes = static_cast<uint64_t>(at_ - begin_);
  Header header{{}, kVersion, 0, bytes, steps, tensors_, identity_bytes_};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.crc = crc32(begin_ + sizeof header, bytes - sizeof header);
  std::memcpy(begin_, &header, sizeof header);
}

}  // namespace gradwire::c_api
