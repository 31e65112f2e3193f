// Saves a reducer's state, loads it, and does the work of the first step after a load.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <functional>
#include <optional>
#include <tuple>

#include "collectives/agreement/statements.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "kernels/wire/floats.h"
#include "runtime/device/device.h"
#include "runtime/util/hash.h"

namespace gradwire::c_api {
namespace {

static_assert(std::endian::native == std::endian::little, "the state is written in memory order");

// The bytes of a reducer's state: one self-describing block of memory. docs/checkpoints.md documents the
// layout for readers. A change of the layout must change docs/checkpoints.md and kVersion.
//
//   header    magic "GRADWIRE", version, CRC-32 of everything after the header, total bytes, steps, tensors
//   identity  length and text: what the loading reducer must match
//   tensors   each: name, rows, cols and its entries; each entry: kind, dtype, count and the elements
// Integers and floats are little-endian, and texts and elements are not padded. Values are stored by tensor
// rather than by bucket, so that a state can be loaded with another bucket size.
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

}  // namespace

// A piece of a tensor's state, in the bytes of a state.
struct SavedEntry {
  std::string kind;
  DType dtype = DType::f32;
  uint64_t count = 0;
  const char* data = nullptr;  // not aligned

  size_t bytes() const { return count * static_cast<size_t>(bytes_of(dtype)); }
  bool is_zero() const { return std::all_of(data, data + bytes(), std::logical_not<>()); }
};

struct SavedTensor {
  int64_t rows = 0, cols = 0;
  std::string name = {};
  std::vector<SavedEntry> entries = {};
};

struct SavedState {
  std::string identity;  // "spec S; rank R of N; mean; seed 0"
  std::string run = {};  // the identity without rank and world
  int rank = 0, world = 0;
  int64_t steps = 0;
  std::vector<SavedTensor> tensors = {};

  // Parses the identity.
  explicit SavedState(std::string text) : identity(std::move(text)) {
    const size_t place_at = identity.find("; rank ");
    const size_t end = place_at == std::string::npos ? place_at : identity.find(';', place_at + 1);
    int length = 0;
    const bool found =
        end != std::string::npos &&
        std::sscanf(identity.c_str() + place_at, "; rank %d of %d%n", &rank, &world, &length) == 2;
    require(found && place_at + static_cast<size_t>(length) == end && rank >= 0 && rank < world,
            "the state's identity is '{}', expected a text such as 'spec int8; rank 0 of 2; mean; seed 0'",
            identity);
    run = identity.substr(0, place_at) + identity.substr(end);
  }
  std::string place() const { return fmt::format("rank {} of {}", rank, world); }
};

namespace {

int64_t cols_of(const GradientTensor& t) {
  return t.shape.size() > 1 ? t.shape[1] : 1;
}

// Reads untrusted bytes, and never reads past the end of the bytes.
class Cursor {
 public:
  Cursor(const void* data, size_t bytes) : at_(static_cast<const char*>(data)), left_(bytes) {}
  const char* take(size_t bytes) {
    require(bytes <= left_, "the state is truncated");
    left_ -= bytes;
    return std::exchange(at_, at_ + bytes);
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

// Parses untrusted bytes, which must outlive the result. Throws BadInput for an invalid state.
SavedState parse_state(const void* state, size_t size) {
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
  SavedState saved(cursor.take_text(header.identity_bytes));
  saved.steps = header.steps;
  for (uint32_t k = 0; k < header.tensors; ++k) saved.tensors.push_back(take_tensor(cursor));
  require(cursor.left() == 0, "the state has {} bytes after its end", cursor.left());
  return saved;
}

constexpr size_t kNumbersOfResidual = 3;

// Returns the world and the rank of each residual in the states that is not zero, and a digest.
std::vector<double> residuals_in(const std::vector<SavedState>& states) {
  std::vector<double> found;
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
    if (zero) continue;
    found.insert(found.end(), {static_cast<double>(state.world), static_cast<double>(state.rank),
                               static_cast<double>(digest >> 11)});
  }
  return found;
}

// Removes an entry of tensor `i` from the state. Returns its elements; null: the state has no such entry.
const char* take_entry(SavedState& state, size_t i, const std::string& kind, DType dtype, int64_t count) {
  auto& entries = state.tensors[i].entries;
  const auto entry = std::ranges::find(entries, kind, &SavedEntry::kind);
  if (entry == entries.end()) return nullptr;
  require(entry->count == static_cast<uint64_t>(count) && entry->dtype == dtype,
          "'{}' of '{}' has {} elements of {} in the state, {} of {} in the reducer", kind,
          state.tensors[i].name, entry->count, name(entry->dtype), count, name(dtype));
  const char* const data = entry->data;
  entries.erase(entry);
  return data;
}

}  // namespace

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

size_t ApiReducer::save_state(void* state, size_t capacity) const {
  const size_t bytes = write_state(nullptr);
  if (state == nullptr) return bytes;
  check_between_steps();
  require(capacity >= bytes, "capacity is {}, the state needs {}", capacity, bytes);
  const FinishOnError finish(comm->stream);  // the caller may free `state`
  return write_state(static_cast<char*>(state));
}

// Writes the state, unless `state` is null. Returns the size of the state.
size_t ApiReducer::write_state(char* state) const {
  size_t bytes = sizeof(Header);
  // Appends bytes, which the caller fills in if `from` is null. Returns their address.
  const auto put = [&](const void* from, size_t n) {
    char* const at = state != nullptr ? state + bytes : nullptr;
    if (state != nullptr && from != nullptr) std::memcpy(at, from, n);
    bytes += n;
    return reinterpret_cast<std::byte*>(at);
  };
  const auto put_entry = [&](const std::string& kind, DType dtype, size_t count, const void* elements) {
    EntryHeader entry{{}, count, kind.size()};
    std::memcpy(entry.dtype, name(dtype), std::strlen(name(dtype)));
    put(&entry, sizeof entry);
    put(kind.data(), kind.size());
    return put(elements, count * static_cast<size_t>(bytes_of(dtype)));
  };
  const std::string text = identity();
  put(text.data(), text.size());
  const std::vector<TensorState> all = reducer.tensor_state();
  auto state_of = all.begin();  // the states of `all` have the order of the tensors
  for (int i = 0; i < reducer.tensors(); ++i) {
    const GradientTensor& t = tensors[static_cast<size_t>(i)];
    const auto end = std::ranges::upper_bound(state_of, all.end(), i, {}, &TensorState::tensor);
    const auto unsent = unsent_.find(static_cast<size_t>(i));
    const bool has_unsent = unsent != unsent_.end();
    const auto entries = static_cast<uint64_t>(end - state_of) + (has_unsent ? 1 : 0);
    const TensorHeader header{t.shape[0], cols_of(t), entries, t.name.size()};
    put(&header, sizeof header);
    put(t.name.data(), t.name.size());
    if (has_unsent) put_entry(kResidualKind, DType::f32, unsent->second.size(), unsent->second.data());
    for (; state_of != end; ++state_of) {
      const auto count = static_cast<size_t>(state_of->count());
      std::byte* const to = put_entry(state_of->kind, state_of->dtype, count, nullptr);
      // The copy runs in stream order, hence after the step. Elements need not be aligned in the state.
      if (to != nullptr) state_of->read(comm->stream, 0, {to, static_cast<size_t>(state_of->bytes())});
    }
  }
  if (state == nullptr) return bytes;
  comm->stream.synchronize();
  Header header{{},
                kVersion,
                0,
                bytes,
                reducer.steps(),
                static_cast<uint32_t>(tensors.size()),
                static_cast<uint32_t>(text.size())};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.crc = crc32(state + sizeof header, bytes - sizeof header);
  std::memcpy(state, &header, sizeof header);
  return bytes;
}

// Parses a state of this run. Returns the state with the tensors in the reducer's order.
SavedState ApiReducer::read_state(const void* bytes, size_t size) const {
  SavedState state = parse_state(bytes, size);
  require(state.run == SavedState(identity()).run, "the state is of another reducer: '{}', this one is '{}'",
          state.identity, identity());
  require(state.tensors.size() == tensors.size(), "the state has {} tensors, the reducer {}",
          state.tensors.size(), tensors.size());
  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  std::vector<SavedTensor> ordered(tensors.size());
  for (SavedTensor& t : state.tensors) {
    const auto found = index.extract(t.name);
    require(!found.empty(), "tensor '{}' in the state is unknown to the reducer, or a duplicate", t.name);
    const GradientTensor& ours = tensors[found.mapped()];
    require(t.rows == ours.shape[0] && t.cols == cols_of(ours),
            "tensor '{}' is {} x {} in the state, {} x {} in the reducer", t.name, t.rows, t.cols,
            ours.shape[0], cols_of(ours));
    ordered[found.mapped()] = std::move(t);
  }
  state.tensors = std::move(ordered);
  return state;
}

void ApiReducer::load_state(const void* bytes, size_t size) {
  check_between_steps();
  SavedState state = read_state(bytes, size);
  const SavedState ours(identity());
  require(state.world != ours.world || state.rank == ours.rank,
          "the state is that of {}, this is {}: give each rank its own", state.place(), ours.place());
  restore({std::move(state)});
}

void ApiReducer::load_states(const void* const* states, const size_t* sizes, int32_t n) {
  check_between_steps();
  require(n > 0 && states != nullptr && sizes != nullptr, "no states are given");
  std::map<int, SavedState> by_rank;
  for (int32_t k = 0; k < n; ++k) {
    SavedState state = read_state(states[k], sizes[k]);
    const SavedState& first = by_rank.empty() ? state : by_rank.begin()->second;
    require(state.world == first.world, "the states are of runs with {} and {} ranks", first.world,
            state.world);
    require(state.steps == first.steps, "the states are of steps {} and {}", first.steps, state.steps);
    const std::string place = state.place();
    require(by_rank.emplace(state.rank, std::move(state)).second, "two states are of {}", place);
  }
  const SavedState ours(identity());
  const int world = by_rank.begin()->second.world;
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

// Loads the states: all residuals, and the first state's other entries. Checks all states before the first
// copy, because a rejected state must leave the reducer unchanged.
void ApiReducer::restore(std::vector<SavedState> states) {
  const int saved_world = states[0].world, world = comm->communicator->world();
  std::vector<double> residuals = residuals_in(states);
  Residuals sums;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (SavedState& state : states) {
      const int64_t count = tensors[i].count();
      const char* const data = take_entry(state, i, kResidualKind, DType::f32, count);
      if (data != nullptr) add_residual(sums[i], data, count);
    }
  }
  const std::vector<TensorState> targets = reducer.tensor_state();
  std::vector<const char*> sources;  // null: the target becomes zero
  uint64_t factors = 0;              // a digest of the state that is the same on all ranks
  for (const TensorState& t : targets) {
    const auto i = static_cast<size_t>(t.tensor);
    const bool is_residual = t.kind == kResidualKind;
    const auto sum = sums.find(i);
    const char* from = !is_residual        ? take_entry(states[0], i, t.kind, t.dtype, t.count())
                       : sum != sums.end() ? reinterpret_cast<const char*>(sum->second.data())
                                           : nullptr;
    // A world of 1 saves no factors, because it has no codec.
    require(from != nullptr || is_residual || saved_world == 1, "the state has no '{}' of '{}'", t.kind,
            tensors[i].name);
    if (!is_loaded(t.kind, t.same_on_all_ranks, saved_world, world)) from = nullptr;
    sources.push_back(from);
    if (t.same_on_all_ranks && from != nullptr) {
      factors = mix(factors, crc32(from, static_cast<size_t>(t.bytes())));
    }
  }
  Residuals unsent = take_left_over(sums, targets);
  check_rest(states, unsent);

  const FinishOnError finish(comm->stream);  // the caller may free the states
  for (size_t k = 0; k < targets.size(); ++k) {
    if (sources[k] != nullptr || !targets[k].same_on_all_ranks) targets[k].clear(comm->stream);
  }
  for (size_t k = 0; k < targets.size(); ++k) {
    if (sources[k] == nullptr) continue;
    const auto* from = reinterpret_cast<const std::byte*>(sources[k]);
    targets[k].write(comm->stream, 0, {from, static_cast<size_t>(targets[k].bytes())});
  }
  comm->stream.synchronize();
  unsent_ = std::move(unsent);
  first_step_ = states[0].steps;
  reducer.resume_at(first_step_);
  loaded_.what = fmt::format("{} continues from a loaded state of step {}, factors {:08x}", options.name,
                             first_step_, factors >> 32);
  loaded_.hash = mix(0x6c6f6164, loaded_.what);
  loaded_residuals_ = std::move(residuals);
  unannounced_ = true;
}

// Throws BadInput if the states hold more than the reducer: residuals although a codec holds residuals, or
// other entries. With an FP32 format a dense tensor has a residual, always zero, only if its bucket also
// holds a matrix. So zeros may remain.
void ApiReducer::check_rest(const std::vector<SavedState>& states, const Residuals& unsent) const {
  constexpr const char* kStateOnly = "'{}' has a '{}' in the state only";
  const int world = comm->communicator->world();
  // Without buckets, in a world of 1, no codec holds residuals.
  require(unsent.empty() || reducer.buckets() == 0, kStateOnly,
          unsent.empty() ? "" : tensors[unsent.begin()->first].name, kResidualKind);
  for (const SavedState& state : states) {
    for (size_t i = 0; i < state.tensors.size(); ++i) {
      for (const SavedEntry& e : state.tensors[i].entries) {
        if ((state.world != world || world == 1) && e.kind != kResidualKind) continue;
        require(e.is_zero(), kStateOnly, tensors[i].name, e.kind);
      }
    }
  }
}

void ApiReducer::announce_loaded_state() {
  if (!std::exchange(unannounced_, false) || comm->communicator->world() == 1) return;
  Transport& transport = comm->communicator->transport();
  transport.begin_call(comm->stream, loaded_);
  const std::string what = "comparing the states that ranks have loaded";
  size_t most = 0;
  for (const double count :
       all_gather_value(transport, comm->stream, static_cast<double>(loaded_residuals_.size()), what)) {
    most = std::max(most, static_cast<size_t>(count));
  }
  std::vector<double> numbers = loaded_residuals_;
  numbers.resize(most);  // a world of 0: no residual
  const auto all = all_gather(transport, comm->stream, numbers, what);
  std::map<std::tuple<double, double, double>, size_t> loaded_by;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t at = 0; at < all[rank].size(); at += kNumbersOfResidual) {
      const double* r = all[rank].data() + at;
      if (r[0] == 0) continue;
      const auto [other, added] = loaded_by.emplace(std::tuple(r[0], r[1], r[2]), rank);
      if (added) continue;
      const std::string text = fmt::format(
          "{}: ranks {} and {} have both loaded the residual that rank {} of {} saved, which would be sent "
          "twice; load each state on one rank, and on a new rank with gw_reducer_state_load_ranks()",
          options.name, other->second, rank, r[1], r[0]);
      transport.abort(text);
      throw CommError("rank {}: {}", transport.rank(), text);
    }
  }
}

void ApiReducer::add_unsent(int32_t tensor, const Stream& stream) {
  const auto unsent = unsent_.find(static_cast<size_t>(tensor));
  if (unsent == unsent_.end()) return;
  const DType dtype = tensors[unsent->first].dtype;
  const int64_t count = tensors[unsent->first].count();
  const auto bytes = static_cast<size_t>(count * bytes_of(dtype));
  void* const gradient = reducer.gradient(tensor);
  const Stream host = Stream::immediate_host();
  std::vector<std::byte> narrowed(dtype == DType::f32 ? 0 : bytes);
  std::vector<float> values(static_cast<size_t>(count));
  void* const copied = dtype == DType::f32 ? static_cast<void*>(values.data()) : narrowed.data();
  copy(stream, copied, gradient, bytes);
  stream.synchronize();
  if (dtype != DType::f32) widen(host, dtype, copied, values.data(), count);
  for (size_t i = 0; i < values.size(); ++i) values[i] += unsent->second[i];
  if (dtype != DType::f32) narrow(host, dtype, values.data(), copied, count);
  copy(stream, gradient, copied, bytes);
  stream.synchronize();
  unsent_.erase(unsent);
}

}  // namespace gradwire::c_api
