#include "collectives/c_api/saved_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <optional>

#include "collectives/c_api/errors.h"
#include "runtime/util/crc32.h"

namespace gradwire::c_api {
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
