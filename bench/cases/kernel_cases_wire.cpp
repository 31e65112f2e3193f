// Cases of the wire formats, packing, random-k and the optimizers: one flat array of `size` bytes of floats.
#include <fmt/format.h>

#include "bench/cases/kernel_cases.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/powersgd/pack.h"
#include "kernels/randk/randk.h"
#include "kernels/wire/formats.h"
#include "kernels/wire/fp16.h"
#include "kernels/wire/fp32.h"

namespace gradwire::bench {
namespace {

std::string elements(int64_t count) {
  return fmt::to_string(count);
}

}  // namespace

Problem reduce_encode_problem(Wire wire, Arena& arena, int64_t size, int inputs, bool residual,
                              Rounding rounding) {
  ReduceEncode args;
  args.count = size / 4;
  for (int i = 0; i < inputs; ++i) {
    auto* input = arena.zeros<uint8_t>(wire->bytes(args.count));
    args.inputs[i] = input;
    if (i == 0) {
      wire->reduce_encode(arena.stream(),
                          {.own = arena.normal(args.count), .wire = input, .count = args.count});
    } else {
      copy(arena.stream(), input, args.inputs[0], static_cast<size_t>(wire->bytes(args.count)));
    }
  }
  args.num_inputs = inputs;
  args.own_position = inputs / 2;
  args.own = arena.normal(args.count);
  args.residual = residual ? arena.zeros<float>(args.count) : nullptr;
  args.wire = arena.zeros<uint8_t>(wire->bytes(args.count));
  args.rounding.mode = rounding;
  const double bytes = (residual ? 12 : 4) + wire->bytes_per_value() * (1 + inputs);
  return {[wire, args](const Stream& s) { wire->reduce_encode(s, args); },
          bytes * static_cast<double>(args.count), 0, elements(args.count)};
}

Problem decode_problem(Wire wire, Arena& arena, int64_t size) {
  auto* encoded = arena.zeros<uint8_t>(wire->bytes(size / 4));
  wire->reduce_encode(arena.stream(), {.own = arena.normal(size / 4), .wire = encoded, .count = size / 4});
  Decode args{.wire = encoded, .out = arena.zeros<float>(size / 4), .count = size / 4};
  return {[wire, args](const Stream& s) { wire->decode(s, args); },
          (4 + wire->bytes_per_value()) * static_cast<double>(args.count), 0, elements(args.count)};
}

namespace {

template <int kInputs>
Problem reduce(Arena& arena, int64_t size) {
  Reduce args;
  args.count = size / 4;
  for (int i = 0; i < kInputs; ++i) args.inputs[i] = arena.normal(args.count);
  args.num_inputs = kInputs;
  float* acc = arena.normal(args.count);
  args.own = acc;
  args.out = acc;
  args.scale = 1.0f / (kInputs + 1);
  return {[args](const Stream& s) { fp32_reduce(s, args); },
          (8.0 + 4 * kInputs) * static_cast<double>(args.count), 0, elements(args.count)};
}

template <bool kNarrow>
Problem fp16(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  float* values = arena.normal(count);
  auto* halves = arena.zeros<uint16_t>(count);
  auto run = [=](const Stream& s) {
    kNarrow ? fp16_narrow(s, {.values = values, .out = halves, .count = count})
            : fp16_widen(s, {.halves = halves, .out = values, .count = count});
  };
  return {run, 6.0 * static_cast<double>(count), 0, elements(count)};
}

// Returns a pack or unpack of the vectors of a ViT: pieces of 768 floats at intervals of 4 * 768 floats.
template <bool kUnpack>
Problem packing(Arena& arena, int64_t size) {
  constexpr int64_t kPiece = 768;
  std::vector<Segment> segments;
  int64_t count = size / 4;
  for (int64_t done = 0; done < count; done += kPiece) {
    segments.push_back({4 * done, done, std::min(kPiece, count - done)});
  }
  std::string shape = fmt::format("{} x {}", segments.size(), std::min(kPiece, count));
  Pack args{.table = arena.make<SegmentTable>(arena.stream(), std::move(segments)),
            .scattered = arena.zeros<float>(4 * count),
            .packed = arena.zeros<float>(count),
            .unpack = kUnpack};
  return {[args](const Stream& s) { pack(s, args); }, 8.0 * static_cast<double>(count), 0, shape};
}

// Returns the arguments of random-k, which sends a hundredth of the elements of large tensors. The gradient
// is zero after the first launch. This affects only the values, not the time.
RandKGather randk(Arena& arena, int64_t size, bool residual) {
  constexpr int64_t kTensor = 768 * 3072;
  std::vector<RandKTensor> tensors;
  for (int64_t done = 0; done < size / 4; done += kTensor) {
    tensors.push_back({.offset = done,
                       .count = std::min(kTensor, size / 4 - done),
                       .index = static_cast<int32_t>(tensors.size())});
  }
  auto* table = arena.make<RandKTable>(arena.stream(), tensors, 0.01);
  return {.table = table,
          .grad = arena.normal(size / 4),
          .residual = residual ? arena.zeros<float>(size / 4) : nullptr,
          .count = size / 4,
          .values = arena.zeros<float>(table->values()),
          .chosen = arena.zeros<int64_t>(table->values())};
}

template <bool kResidual>
Problem randk_gathering(Arena& arena, int64_t size) {
  const RandKGather args = randk(arena, size, kResidual);
  return {[args](const Stream& s) { randk_gather(s, args); },
          (kResidual ? 16.0 : 8.0) * static_cast<double>(args.count) +
              12.0 * static_cast<double>(args.table->values()),
          0, fmt::format("{} of {}", args.table->values(), args.count)};
}

Problem randk_scattering(Arena& arena, int64_t size) {
  const RandKGather gathered = randk(arena, size, false);
  randk_gather(arena.stream(), gathered);
  const RandKScatter args{.chosen = gathered.chosen,
                          .values = gathered.values,
                          .grad = gathered.grad,
                          .count = gathered.table->values()};
  return {[args](const Stream& s) { randk_scatter(s, args); }, 16.0 * static_cast<double>(args.count), 0,
          fmt::format("{} of {}", args.count, gathered.count)};
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

std::vector<KernelCase> make_cases() {
  std::vector<KernelCase> all;
  for (Wire wire : wire_formats()) {
    if (wire->exact) continue;
    auto add = [&](const char* variant, int inputs, bool residual, Rounding rounding) {
      all.push_back(
          {fmt::format("{}_reduce_encode", wire->name), variant, wire->name, [=](Arena& arena, int64_t size) {
             return reduce_encode_problem(wire, arena, size, inputs, residual, rounding);
           }});
    };
    add("residual", 0, true, Rounding::nearest);
    if (wire->stochastic) add("residual, stochastic", 0, true, Rounding::stochastic);
    add("", 0, false, Rounding::nearest);
    add("1 input", 1, true, Rounding::nearest);
    add("7 inputs", 7, true, Rounding::nearest);
    all.push_back({fmt::format("{}_decode", wire->name), "", wire->name,
                   [=](Arena& arena, int64_t size) { return decode_problem(wire, arena, size); }});
  }
  const KernelCase others[] = {
      {"fp32_reduce", "1 input", "fp32", reduce<1>},
      {"fp32_reduce", "7 inputs", "fp32", reduce<7>},
      {"fp16_widen", "", "fp16", fp16<false>},
      {"fp16_narrow", "", "fp16", fp16<true>},
      {"pack", "", "pack", packing<false>},
      {"pack", "unpack", "pack", packing<true>},
      {"randk_gather", "1 %, residual", "randk", randk_gathering<true>},
      {"randk_gather", "1 %", "randk", randk_gathering<false>},
      {"randk_scatter", "1 %", "randk", randk_scattering},
      {"sgd_step", "momentum", "optimizer", sgd<true>},
      {"sgd_step", "", "optimizer", sgd<false>},
      {"adamw_step", "", "optimizer", adamw},
  };
  all.insert(all.end(), std::begin(others), std::end(others));
  return all;
}

}  // namespace

std::span<const KernelCase> wire_cases() {
  static const std::vector<KernelCase> cases = make_cases();
  return cases;
}

}  // namespace gradwire::bench
