#include "collectives/codec/residual.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "collectives/codec/codec.h"
#include "kernels/wire/floats.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

// Parts begin at multiples of this many elements, so that they hold whole blocks of every format and begin at
// an aligned byte.
constexpr int64_t kPart = 2048;

}  // namespace

void decay_residual(const Stream& stream, float* residual, int64_t count, float decay) {
  fp32_reduce(stream, {.own = residual, .out = residual, .scale = decay, .count = count});
}

Residual::Residual(const BucketContext& c, bool needed)
    : format_(c.spec.residual),
      count_(needed ? c.elements : 0),
      decay_(static_cast<float>(c.spec.policy.decay)),
      stored_(c.transport->device(), static_cast<size_t>(format_->bytes(count_))),
      // Mix the seed, because the wire uses the rank's seed unmixed.
      rounding_{Rounding::stochastic, mix(c.rounding_seed, kResidualKind), c.step, c.first_element} {
  if (!encoded()) values_ = stored_.as<float>();
  fill_zero(c.stream, stored_.data(), stored_.bytes());  // zero in every format
}

size_t Residual::workspace_bytes() const {
  return encoded() ? (static_cast<size_t>(count_) * sizeof(float) + 255) / 256 * 256 : 0;
}

void* Residual::bind(void* workspace) {
  if (encoded()) values_ = static_cast<float*>(workspace);
  return static_cast<std::byte*>(workspace) + workspace_bytes();
}

void Residual::load(const Stream& stream, BucketPhases& phases, bool begins_step) const {
  const float decay = begins_step ? decay_ : 1.0f;
  if (!encoded() && (decay == 1.0f || count_ == 0)) return;
  phases.enter(stream, Phase::compress);
  if (encoded()) {
    decode(stream, {0, count_}, decay);
  } else {
    settle(stream);
    decay_residual(stream, values_, count_, decay);
  }
}

void Residual::store(const Stream& stream, BucketPhases& phases) const {
  if (!encoded()) return;
  phases.enter(stream, Phase::decompress);
  encode(stream, {0, count_}, rounding_);
}

std::string Residual::describe() const {
  if (count_ == 0) return "";
  return fmt::format(" with error feedback{}{}", encoded() ? " in " : "", encoded() ? format_->name : "");
}

std::byte* Residual::value_bytes(int64_t first_byte) const {
  return reinterpret_cast<std::byte*>(values_) + first_byte;
}

void Residual::decode(const Stream& stream, ElementRange part, float scale) const {
  format_->decode(stream, {.wire = stored_.as<const std::byte>() + format_->bytes(part.begin),
                           .out = values_ + part.begin,
                           .scale = scale,
                           .count = part.count()});
}

void Residual::encode(const Stream& stream, ElementRange part, const WireRounding& rounding) const {
  ReduceEncode args{.own = values_ + part.begin,
                    .wire = stored_.as<std::byte>() + format_->bytes(part.begin),
                    .count = part.count(),
                    .rounding = rounding};
  format_->reduce_encode(stream, args);
}

ElementRange Residual::open(const Stream& stream, int64_t first_byte, int64_t bytes) const {
  const int64_t end = (first_byte + bytes + 3) / 4;
  if (settle_) settle_(stream, first_byte / 4, end);
  const ElementRange part{first_byte / 4 / kPart * kPart,
                          std::min(count_, (end + kPart - 1) / kPart * kPart)};
  if (encoded()) decode(stream, part);
  return part;
}

void Residual::read(const Stream& stream, int64_t first_byte, std::span<std::byte> to) const {
  open(stream, first_byte, static_cast<int64_t>(to.size()));
  copy(stream, to.data(), value_bytes(first_byte), to.size());
}

// Writes values, rounded to nearest. The decoded values of a block are multiples of the block's unit, so they
// encode exactly, even if zeros replace some of the values. The same holds for the neighbours of the written
// values.
void Residual::write(const Stream& stream, int64_t first_byte, std::span<const std::byte> from) const {
  const ElementRange part = open(stream, first_byte, static_cast<int64_t>(from.size()));
  written_ = true;
  copy(stream, value_bytes(first_byte), from.data(), from.size());
  if (encoded()) encode(stream, part, {});
}

void Residual::clear(const Stream& stream, int64_t first_byte, int64_t bytes) const {
  const ElementRange part = open(stream, first_byte, bytes);
  fill_zero(stream, value_bytes(first_byte), static_cast<size_t>(bytes));
  if (encoded()) encode(stream, part, {});
}

std::vector<int> merged_ranks(int rank, int world, int saved_world) {
  std::vector<int> ranks;
  for (int r = rank; r < saved_world; r += world) ranks.push_back(r);
  return ranks;
}

void add_residual(std::vector<float>& sum, const void* residual, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::memcpy(values.data(), residual, values.size() * sizeof(float));
  if (sum.empty()) return sum.swap(values);
  for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
}

void TensorState::read(const Stream& stream, size_t first_byte, std::span<std::byte> to) const {
  if (residual != nullptr) return residual->read(stream, 4 * first + static_cast<int64_t>(first_byte), to);
  copy(stream, to.data(), static_cast<const std::byte*>(data) + first_byte, to.size());
}

void TensorState::write(const Stream& stream, size_t first_byte, std::span<const std::byte> from) const {
  if (residual != nullptr) return residual->write(stream, 4 * first + static_cast<int64_t>(first_byte), from);
  copy(stream, static_cast<std::byte*>(data) + first_byte, from.data(), from.size());
}

void TensorState::clear(const Stream& stream) const {
  if (residual != nullptr) return residual->clear(stream, 4 * first, bytes());
  fill_zero(stream, data, static_cast<size_t>(bytes()));
}

}  // namespace gradwire
