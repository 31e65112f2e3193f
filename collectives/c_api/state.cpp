// A reducer's checkpoint: one self-describing block of memory. docs/checkpoints.md documents it for readers;
// change both together, and kVersion with them.
//
//   header    magic "GRADWIRE", version, CRC-32 of everything after the header, total bytes, steps, tensors
//   identity  length and text: what the loading reducer must match
//   tensors   each: name, rows, cols and its entries; each entry: kind, dtype, count and the elements
// Integers and floats are little-endian, lengths are not padded. Stored by tensor rather than by bucket, so
// that a state can be loaded with another bucket size.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "runtime/device/unwinding.h"
#include "runtime/util/crc32.h"
#include "runtime/util/mix.h"

namespace gradwire::c_api {
// A piece of a tensor's state, in the bytes of a checkpoint.
struct SavedEntry {
  std::string kind;
  DType dtype = DType::f32;
  uint64_t count = 0;
  const char* data = nullptr;

  size_t bytes() const { return count * static_cast<size_t>(bytes_of(dtype)); }
  bool is_zero() const {
    return std::all_of(data, data + bytes(), [](char c) { return c == 0; });
  }
};

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

int64_t rows_of(const GradientTensor& t) {
  return t.shape[0];
}
int64_t cols_of(const GradientTensor& t) {
  return t.shape.size() > 1 ? t.shape[1] : 1;
}

// Reads untrusted bytes without ever running past their end.
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
  size_t left() const { return left_; }

 private:
  const char* at_;
  size_t left_;
};

struct SavedTensor {
  int64_t rows = 0, cols = 0;
  std::string name = {};
  std::vector<SavedEntry> entries = {};
};

SavedTensor take_tensor(Cursor& cursor) {
  const auto header = cursor.take<TensorHeader>();
  SavedTensor tensor{.rows = header.rows, .cols = header.cols};
  tensor.name.assign(cursor.take(header.name_bytes), header.name_bytes);
  for (uint64_t i = 0; i < header.entries; ++i) {
    const auto entry = cursor.take<EntryHeader>();
    const std::string text(entry.dtype, strnlen(entry.dtype, sizeof entry.dtype));
    const std::optional<DType> dtype = find_dtype(text);
    require(dtype.has_value(), "'{}' has elements of an unknown type, '{}'", tensor.name, text);
    std::string kind(cursor.take(entry.kind_bytes), entry.kind_bytes);
    require(entry.count <= cursor.left() / static_cast<size_t>(bytes_of(*dtype)),
            "the state is truncated: '{}' of '{}' has {} elements", kind, tensor.name, entry.count);
    SavedEntry& kept = tensor.entries.emplace_back(SavedEntry{std::move(kind), *dtype, entry.count});
    kept.data = cursor.take(kept.bytes());
  }
  return tensor;
}

// Of whose run a state is.
struct Identity {
  std::string run;  // spec, mean or sum, seed
  int rank = 0, world = 0;

  std::string place() const { return fmt::format("rank {} of {}", rank, world); }
};

// "spec S; rank R of N; mean; seed 0".
Identity parse_identity(const std::string& text) {
  Identity identity;
  const size_t place = text.find("; rank ");
  const size_t end = place == std::string::npos ? place : text.find(';', place + 1);
  int length = 0;
  const bool found = end != std::string::npos && std::sscanf(text.c_str() + place, "; rank %d of %d%n",
                                                             &identity.rank, &identity.world, &length) == 2;
  require(found && place + static_cast<size_t>(length) == end && identity.rank >= 0 &&
              identity.rank < identity.world,
          "the state does not say whose it is: '{}'", text);
  identity.run = text.substr(0, place) + text.substr(end);
  return identity;
}

// Replaces the sources of residuals by sums with another rank's, which are taken out of its entries.
void add_residuals(const std::vector<TensorState>& all, std::vector<std::vector<SavedEntry>>& theirs,
                   std::vector<const char*>& sources, std::vector<std::vector<float>>& sums) {
  for (size_t k = 0; k < all.size(); ++k) {
    std::vector<SavedEntry>& entries = theirs[static_cast<size_t>(all[k].tensor)];
    const auto count = static_cast<size_t>(all[k].count());
    const auto entry = std::find_if(entries.begin(), entries.end(), [&](const SavedEntry& e) {
      return e.kind == kResidualKind && all[k].kind == kResidualKind && e.dtype == DType::f32 &&
             e.count == count;
    });
    if (entry == entries.end()) continue;
    std::vector<float> sum(count, 0.0f), more(count);
    if (sources[k] != nullptr) std::memcpy(sum.data(), sources[k], count * sizeof(float));
    std::memcpy(more.data(), entry->data, count * sizeof(float));
    for (size_t e = 0; e < count; ++e) sum[e] += more[e];
    sums.push_back(std::move(sum));
    sources[k] = reinterpret_cast<const char*>(sums.back().data());
    entries.erase(entry);
  }
}

}  // namespace

struct ApiReducer::Saved {
  std::string identity;
  int64_t steps = 0;
  std::vector<std::vector<SavedEntry>> entries = {};  // by tensor of the reducer
};

std::string ApiReducer::identity() const {
  CompressionSpec same = spec;
  same.residual = kFp32;  // as which it is saved, whatever it is kept in
  return fmt::format("spec {}; rank {} of {}; {}; seed {}", same.to_string(), comm->communicator->rank(),
                     comm->communicator->world(), options.average ? "mean" : "sum", options.seed);
}

size_t ApiReducer::state_size() const {
  size_t bytes = sizeof(Header) + identity().size();
  for (const GradientTensor& t : tensors) bytes += sizeof(TensorHeader) + t.name.size();
  for (const TensorState& s : reducer.tensor_state()) {
    bytes += sizeof(EntryHeader) + s.kind.size() + static_cast<size_t>(s.bytes());
  }
  for (const auto& [tensor, residual] : unsent_) {
    bytes += sizeof(EntryHeader) + std::strlen(kResidualKind) + residual.size() * sizeof(float);
  }
  return bytes;
}

void ApiReducer::save_state(void* state, size_t size) const {
  require(state != nullptr, "state is null");
  require(ready_ == 0, "in the middle of a step; finish it with gw_reducer_wait");
  const size_t bytes = state_size();
  require(size >= bytes, "capacity is {}, the state needs {}", size, bytes);
  const FinishOnError finish(comm->stream);  // the caller may free `state`
  auto* at = static_cast<char*>(state) + sizeof(Header);
  auto put = [&](const void* from, size_t n) {
    std::memcpy(at, from, n);
    at += n;
  };
  const std::string text = identity();
  put(text.data(), text.size());
  const std::vector<TensorState> all = reducer.tensor_state();
  auto state_of = all.begin();  // in the order of the tensors
  for (int i = 0; i < reducer.tensors(); ++i) {
    const GradientTensor& t = tensors[static_cast<size_t>(i)];
    const auto end = std::find_if(state_of, all.end(), [i](const TensorState& s) { return s.tensor != i; });
    const auto unsent = unsent_.find(static_cast<size_t>(i));
    const TensorHeader header{rows_of(t), cols_of(t),
                              static_cast<uint64_t>(end - state_of) + (unsent != unsent_.end() ? 1 : 0),
                              t.name.size()};
    put(&header, sizeof header);
    put(t.name.data(), t.name.size());
    auto put_header = [&](DType dtype, uint64_t count, const std::string& kind) {
      EntryHeader entry{{}, count, kind.size()};
      std::memcpy(entry.dtype, name(dtype), std::strlen(name(dtype)));
      put(&entry, sizeof entry);
      put(kind.data(), kind.size());
    };
    if (unsent != unsent_.end()) {
      put_header(DType::f32, unsent->second.size(), kResidualKind);
      put(unsent->second.data(), unsent->second.size() * sizeof(float));
    }
    for (; state_of != end; ++state_of) {
      put_header(state_of->dtype, static_cast<uint64_t>(state_of->count()), state_of->kind);
      // In stream order, hence after the step. Elements need not be aligned in the state.
      state_of->read(comm->stream, 0,
                     {reinterpret_cast<std::byte*>(at), static_cast<size_t>(state_of->bytes())});
      at += state_of->bytes();
    }
  }
  comm->stream.synchronize();
  Header header{{},
                kVersion,
                0,
                bytes,
                reducer.steps(),
                static_cast<uint32_t>(tensors.size()),
                static_cast<uint32_t>(text.size())};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.crc = crc32(static_cast<char*>(state) + sizeof header, bytes - sizeof header);
  std::memcpy(state, &header, sizeof header);
}

ApiReducer::Saved ApiReducer::parse_state(const void* state, size_t size) const {
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
  Saved saved{.identity = std::string(cursor.take(header.identity_bytes), header.identity_bytes),
              .steps = header.steps};
  const Identity ours = parse_identity(identity()), theirs = parse_identity(saved.identity);
  require(theirs.run == ours.run, "the state is of another reducer: '{}', this one is '{}'", saved.identity,
          identity());
  require(header.tensors == tensors.size(), "the state has {} tensors, the reducer {}", header.tensors,
          tensors.size());
  require(header.steps >= 0, "the state has {} steps", header.steps);

  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  saved.entries.resize(tensors.size());
  for (uint32_t k = 0; k < header.tensors; ++k) {
    SavedTensor t = take_tensor(cursor);
    const auto found = index.find(t.name);
    require(found != index.end(), "tensor '{}' in the state is unknown to the reducer, or a duplicate",
            t.name);
    const size_t i = found->second;
    index.erase(found);
    require(t.rows == rows_of(tensors[i]) && t.cols == cols_of(tensors[i]),
            "tensor '{}' is {} x {} in the state, {} x {} in the reducer", t.name, t.rows, t.cols,
            rows_of(tensors[i]), cols_of(tensors[i]));
    saved.entries[i] = std::move(t.entries);
  }
  require(cursor.left() == 0, "the state has bytes after its end");
  return saved;
}

void ApiReducer::load_state(const void* state, size_t size) {
  require(ready_ == 0, "in the middle of a step; finish it with gw_reducer_wait");
  Saved saved = parse_state(state, size);
  const Identity ours = parse_identity(identity()), theirs = parse_identity(saved.identity);
  require(theirs.world != ours.world || theirs.rank == ours.rank,
          "the state is that of {}, this is {}: give each rank its own", theirs.place(), ours.place());
  restore({std::move(saved)});
}

void ApiReducer::load_states(const void* const* states, const size_t* sizes, int32_t n) {
  require(ready_ == 0, "in the middle of a step; finish it with gw_reducer_wait");
  require(n > 0 && states != nullptr && sizes != nullptr, "no states are given");
  const Identity ours = parse_identity(identity());
  std::map<int, Saved> by_rank;
  int world = 0;
  for (int32_t k = 0; k < n; ++k) {
    Saved saved = parse_state(states[k], sizes[k]);
    const Identity theirs = parse_identity(saved.identity);
    if (k == 0) world = theirs.world;
    require(theirs.world == world, "the states are of runs with {} and {} ranks", world, theirs.world);
    require(by_rank.empty() || by_rank.begin()->second.steps == saved.steps,
            "the states are of steps {} and {}", by_rank.begin()->second.steps, saved.steps);
    require(by_rank.emplace(theirs.rank, std::move(saved)).second, "two states are of {}", theirs.place());
  }
  std::vector<Saved> mine;
  for (int r = ours.rank; r < world; r += ours.world) {
    const auto found = by_rank.find(r);
    require(found != by_rank.end(), "{} needs the state that rank {} of {} saved; give it those of all ranks",
            ours.place(), r, world);
    mine.push_back(std::move(found->second));
  }
  if (mine.empty()) {  // a new rank starts from the replicated state
    mine.push_back(std::move(by_rank.begin()->second));
    for (auto& entries : mine[0].entries)
      std::erase_if(entries, [](const SavedEntry& e) { return e.kind == kResidualKind; });
  }
  restore(mine);
}

// Removes the residuals from the states, and returns their non-zero sums by tensor.
std::map<size_t, std::vector<float>> ApiReducer::take_residuals(std::vector<Saved>& from) const {
  std::map<size_t, std::vector<float>> sums;
  for (Saved& state : from) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      std::erase_if(state.entries[i], [&](const SavedEntry& e) {
        if (e.kind != kResidualKind || e.is_zero()) return false;
        require(e.dtype == DType::f32 && e.count == static_cast<uint64_t>(tensors[i].count()),
                "the residual of '{}' has {} elements of {} in the state, {} of F32 in the reducer",
                tensors[i].name, e.count, name(e.dtype), tensors[i].count());
        std::vector<float> values(e.count);
        std::memcpy(values.data(), e.data, e.bytes());
        std::vector<float>& sum = sums[i];
        sum.resize(e.count);
        for (size_t k = 0; k < sum.size(); ++k) sum[k] += values[k];
        return true;
      });
    }
  }
  return sums;
}

// Identifies the ranks whose residuals are in the states.
std::vector<LoadedResidual> ApiReducer::residuals_in(const std::vector<Saved>& from) {
  std::vector<LoadedResidual> found;
  for (const Saved& state : from) {
    uint64_t digest = 0;
    bool zero = true;
    for (const std::vector<SavedEntry>& entries : state.entries) {
      for (const SavedEntry& e : entries) {
        if (e.kind != kResidualKind || e.is_zero()) continue;
        zero = false;
        digest = mix(digest, crc32(e.data, e.bytes()));
      }
    }
    const Identity identity = parse_identity(state.identity);
    if (!zero) found.push_back({identity.rank, identity.world, digest});
  }
  return found;
}

// Checks everything before copying anything: a rejected state must leave the reducer unchanged.
void ApiReducer::restore(std::vector<Saved> from) {
  const int world = comm->communicator->world(), saved_world = parse_identity(from[0].identity).world;
  const bool same_world = saved_world == world;
  std::vector<LoadedResidual> residuals = residuals_in(from);
  std::map<size_t, std::vector<float>> unsent;
  if (world == 1) unsent = take_residuals(from);  // nothing else is kept there
  const std::vector<TensorState> all = reducer.tensor_state();
  std::vector<const char*> sources;      // one for each of `all`; null: zero
  std::vector<std::vector<float>> sums;  // of residuals of several ranks
  for (const TensorState& s : all) {
    std::vector<SavedEntry>& entries = from[0].entries[static_cast<size_t>(s.tensor)];
    const std::string who = fmt::format("'{}' of '{}'", s.kind, tensors[static_cast<size_t>(s.tensor)].name);
    const auto entry =
        std::find_if(entries.begin(), entries.end(), [&](const SavedEntry& e) { return e.kind == s.kind; });
    if (entry == entries.end()) {
      const bool alone = saved_world == 1;  // no codec, hence no factors
      require(s.kind == kResidualKind || alone, "the state has no {}", who);
      sources.push_back(nullptr);
      continue;
    }
    require(entry->count == static_cast<uint64_t>(s.count()) && entry->dtype == s.dtype,
            "{} has {} elements of {} in the state, {} of {} in the reducer", who, entry->count,
            name(entry->dtype), s.count(), name(s.dtype));
    // State that is neither replicated nor summable is reset when the world size changes.
    sources.push_back(same_world || s.same_on_all_ranks || s.kind == kResidualKind ? entry->data : nullptr);
    entries.erase(entry);
  }
  for (size_t k = 1; k < from.size(); ++k) add_residuals(all, from[k].entries, sources, sums);
  // With an FP32 wire a dense tensor has a residual, always zero, only if its bucket also holds a matrix. So
  // leftover entries may be dropped if they are zero.
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const Saved& state : from) {
      for (const SavedEntry& e : state.entries[i]) {
        if ((!same_world || world == 1) && e.kind != kResidualKind) continue;
        require(e.is_zero(), "'{}' has a '{}' in the state only", tensors[i].name, e.kind);
      }
    }
  }

  const FinishOnError finish(comm->stream);  // the caller may free its states
  for (size_t k = 0; k < all.size(); ++k) {
    if (sources[k] != nullptr || all[k].kind == kResidualKind) all[k].clear(comm->stream);
  }
  for (size_t k = 0; k < all.size(); ++k) {
    if (sources[k] == nullptr) continue;
    const auto* source = reinterpret_cast<const std::byte*>(sources[k]);
    all[k].write(comm->stream, 0, {source, static_cast<size_t>(all[k].bytes())});
  }
  comm->stream.synchronize();
  unsent_ = std::move(unsent);
  reducer.resume_at(from[0].steps);
  first_step_ = from[0].steps;
  // Residuals differ between ranks; steps and factors are the same on all of them.
  uint64_t factors = 0;
  for (size_t k = 0; k < all.size(); ++k) {
    if (!all[k].same_on_all_ranks || sources[k] == nullptr) continue;
    factors = mix(factors, crc32(sources[k], static_cast<size_t>(all[k].bytes())));
  }
  loaded_.call.what = fmt::format("{} continues from a loaded state of step {}, factors {:08x}", options.name,
                                  from[0].steps, factors >> 32);
  loaded_.call.hash = mix(0x6c6f6164, loaded_.call.what);
  loaded_.residuals = std::move(residuals);
  loaded_.unannounced = true;
}

}  // namespace gradwire::c_api
