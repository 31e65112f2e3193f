// A reducer's checkpoint: one block of memory that says what it is. docs/state-format.md is the reader's side
// of this file; change both together, and kVersion with them.
//
//   header    magic "GRADWIRE", version, CRC-32 of everything behind the header, bytes in all, steps, tensors
//   identity  length and text: what the loading reducer must agree in
//   tensors   each: name, rows, cols, floats of residual (0 or rows * cols), floats of Q (0 or cols * rank),
//             then these floats
// Integers and floats are little-endian, lengths are not padded. By tensor and not by bucket, so that a state
// survives another bucket size.
#include <zlib.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/reducer.h"
#include "runtime/mix.h"

namespace gradwire::c_api {
namespace {

static_assert(std::endian::native == std::endian::little, "the state is written in memory order");

constexpr char kMagic[8] = {'G', 'R', 'A', 'D', 'W', 'I', 'R', 'E'};
constexpr uint32_t kVersion = 1;

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
  int64_t residual_count, q_count;
  uint64_t name_bytes;
};
static_assert(sizeof(TensorHeader) == 40);

uint32_t crc_of(const void* data, size_t bytes) {
  uint32_t crc = 0;
  const auto* at = static_cast<const unsigned char*>(data);
  for (; bytes > 0;) {  // zlib counts in 32 bits
    const auto part = static_cast<uInt>(std::min<size_t>(bytes, size_t{1} << 30));
    crc = static_cast<uint32_t>(crc32(crc, at, part));
    at += part, bytes -= part;
  }
  return crc;
}

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

}  // namespace

std::string ApiReducer::identity() const {
  return "spec " + spec.to_string() + "; rank " + std::to_string(comm->communicator->rank()) + " of " +
         std::to_string(comm->communicator->world()) + "; " + (options.average ? "mean" : "sum") + "; seed " +
         std::to_string(options.seed);
}

std::vector<ApiReducer::Kept> ApiReducer::kept() const {
  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  std::vector<Kept> kept(tensors.size());
  for (const CodecState& s : reducer.state()) {
    if (s.first_element >= 0) {  // a bucket's residual: cut it into tensors
      for (size_t i = 0; i < tensors.size(); ++i) {
        const int64_t begin = reducer.offset(static_cast<int>(i)) - s.first_element;
        const int64_t count = rows_of(tensors[i]) * cols_of(tensors[i]);
        if (begin < 0 || begin + count > s.count || count == 0) continue;
        kept[i].residual = s.data + begin;
        kept[i].count = count;
      }
    } else {  // "bucket3/q/NAME"
      const size_t slash = s.name.find('/');
      const auto at = index.find(s.name.substr(slash + 3));
      if (s.name.compare(slash, 3, "/q/") != 0 || at == index.end()) {
        throw Error("state '" + s.name + "' has no place in a checkpoint");
      }
      kept[at->second].q = s.data;
      kept[at->second].q_count = s.count;
    }
  }
  return kept;
}

size_t ApiReducer::state_size() const {
  size_t bytes = sizeof(Header) + identity().size();
  const auto all = kept();
  for (size_t i = 0; i < tensors.size(); ++i) {
    bytes += sizeof(TensorHeader) + tensors[i].name.size() +
             static_cast<size_t>(all[i].count + all[i].q_count) * sizeof(float);
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
  const auto all = kept();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const GradientTensor& t = tensors[i];
    const TensorHeader header{rows_of(t), cols_of(t), all[i].count, all[i].q_count, t.name.size()};
    put(&header, sizeof header);
    put(t.name.data(), t.name.size());
    for (auto [data, count] :
         {std::pair{all[i].residual, all[i].count}, std::pair{all[i].q, all[i].q_count}}) {
      // In stream order, so behind the step; the floats need not be aligned in the state.
      copy(comm->stream, at, data, static_cast<size_t>(count) * sizeof(float));
      at += static_cast<size_t>(count) * sizeof(float);
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
  header.crc = crc_of(static_cast<char*>(state) + sizeof header, bytes - sizeof header);
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
  require(header.version == kVersion, "the state has version " + std::to_string(header.version) +
                                          ", this library reads version " + std::to_string(kVersion));
  require(header.bytes == size,
          "the state has " + std::to_string(header.bytes) + " bytes, size is " + std::to_string(size));
  require(header.crc == crc_of(static_cast<const char*>(state) + sizeof header, size - sizeof header),
          "the state is damaged: its checksum does not match");
  const std::string text(cursor.take(header.identity_bytes), header.identity_bytes);
  require(text == identity(),
          "the state is of another reducer: '" + text + "', this one is '" + identity() + "'");
  require(header.tensors == tensors.size(), "the state has " + std::to_string(header.tensors) +
                                                " tensors, the reducer " + std::to_string(tensors.size()));
  require(header.steps >= 0, "the state has " + std::to_string(header.steps) + " steps");

  std::map<std::string, size_t> index;
  for (size_t i = 0; i < tensors.size(); ++i) index[tensors[i].name] = i;
  auto all = kept();
  std::vector<std::pair<const char*, const char*>> sources(tensors.size());  // residual, Q; null: zero
  for (uint32_t k = 0; k < header.tensors; ++k) {
    const auto t = cursor.take<TensorHeader>();
    const std::string name(cursor.take(t.name_bytes), t.name_bytes);
    const auto found = index.find(name);
    require(found != index.end(),
            "the state has a tensor '" + name + "', the reducer has not, or it comes twice");
    const size_t i = found->second;
    index.erase(found);
    require(t.rows == rows_of(tensors[i]) && t.cols == cols_of(tensors[i]),
            "tensor '" + name + "' is " + std::to_string(t.rows) + " x " + std::to_string(t.cols) +
                " in the state, " + std::to_string(rows_of(tensors[i])) + " x " +
                std::to_string(cols_of(tensors[i])) + " in the reducer");
    require(t.residual_count == 0 || t.residual_count == t.rows * t.cols,
            "the residual of '" + name + "' has " + std::to_string(t.residual_count) + " elements");
    require(t.q_count == all[i].q_count, "the factor of '" + name + "' has " + std::to_string(t.q_count) +
                                             " elements in the state, " + std::to_string(all[i].q_count) +
                                             " in the reducer");
    const size_t residual_bytes = static_cast<size_t>(t.residual_count) * sizeof(float);
    const char* residual = cursor.take(residual_bytes);
    const char* q = cursor.take(static_cast<size_t>(t.q_count) * sizeof(float));
    // A dense tensor on an FP32 wire has a residual, always zero, only in the company of a matrix.
    const bool all_zero = std::all_of(residual, residual + residual_bytes, [](char c) { return c == 0; });
    require(all[i].residual != nullptr || all_zero, "'" + name + "' has a residual in the state only");
    sources[i] = {all_zero ? nullptr : residual, q};
  }
  require(cursor.left() == 0, "the state has bytes behind its end");

  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t residual_bytes = static_cast<size_t>(all[i].count) * sizeof(float);
    if (sources[i].first == nullptr) {
      fill_zero(comm->stream, all[i].residual, residual_bytes);
    } else {
      copy(comm->stream, all[i].residual, sources[i].first, residual_bytes);
    }
    copy(comm->stream, all[i].q, sources[i].second, static_cast<size_t>(all[i].q_count) * sizeof(float));
  }
  comm->stream.synchronize();
  reducer.resume_at(header.steps);
  first_step_ = header.steps;
  // Residuals are each rank's own; steps and factors are the same on all of them.
  uint64_t factors = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    factors = mix(factors, crc_of(sources[i].second, static_cast<size_t>(all[i].q_count) * sizeof(float)));
  }
  char loaded[96];
  std::snprintf(loaded, sizeof loaded, "state of step %lld, factors %08x",
                static_cast<long long>(header.steps), static_cast<unsigned>(factors >> 32));
  loaded_.what = options.name + " goes on from a loaded " + loaded;
  loaded_.hash = mix(0x6c6f6164, loaded_.what);
  loaded_unannounced_ = true;
}

}  // namespace gradwire::c_api
