// Cases of the wire formats, packing and the optimizers: one flat array of `size` bytes of floats.
#include "bench/cases/kernel_cases.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/powersgd/pack.h"
#include "kernels/wire/formats.h"

namespace gradwire::bench {
namespace {

std::string elements(int64_t count) {
  return std::to_string(count);
}

// What BF16 and FP8 have in common; only the element of the wire and its length differ.
struct Bf16Format {
  using Element = uint16_t;
  using Encode = Bf16Encode;
  using Decode = Bf16Decode;
  using DecodeAdd = Bf16DecodeAdd;
  using Hop = Bf16DecodeAddEncode;
  static constexpr double kBytes = 2;
  static int64_t length(int64_t count) { return count; }
  static constexpr auto encode = bf16_encode;
  static constexpr auto decode = bf16_decode;
  static constexpr auto decode_add = bf16_decode_add;
  static constexpr auto hop = bf16_decode_add_encode;
};
struct Fp8Format {
  using Element = uint8_t;
  using Encode = Fp8Encode;
  using Decode = Fp8Decode;
  using DecodeAdd = Fp8DecodeAdd;
  using Hop = Fp8DecodeAddEncode;
  static constexpr double kBytes = 1;
  static int64_t length(int64_t count) { return fp8_wire_bytes(count); }
  static constexpr auto encode = fp8_encode;
  static constexpr auto decode = fp8_decode;
  static constexpr auto decode_add = fp8_decode_add;
  static constexpr auto hop = fp8_decode_add_encode;
};

template <typename Format, bool kResidual, Rounding kRounding = Rounding::nearest>
Problem encode(Arena& arena, int64_t size) {
  typename Format::Encode args{
      .grad = arena.normal(size / 4),
      .residual = kResidual ? arena.zeros<float>(size / 4) : nullptr,
      .wire = arena.zeros<typename Format::Element>(Format::length(size / 4)),
      .count = size / 4,
  };
  args.rounding.mode = kRounding;
  double bytes = 4 + Format::kBytes + (kResidual ? 8 : 0);
  return {[args](const Stream& s) { Format::encode(s, args); }, bytes * static_cast<double>(args.count), 0,
          elements(args.count)};
}

// A wire to decode: what encoding normal draws gives.
template <typename Format>
const typename Format::Element* encoded(Arena& arena, int64_t count) {
  auto* wire = arena.zeros<typename Format::Element>(Format::length(count));
  Format::encode(arena.stream(), {.grad = arena.normal(count), .wire = wire, .count = count});
  return wire;
}

template <typename Format>
Problem decode(Arena& arena, int64_t size) {
  typename Format::Decode args{
      .wire = encoded<Format>(arena, size / 4), .out = arena.zeros<float>(size / 4), .count = size / 4};
  return {[args](const Stream& s) { Format::decode(s, args); },
          (4 + Format::kBytes) * static_cast<double>(args.count), 0, elements(args.count)};
}

template <typename Format>
Problem decode_add(Arena& arena, int64_t size) {
  typename Format::DecodeAdd args{
      .wire = encoded<Format>(arena, size / 4), .acc = arena.zeros<float>(size / 4), .count = size / 4};
  return {[args](const Stream& s) { Format::decode_add(s, args); },
          (8 + Format::kBytes) * static_cast<double>(args.count), 0, elements(args.count)};
}

// `kInputs` contributions meet this rank's own: 1 is a hop of a ring, 7 the owner of a two-shot of 8.
template <typename Format, int kInputs>
Problem hop(Arena& arena, int64_t size) {
  typename Format::Hop args;
  args.count = size / 4;
  for (int i = 0; i < kInputs; ++i) {
    auto* input = arena.zeros<typename Format::Element>(Format::length(args.count));
    args.inputs[i] = input;
    if (i == 0)
      Format::encode(arena.stream(), {.grad = arena.normal(args.count), .wire = input, .count = args.count});
    if (i > 0)
      copy(arena.stream(), input, args.inputs[0],
           sizeof(*input) * static_cast<size_t>(Format::length(args.count)));
  }
  args.num_inputs = kInputs;
  args.own_position = kInputs / 2;
  args.grad = arena.normal(args.count);
  args.residual = arena.zeros<float>(args.count);
  args.wire = arena.zeros<typename Format::Element>(Format::length(args.count));
  return {[args](const Stream& s) { Format::hop(s, args); },
          (12 + Format::kBytes * (1 + kInputs)) * static_cast<double>(args.count), 0, elements(args.count)};
}

template <int kInputs>
Problem reduce(Arena& arena, int64_t size) {
  Fp32Reduce args;
  args.count = size / 4;
  for (int i = 0; i < kInputs; ++i) args.inputs[i] = arena.normal(args.count);
  args.num_inputs = kInputs;
  args.acc = arena.normal(args.count);
  args.scale = 1.0f / (kInputs + 1);
  return {[args](const Stream& s) { fp32_reduce(s, args); },
          (8.0 + 4 * kInputs) * static_cast<double>(args.count), 0, elements(args.count)};
}

// The vectors of a ViT: pieces of 768 floats that lie four times as far apart.
template <bool kUnpack>
Problem packing(Arena& arena, int64_t size) {
  constexpr int64_t kPiece = 768;
  std::vector<Segment> segments;
  int64_t count = size / 4;
  for (int64_t done = 0; done < count; done += kPiece) {
    segments.push_back({4 * done, done, std::min(kPiece, count - done)});
  }
  std::string shape = std::to_string(segments.size()) + " x " + std::to_string(std::min(kPiece, count));
  Pack args{.table = arena.make<SegmentTable>(arena.stream(), std::move(segments)),
            .scattered = arena.zeros<float>(4 * count),
            .packed = arena.zeros<float>(count),
            .unpack = kUnpack};
  return {[args](const Stream& s) { pack(s, args); }, 8.0 * static_cast<double>(count), 0, shape};
}

OptimizerScalars* scalars(Arena& arena) {
  auto* out = arena.zeros<OptimizerScalars>(1);
  OptimizerScalars value{.lr = 1e-6f, .correction1 = 0.9f, .correction2 = 0.9f};
  store(arena.stream(), out, &value, sizeof value);
  return out;
}

template <bool kMomentum>
Problem sgd(Arena& arena, int64_t size) {
  SgdStep args{.params = arena.normal(size / 4),
               .grads = arena.normal(size / 4),
               .velocity = kMomentum ? arena.zeros<float>(size / 4) : nullptr,
               .count = size / 4,
               .momentum = kMomentum ? 0.9f : 0.0f,
               .scalars = scalars(arena)};
  return {[args](const Stream& s) { sgd_step(s, args); },
          (kMomentum ? 20.0 : 12.0) * static_cast<double>(args.count), 0, elements(args.count)};
}

Problem adamw(Arena& arena, int64_t size) {
  AdamWStep args{.params = arena.normal(size / 4),
                 .grads = arena.normal(size / 4),
                 .m = arena.zeros<float>(size / 4),
                 .v = arena.filled(size / 4, 1.0f),
                 .count = size / 4,
                 .scalars = scalars(arena)};
  return {[args](const Stream& s) { adamw_step(s, args); }, 28.0 * static_cast<double>(args.count), 0,
          elements(args.count)};
}

constexpr KernelCase kCases[] = {
    {"bf16_encode", "residual", "bf16", encode<Bf16Format, true>},
    {"bf16_encode", "residual, stochastic", "bf16", encode<Bf16Format, true, Rounding::stochastic>},
    {"bf16_encode", "", "bf16", encode<Bf16Format, false>},
    {"bf16_decode", "", "bf16", decode<Bf16Format>},
    {"bf16_decode_add", "", "bf16", decode_add<Bf16Format>},
    {"bf16_decode_add_encode", "1 input", "bf16", hop<Bf16Format, 1>},
    {"bf16_decode_add_encode", "7 inputs", "bf16", hop<Bf16Format, 7>},
    {"fp8_encode", "residual", "fp8", encode<Fp8Format, true>},
    {"fp8_encode", "residual, stochastic", "fp8", encode<Fp8Format, true, Rounding::stochastic>},
    {"fp8_encode", "", "fp8", encode<Fp8Format, false>},
    {"fp8_decode", "", "fp8", decode<Fp8Format>},
    {"fp8_decode_add", "", "fp8", decode_add<Fp8Format>},
    {"fp8_decode_add_encode", "1 input", "fp8", hop<Fp8Format, 1>},
    {"fp8_decode_add_encode", "7 inputs", "fp8", hop<Fp8Format, 7>},
    {"fp32_reduce", "1 input", "fp32", reduce<1>},
    {"fp32_reduce", "7 inputs", "fp32", reduce<7>},
    {"pack", "", "pack", packing<false>},
    {"pack", "unpack", "pack", packing<true>},
    {"sgd_step", "momentum", "optimizer", sgd<true>},
    {"sgd_step", "", "optimizer", sgd<false>},
    {"adamw_step", "", "optimizer", adamw},
};

}  // namespace

std::span<const KernelCase> wire_cases() {
  return kCases;
}

}  // namespace gradwire::bench
