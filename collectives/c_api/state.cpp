// A reducer's checkpoint: one block of memory that says what it is. docs/state-format.md is the reader's side
// of this file; change both together, and kVersion with them.
//
//   header    magic "GRADWIRE", version, CRC-32 of everything after the header, bytes in all, steps, tensors
//   identity  length and text: what the loading reducer must agree in
//   tensors   each: name, rows, cols, and what is kept of it: kind, dtype, elements, and these elements
// Integers and floats are little-endian, lengths are not padded. By tensor and not by bucket, so that a state
// survives another bucket size.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>

#include "collectives/c_api/crc32.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "runtime/mix.h"

namespace gradwire::c_api {
namespace {

static_assert(std::endian::native == std::endian::little, "the state is written in memory order");

constexpr char kMagic[8] = {'G', 'R', 'A', 'D', 'W', 'I', 'R', 'E'};
constexpr uint32_t kVersion = 2;  // 1 can still be read

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

// Version 1 knew two kinds, both of floats, which came without an EntryHeader.
struct TensorHeader1 {
  int64_t rows, cols;
  uint64_t residual_count, factor_count;
  uint64_t name_bytes;
};
static_assert(sizeof(TensorHeader1) == 40);

int64_t rows_of(const GradientTensor& t) {
  return t.shape[0];
}
int64_t cols_of(const GradientTensor& t) {
  return t.shape.size() > 1 ? t.shape[1] : 1;
}

// Walks through foreign bytes without ever leaving them.
class Cursor {
 public:
  Cursor(const void* data, size_t bytes) : at_(static_cast<const char*>(data)), left_(bytes) {}
  const char* take(size_t bytes) {
    require(bytes <= left_, "the state ends too early");
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

// Something kept of a tensor, in the bytes of a state.
struct Entry {
  std::string kind;
  DType dtype = DType::f32;
  uint64_t count = 0;
  const char* data = nullptr;

  size_t bytes() const { return count * static_cast<size_t>(bytes_of(dtype)); }
  bool is_zero() const {
    return std::all_of(data, data + bytes(), [](char c) { return c == 0; });
  }
};

struct SavedTensor {
  int64_t rows = 0, cols = 0;
  std::string name = {};
  std::vector<Entry> entries = {};
};

Entry take_entry(Cursor& cursor, const std::string& tensor, std::string kind, DType dtype, uint64_t count) {
  require(count <= cursor.left() / static_cast<size_t>(bytes_of(dtype)),
          "the state ends too early: '" + kind + "' of '" + tensor + "' has " + std::to_string(count) +
              " elements");
  Entry entry{std::move(kind), dtype, count};
  entry.data = cursor.take(entry.bytes());
  return entry;
}

SavedTensor take_tensor_1(Cursor& cursor) {
  const auto header = cursor.take<TensorHeader1>();
  SavedTensor tensor{.rows = header.rows, .cols = header.cols};
  tensor.name.assign(cursor.take(header.name_bytes), header.name_bytes);
  for (auto [kind, count] :
       {std::pair{kResidualKind, header.residual_count}, std::pair{"factor", header.factor_count}}) {
    if (count > 0) tensor.entries.push_back(take_entry(cursor, tensor.name, kind, DType::f32, count));
  }
  return tensor;
}

SavedTensor take_tensor(Cursor& cursor) {
  const auto header = cursor.take<TensorHeader>();
  SavedTensor tensor{.rows = header.rows, .cols = header.cols};
  tensor.name.assign(cursor.take(header.name_bytes), header.name_bytes);
  for (uint64_t i = 0; i < header.entries; ++i) {
    const auto entry = cursor.take<EntryHeader>();
    const std::string text(entry.dtype, strnlen(entry.dtype, sizeof entry.dtype));
    const std::optional<DType> dtype = find_dtype(text);
    require(dtype.has_value(), "'" + tensor.name + "' has elements of an unknown type, '" + text + "'");
    std::string kind(cursor.take(entry.kind_bytes), entry.kind_bytes);
    tensor.entries.push_back(take_entry(cursor, tensor.name, std::move(kind), *dtype, entry.count));
  }
  return tensor;
}

}  // namespace

std::string ApiReducer::identity() const {
  return "spec " + spec.to_string() + "; rank " + std::to_string(comm->communicator->rank()) + " of " +
         std::to_string(comm->communicator->world()) + "; " + (options.average ? "mean" : "sum") + "; seed " +
         std::to_string(options.seed);
}

size_t ApiReducer::state_size() const {
  size_t bytes = sizeof(Header) + identity().size();
  for (const GradientTensor& t : tensors) bytes += sizeof(TensorHeader) + t.name.size();
  for (const TensorState& s : reducer.tensor_state()) {
    bytes += sizeof(EntryHeader) + s.kind.size() + static_cast<size_t>(s.bytes());
  }
  return bytes;
}

void ApiReducer::save_state(void* state, size_t size) const {
  require(state != nullptr, "state is null");
  require(ready_ == 0, "in the middle of a step; finish it with gw_reducer_wait");
  const size_t bytes = state_size();
  require(size >= bytes, "size is " + std::to_string(size) + ", the state needs " + std::to_string(bytes));
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
    const TensorHeader header{rows_of(t), cols_of(t), static_cast<uint64_t>(end - state_of), t.name.size()};
    put(&header, sizeof header);
    put(t.name.data(), t.name.size());
    for (; state_of != end; ++state_of) {
      EntryHeader entry{{}, static_cast<uint64_t>(state_of->count()), state_of->kind.size()};
      std::memcpy(entry.dtype, name(state_of->dtype), std::strlen(name(state_of->dtype)));
      put(&entry, sizeof entry);
      put(state_of->kind.data(), state_of->kind.size());
      // In stream order, so after the step; elements need not be aligned in the state.
      copy(comm->stream, at, state_of->data, static_cast<size_t>(state_of->bytes()));
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

void ApiReducer::load_state(const void* state, size_t size) {
  require(state != nullptr, "state is null");
  require(ready_ == 0, "in the middle of a step; finish it with gw_reducer_wait");
  // First everything is checked, then everything is copied: a refused state changes nothing.
  Cursor cursor(state, size);
  const auto header = cursor.take<Header>();
  require(std::memcmp(header.magic, kMagic, sizeof kMagic) == 0,
          "this is not a state of gw_reducer_state_save");
  require(header.version >= 1 && header.version <= kVersion,
          "the state has version " + std::to_string(header.version) + ", this library reads versions 1 to " +
              std::to_string(kVersion));
  require(header.bytes == size,
          "the state has " + std::to_string(header.bytes) + " bytes, size is " + std::to_string(size));
  require(header.crc == crc32(static_cast<const char*>(state) + sizeof header, size - sizeof header),
          "the state is damaged: its checksum does not match");
  const std::string text(cursor.take(header.identity_bytes), header.identity_bytes);
  require(text == identity(),
          "the state is of another reducer: '" + text + "', this one is '" + identity() + "'");
  require(header.tensors == tensors.size(), "the state has " + std::to_string(header.tensors) +
                                                " tensors, the reducer " + std::to_string(tensors.size()));
  require(header.steps >= 0, "the state has " + std::to_string(header.steps) + " steps");

  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  std::vector<std::vector<Entry>> saved(tensors.size());
  for (uint32_t k = 0; k < header.tensors; ++k) {
    SavedTensor t = header.version == 1 ? take_tensor_1(cursor) : take_tensor(cursor);
    const auto found = index.find(t.name);
    require(found != index.end(),
            "the state has a tensor '" + t.name + "', the reducer has not, or it comes twice");
    const size_t i = found->second;
    index.erase(found);
    require(t.rows == rows_of(tensors[i]) && t.cols == cols_of(tensors[i]),
            "tensor '" + t.name + "' is " + std::to_string(t.rows) + " x " + std::to_string(t.cols) +
                " in the state, " + std::to_string(rows_of(tensors[i])) + " x " +
                std::to_string(cols_of(tensors[i])) + " in the reducer");
    saved[i] = std::move(t.entries);
  }
  require(cursor.left() == 0, "the state has bytes after its end");

  const std::vector<TensorState> all = reducer.tensor_state();
  std::vector<const char*> sources;  // one for each of `all`; null: zero
  for (const TensorState& s : all) {
    std::vector<Entry>& entries = saved[static_cast<size_t>(s.tensor)];
    const std::string who = "'" + s.kind + "' of '" + tensors[static_cast<size_t>(s.tensor)].name + "'";
    const auto entry =
        std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.kind == s.kind; });
    if (entry == entries.end()) {
      require(s.kind == kResidualKind, "the state has no " + who);
      sources.push_back(nullptr);
      continue;
    }
    require(entry->count == static_cast<uint64_t>(s.count()) && entry->dtype == s.dtype,
            who + " has " + std::to_string(entry->count) + " elements of " + name(entry->dtype) +
                " in the state, " + std::to_string(s.count()) + " of " + name(s.dtype) + " in the reducer");
    sources.push_back(entry->data);
    entries.erase(entry);
  }
  // A dense tensor on an FP32 wire has a residual, always zero, only in the company of a matrix. So what is
  // left may go if it is zero.
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const Entry& e : saved[i]) {
      require(e.is_zero(), "'" + tensors[i].name + "' has a '" + e.kind + "' in the state only");
    }
  }

  for (size_t k = 0; k < all.size(); ++k) {
    const auto bytes = static_cast<size_t>(all[k].bytes());
    if (sources[k] == nullptr) {
      fill_zero(comm->stream, all[k].data, bytes);
    } else {
      copy(comm->stream, all[k].data, sources[k], bytes);
    }
  }
  comm->stream.synchronize();
  reducer.resume_at(header.steps);
  first_step_ = header.steps;
  // Residuals are each rank's own; steps and factors are the same on all of them.
  uint64_t factors = 0;
  for (size_t k = 0; k < all.size(); ++k) {
    if (!all[k].same_on_all_ranks || sources[k] == nullptr) continue;
    factors = mix(factors, crc32(sources[k], static_cast<size_t>(all[k].bytes())));
  }
  char loaded[96];
  std::snprintf(loaded, sizeof loaded, "state of step %lld, factors %08x",
                static_cast<long long>(header.steps), static_cast<unsigned>(factors >> 32));
  loaded_.what = options.name + " goes on from a loaded " + loaded;
  loaded_.hash = mix(0x6c6f6164, loaded_.what);
  loaded_unannounced_ = true;
}

}  // namespace gradwire::c_api
