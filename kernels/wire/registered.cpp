// Registered formats: sums, residuals and padding around a program's encode and decode.
//
// A call of a callback processes about a million values, so that a bucket enters an interpreter only a few
// times. The callback's output goes to scratch memory with a guard on either side, and is then copied to its
// destination. Pieces depend on the count alone, so that all ranks decode a chunk in calls of the same size.
// A callback whose rounding depends on the size, such as a matrix product, therefore still gives all ranks
// the same bits.
#include "kernels/wire/registered.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/wire/format.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr int64_t kValuesPerCall = 1 << 20;
constexpr int kTrialBlocks = 4;

thread_local int callbacks_running = 0;
struct Running {
  Running() { ++callbacks_running; }
  ~Running() { --callbacks_running; }
};

std::string sizes(int64_t block, int64_t bytes) {
  return fmt::format("blocks of {} values in {} bytes", block, bytes);
}

// A buffer for a callback's output, between two guards that detect writes beyond it.
class GuardedBytes {
 public:
  // Returns `size` bytes, aligned to 64, each set to `fill`.
  uint8_t* prepare(size_t size, size_t guard, uint8_t fill = 0) {
    guard_ = (guard + 63) / 64 * 64;
    size_ = size;
    if (const size_t all = size + 2 * guard_; all > room_) {
      memory_.reset(static_cast<uint8_t*>(::operator new (all, std::align_val_t{64})));
      room_ = all;
    }
    std::memset(memory_.get(), kGuard, guard_);
    std::memset(data(), fill, size);
    std::memset(data() + size, kGuard, guard_);
    return data();
  }
  bool intact() const {
    const std::vector<uint8_t> guard(guard_, kGuard);
    return std::memcmp(memory_.get(), guard.data(), guard_) == 0 &&
           std::memcmp(data() + size_, guard.data(), guard_) == 0;
  }
  uint8_t* data() const { return memory_.get() + guard_; }

 private:
  static constexpr uint8_t kGuard = 0xc3;
  struct Free {
    void operator()(uint8_t* memory) const { ::operator delete (memory, std::align_val_t{64}); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  size_t room_ = 0, size_ = 0, guard_ = 0;
};

// Scratch memory for ops; one per thread.
struct Scratch {
  std::vector<float> sum, own;
  GuardedBytes bytes, values;
};
Scratch& scratch() {
  static PerThread<Scratch> of_this_thread;
  return of_this_thread.get();
}

// Returns the residual of s if `sent` is sent: s itself where `sent` is not finite.
float rest_of(float s, float sent, float unit) {
  if (!is_finite(s)) return 0.0f;
  const float rest = is_finite(sent) ? s - sent : s;
  return to_residual(is_finite(rest) ? rest : std::copysign(0x1.fffffep127f, rest), unit);
}

class RegisteredFormat final : public WireFormat {
 public:
  RegisteredFormat(const std::string& its_name, int64_t block, int64_t block_bytes,
                   const FormatCallbacks& callbacks)
      : own_name_(its_name), block_(block), block_bytes_(block_bytes), callbacks_(callbacks) {
    name = own_name_.c_str();
    summary = "registered by this program";
    granularity = block;
    registered = true;
  }

  double error_bound(Rounding) const override { return 0; }
  int64_t bytes(int64_t count) const override { return (count + block_ - 1) / block_ * block_bytes_; }
  void reduce_encode(const Stream& stream, const ReduceEncode& args) const override {
    enqueue(stream, [this, args] { reference_reduce_encode(args); });
  }
  void decode(const Stream& stream, const Decode& args) const override {
    enqueue(stream, [this, args] { reference_decode(args); });
  }
  void reference_reduce_encode(const ReduceEncode& a) const override {
    for_pieces(a.count, [&](int64_t first, int64_t blocks) { reduce_encode_piece(a, first, blocks); });
  }
  void reference_decode(const Decode& a) const override {
    for_pieces(a.count, [&](int64_t first, int64_t blocks) {
      const float* values = decoded(a.wire, first, blocks);
      const int64_t begin = first * block_, count = std::min(blocks * block_, a.count - begin);
      for (int64_t i = 0; i < count; ++i) {
        a.out[begin + i] = a.scale * values[i];
        if (a.residual != nullptr && !is_finite(values[i])) a.residual[begin + i] = 0.0f;
      }
    });
  }

  // Throws unless a format of this name may be registered again with these sizes.
  void require_sizes(int64_t block, int64_t block_bytes) const {
    if (block == block_ && block_bytes == block_bytes_) return;
    throw BadInput("wire format '{}' is registered with {}, which cannot become {}; choose another name",
                   name, sizes(block_, block_bytes_), sizes(block, block_bytes));
  }
  // Replaces the callbacks, which are not part of a format's identity.
  void use(const FormatCallbacks& callbacks) const {
    std::lock_guard lock(mutex_);
    callbacks_ = callbacks;
  }

  // Tries both callbacks on a few blocks. Throws unless they write all bytes of their output and no other
  // bytes.
  void try_out() const;

 private:
  template <typename Op>
  void enqueue(const Stream& stream, const Op& op) const {
    if (!stream.device().is_host()) {
      throw BadInput(
          "wire format '{}' was registered with callbacks for the host, and the stream "
          "is on {}",
          name, stream.device().name());
    }
    stream.submit(op);
  }
  template <typename Piece>
  void for_pieces(int64_t count, const Piece& piece) const {
    const int64_t blocks = (count + block_ - 1) / block_;
    const int64_t most = std::max<int64_t>(1, kValuesPerCall / std::max(block_, block_bytes_ / 16));
    for (int64_t first = 0; first < blocks; first += most) piece(first, std::min(most, blocks - first));
  }
  FormatCallbacks callbacks() const {
    std::lock_guard lock(mutex_);
    return callbacks_;
  }

  // Calls a callback that writes `out`. Throws the callback's error, or an error if the callback wrote beyond
  // `out`.
  template <typename Callback>
  void call(const char* which, const GuardedBytes& out, const Callback& callback) const {
    const Running running;
    const char* problem = callback(callbacks());
    if (problem != nullptr) throw CommError("wire format '{}': {}: {}", name, which, problem);
    if (!out.intact()) {
      throw CommError(
          "wire format '{}': {} wrote outside of the memory that it was given; it is "
          "registered with {}",
          name, which, sizes(block_, block_bytes_));
    }
  }
  // Encodes (blocks, block) values; the returned bytes are valid until the next call of encoded().
  const uint8_t* encoded(const float* values, int64_t blocks, uint8_t fill = 0) const {
    GuardedBytes& to = scratch().bytes;
    to.prepare(static_cast<size_t>(blocks * block_bytes_), guard(block_bytes_), fill);
    call("encode", to, [&](const FormatCallbacks& c) { return c.encode(c.user, values, blocks, to.data()); });
    return to.data();
  }
  const float* decoded(const void* wire, int64_t first, int64_t blocks, uint8_t fill = 0) const {
    GuardedBytes& to = scratch().values;
    const auto block_size = static_cast<int64_t>(sizeof(float)) * block_;
    to.prepare(static_cast<size_t>(blocks * block_size), guard(block_size), fill);
    auto* values = reinterpret_cast<float*>(to.data());
    const uint8_t* from = static_cast<const uint8_t*>(wire) + first * block_bytes_;
    call("decode", to, [&](const FormatCallbacks& c) { return c.decode(c.user, from, blocks, values); });
    return values;
  }
  // Returns the guard's size in bytes. A callback that assumes blocks of up to twice the size stays within
  // the guard.
  static size_t guard(int64_t block_bytes) {
    return 4096 + static_cast<size_t>(kTrialBlocks) * static_cast<size_t>(block_bytes);
  }

  const float* sum(const ReduceEncode& a, int64_t first, int64_t begin, int64_t count, int64_t blocks) const;
  void reduce_encode_piece(const ReduceEncode& a, int64_t first, int64_t blocks) const;

  const std::string own_name_;
  const int64_t block_, block_bytes_;
  mutable std::mutex mutex_;
  mutable FormatCallbacks callbacks_;
};

// Returns S of `count` values starting at `begin`, as in format.h, followed by zeros.
const float* RegisteredFormat::sum(const ReduceEncode& a, int64_t first, int64_t begin, int64_t count,
                                   int64_t blocks) const {
  Scratch& s = scratch();
  s.sum.assign(static_cast<size_t>(blocks * block_), 0.0f);
  s.own.resize(s.sum.size());
  for (int64_t i = 0; i < count; ++i) {
    s.own[i] = a.own[begin + i];
    if (a.residual != nullptr) s.own[i] += a.residual_scale * a.residual[begin + i];
  }
  for (int term = 0; term <= a.num_inputs; ++term) {
    const int input = term < a.own_position ? term : term - 1;
    const float* x = term == a.own_position ? s.own.data() : decoded(a.inputs[input], first, blocks);
    const float scale = term == a.own_position ? a.own_scale : a.input_scale(input);
    for (int64_t i = 0; i < count; ++i) s.sum[i] = term == 0 ? scale * x[i] : s.sum[i] + scale * x[i];
  }
  return s.sum.data();
}

void RegisteredFormat::reduce_encode_piece(const ReduceEncode& a, int64_t first, int64_t blocks) const {
  const int64_t begin = first * block_, count = std::min(blocks * block_, a.count - begin);
  const float* s = sum(a, first, begin, count, blocks);
  const float* sent = s;
  if (a.wire != nullptr) {
    uint8_t* wire = static_cast<uint8_t*>(a.wire);
    std::memcpy(wire + first * block_bytes_, encoded(s, blocks), static_cast<size_t>(blocks * block_bytes_));
    if (a.residual == nullptr && a.out == nullptr) return;
    sent = decoded(wire, first, blocks);
  }
  if (a.residual != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      a.residual[begin + i] = a.wire != nullptr ? rest_of(s[i], sent[i], residual_unit(a)) : 0.0f;
    }
  }
  if (a.out != nullptr) {
    for (int64_t i = 0; i < count; ++i) a.out[begin + i] = a.out_scale * sent[i];
  }
}

// Throws if a callback left a byte of the trial blocks unwritten. `results` are its outputs over each fill;
// an unwritten byte equals the fill every time. (A random byte equals all fills with probability 2^-64.)
constexpr std::array<uint8_t, 8> kFills = {0x5a, 0xa5, 0x0f, 0xf0, 0x33, 0xcc, 0x96, 0x69};
void require_all_written(const std::string& callback, const std::array<std::vector<uint8_t>, 8>& results,
                         size_t unit, const char* unit_name) {
  for (size_t at = 0; at < results[0].size(); ++at) {
    bool kept = true;
    for (size_t k = 0; k < kFills.size(); ++k) kept &= results[k][at] == kFills[k];
    if (!kept) continue;
    throw CommError("{} of {} blocks does not write {} {} of {}", callback, kTrialBlocks, unit_name,
                    at / unit, results[0].size() / unit);
  }
}

void RegisteredFormat::try_out() const {
  // The input is longer than needed, because a callback that assumes larger blocks reads beyond them.
  const auto count = static_cast<size_t>(kTrialBlocks * block_);
  std::vector<float> values(count + guard(4 * block_) / sizeof(float));
  uint32_t state = 1;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  std::array<std::vector<uint8_t>, 8> wires, results;
  for (size_t k = 0; k < kFills.size(); ++k) {
    const uint8_t* result = encoded(values.data(), kTrialBlocks, kFills[k]);
    wires[k].assign(result, result + kTrialBlocks * block_bytes_);
  }
  require_all_written(fmt::format("wire format '{}': encode", name), wires, 1, "byte");
  std::vector<uint8_t> wire(wires[0].size() + guard(block_bytes_));
  std::copy(wires[0].begin(), wires[0].end(), wire.begin());
  for (size_t k = 0; k < kFills.size(); ++k) {
    const auto* result = reinterpret_cast<const uint8_t*>(decoded(wire.data(), 0, kTrialBlocks, kFills[k]));
    results[k].assign(result, result + count * sizeof(float));
  }
  require_all_written(fmt::format("wire format '{}': decode", name), results, sizeof(float), "value");
}

}  // namespace

bool in_format_callback() {
  return callbacks_running > 0;
}

void register_wire_format(const std::string& name, int64_t block, int64_t bytes,
                          const FormatCallbacks& callbacks) {
  constexpr const char* kInNames = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  if (name.empty() || name.size() > 64 || name.find_first_not_of(kInNames) != std::string::npos) {
    throw BadInput("wire format '{}': a name has 1 to 64 letters, digits and '_', and nothing else", name);
  }
  const auto check = [&](const char* what, int64_t value, int64_t most, const char* unit) {
    if (value < 1 || value > most) {
      throw BadInput("wire format '{}': {} is {}, must be 1 to {} {}", name, what, value, most, unit);
    }
  };
  check("block", block, kMaxRegisteredBlock, "values");
  check("bytes", bytes, kMaxRegisteredBytes, "bytes of a block");
  if (const Wire taken = find_wire_format(name)) {
    if (!taken->registered) {
      throw BadInput("wire format '{}' is one of Gradwire's own; choose another name", name);
    }
    dynamic_cast<const RegisteredFormat&>(*taken).require_sizes(block, bytes);
  }
  auto made = std::make_unique<RegisteredFormat>(name, block, bytes, callbacks);
  try {
    made->try_out();
  } catch (const CommError& error) {
    throw BadInput(error.what());
  }
  const auto& entry = dynamic_cast<const RegisteredFormat&>(*add_wire_format(std::move(made)));
  entry.require_sizes(block, bytes);  // checks again: another thread may have registered the name first
  entry.use(callbacks);
}

}  // namespace gradwire
