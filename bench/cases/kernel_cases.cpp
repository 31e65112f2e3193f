#include "bench/cases/kernel_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/feedback/feedback.h"
#include "kernels/gemm/gemm.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"
#include "kernels/randk/randk.h"
#include "kernels/wire/floats.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire::bench {

Arena::Arena(const Stream& stream, int64_t bytes)
    : stream_(stream), memory_(stream.device(), static_cast<size_t>(bytes)) {
  std::mt19937 generator(1);
  std::normal_distribution<float> distribution;
  normal_.resize(1 << 20);
  for (float& value : normal_) value = distribution(generator);
}

void Arena::reset() {
  stream_.synchronize();
  used_ = 0;
  kept_.clear();
}

void* Arena::take(int64_t bytes) {
  int64_t aligned = (bytes + 255) / 256 * 256;
  if (used_ + aligned > static_cast<int64_t>(memory_.bytes())) {
    throw Error("a benchmark case needs more arena than kArenaPerSize times its size; raise kArenaPerSize");
  }
  void* data = memory_.as<char>() + used_;
  used_ += aligned;
  fill_zero(stream_, data, static_cast<size_t>(bytes));
  return data;
}

float* Arena::repeated(int64_t count, std::span<const float> pattern) {
  auto* data = static_cast<float*>(take(count * 4));
  for (int64_t done = 0; done < count; done += static_cast<int64_t>(pattern.size())) {
    int64_t now = std::min(count - done, static_cast<int64_t>(pattern.size()));
    copy(stream_, data + done, pattern.data(), static_cast<size_t>(now) * 4);
  }
  stream_.synchronize();
  return data;
}

float* Arena::normal(int64_t count) {
  return repeated(count, normal_);
}

float* Arena::filled(int64_t count, float value) {
  std::vector<float> pattern(static_cast<size_t>(std::min<int64_t>(std::max<int64_t>(count, 1), 1 << 18)),
                             value);
  return repeated(count, pattern);
}

std::vector<KernelCase> kernel_cases() {
  std::vector<KernelCase> all;
  for (auto table : {wire_cases(), feedback_cases(), powersgd_cases(), model_cases()}) {
    all.insert(all.end(), table.begin(), table.end());
  }
  return all;
}

// Cases of error feedback's policies: `size` bytes of gradients.

namespace {

// Returns a problem that launches `op`, which moves `bytes` per element of args.count.
template <typename Args>
Problem passes(const Args& args, void (*op)(const Stream&, const Args&), double bytes) {
  return {[args, op](const Stream& s) { op(s, args); }, bytes * static_cast<double>(args.count), 0,
          std::to_string(args.count)};
}

Problem difference(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  Ef21Difference args{.grad = arena.normal(count), .residual = arena.zeros<float>(count)};
  args.estimate = arena.zeros<float>(count);  // else the gradient would grow from launch to launch
  args.kept = arena.zeros<float>(count);
  args.count = count;
  return passes<Ef21Difference>(args, ef21_difference, 24);
}

Problem update(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  Ef21Update args{.grad = arena.zeros<float>(count), .residual = arena.normal(count)};
  args.estimate = arena.zeros<float>(count);
  args.kept = arena.normal(count);
  args.count = count;
  return passes<Ef21Update>(args, ef21_update, 28);
}

Problem add(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  const MomentumAdd args{arena.normal(count), arena.zeros<float>(count), 0.0f, count};
  return passes<MomentumAdd>(args, momentum_add, 16);
}

Problem mask(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  const MomentumMask args{arena.normal(count), arena.normal(count), count};
  return passes<MomentumMask>(args, momentum_mask, 12);
}

// The array is above the norm in the first launch only, and is read in each.
Problem clip(Arena& arena, int64_t size) {
  const int64_t count = size / 4;
  const ClipNorm args{arena.normal(count), arena.zeros<double>(clip_chunks(count)), 1.0f, count};
  return passes<ClipNorm>(args, clip_norm, 4);
}

}  // namespace

std::span<const KernelCase> feedback_cases() {
  static const std::vector<KernelCase> cases = {
      {"ef21_difference", "", "feedback", difference},
      {"ef21_update", "", "feedback", update},
      {"clip_norm", "", "feedback", clip},
      {"momentum_add", "", "feedback", add},
      {"momentum_mask", "", "feedback", mask},
  };
  return cases;
}

// Cases of PowerSGD: `size` bytes of gradients, as the matrices of a ViT-B's layers if they fit, otherwise as
// one square matrix.

namespace {

struct Matrices {
  const MatrixTable* table;
  float *grad, *residual, *p, *q;
  PendingFactors pending;
  int32_t* flags;
  std::string shape;
};

Matrices matrices(Arena& arena, int64_t size, int rank) {
  // Rows and columns of the layer's weights: MLP, MLP, in_proj, out_proj.
  constexpr std::pair<int32_t, int32_t> kLayer[] = {{3072, 768}, {768, 3072}, {2304, 768}, {768, 768}};
  std::vector<MatrixDescriptor> list;
  int64_t offset = 0, p = 0, q = 0;
  auto add = [&](int32_t rows, int32_t cols) {
    list.push_back(
        {offset, p, q, rows, cols, std::min({rank, rows, cols}), static_cast<int32_t>(list.size())});
    offset += int64_t{rows} * cols;
    p += int64_t{rows} * list.back().rank;
    q += int64_t{cols} * list.back().rank;
  };
  for (size_t i = 0;; ++i) {
    auto [rows, cols] = kLayer[i % std::size(kLayer)];
    if ((offset + int64_t{rows} * cols) * 4 > size) break;
    add(rows, cols);
  }
  if (list.empty()) {
    auto side = static_cast<int32_t>(std::sqrt(static_cast<double>(size / 4)));
    add(side, side);
  }
  Matrices m{};
  m.shape = list.size() == 1 ? fmt::format("{}x{} r{}", list[0].rows, list[0].cols, list[0].rank)
                             : fmt::format("{} matrices r{}", list.size(), list[0].rank);
  m.table = arena.make<MatrixTable>(arena.stream(), std::move(list));
  m.grad = arena.normal(offset);
  m.residual = arena.normal(offset);
  m.p = arena.normal(p);
  m.q = arena.normal(q);
  // One pending factor is zero, so that the residual does not grow from launch to launch.
  m.pending = {arena.zeros<float>(p), arena.normal(q)};
  m.flags = arena.zeros<int32_t>(m.table->count());
  return m;
}

double passes(const Matrices& m, double bytes_per_element) {
  return bytes_per_element * static_cast<double>(m.table->elements());
}
double product(const Matrices& m) {
  double flops = 0;
  for (const MatrixDescriptor& d : m.table->host()) flops += 2.0 * d.rows * d.cols * d.rank;
  return flops;
}

Problem project(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdProject args{m.table, m.grad, m.residual, m.pending, m.q, m.p};
  return {[args](const Stream& s) { powersgd_project(s, args); }, passes(m, 12), 2 * product(m), m.shape};
}

Problem back_project(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdBackProject args{m.table, m.residual, m.p, m.q, m.flags};
  return {[args](const Stream& s) { powersgd_back_project(s, args); }, passes(m, 4), product(m), m.shape};
}

Problem project_onto(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdProjectOnto args{m.table, m.grad, m.residual, m.pending, m.p, m.q};
  return {[args](const Stream& s) { powersgd_project_onto(s, args); }, passes(m, 12), 2 * product(m),
          m.shape};
}

Problem reconstruct(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdReconstruct args{.table = m.table, .p = m.p, .q = m.q, .grad = m.grad, .flags = m.flags};
  return {[args](const Stream& s) { powersgd_reconstruct(s, args); }, passes(m, 4), product(m), m.shape};
}

Problem settle(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdSettle args{.table = m.table, .residual = m.residual, .pending = m.pending};
  return {[args](const Stream& s) { powersgd_settle(s, args); }, passes(m, 8), product(m), m.shape};
}

Problem form(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  PowerSgdForm args{m.table, m.grad, m.residual, m.pending, m.flags};
  return {[args](const Stream& s) { powersgd_form(s, args); }, passes(m, 12), product(m), m.shape};
}

// Returns an overwrite of every matrix, the maximum work of the op.
Problem overwrite(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  // All marks are nonzero.
  const auto* marks = reinterpret_cast<const int32_t*>(arena.normal(m.table->count()));
  PowerSgdOverwrite args{.table = m.table, .marks = marks, .p = m.p};
  double bytes = 0;
  for (const MatrixDescriptor& d : m.table->host()) bytes += 4.0 * (d.rows * d.rank + 1);
  return {[args](const Stream& s) { powersgd_overwrite(s, args); }, bytes, 0, m.shape};
}

// The products of the passes above with the BLAS library, one call per matrix, for comparison. The library
// reads M once more, because the passes form M while they multiply.
enum class Product { project, back_project, residual };
template <Product kProduct>
Problem by_library(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  std::vector<Gemm> calls;
  for (const MatrixDescriptor& d : m.table->host()) {
    float *matrix = m.residual + d.offset, *p = m.p + d.p_offset, *q = m.q + d.q_offset;
    Gemm g{.m = d.rows, .n = d.rank, .k = d.cols};
    g.a = matrix, g.lda = d.cols, g.b = q, g.ldb = d.rank, g.c = p, g.ldc = d.rank;
    if constexpr (kProduct == Product::back_project) {
      g.transpose_a = true;
      g.m = d.cols, g.k = d.rows, g.b = p, g.c = q;
    } else if constexpr (kProduct == Product::residual) {
      g.transpose_b = true;
      g.n = d.cols, g.k = d.rank, g.a = p, g.lda = d.rank, g.c = matrix, g.ldc = d.cols;
      g.alpha = -1e-6f;
      g.beta = 1.0f;
    }
    calls.push_back(g);
  }
  const double bytes = kProduct == Product::residual ? 8 : 4;
  return {[calls](const Stream& s) {
            for (const Gemm& g : calls) gemm(s, g);
          },
          passes(m, bytes), product(m), m.shape};
}

// Returns the orthonormalization of the factors P of all matrices. Random columns take one pass.
Problem orthonormal(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  float* out = arena.zeros<float>(m.table->p_elements());
  Orthonormalize args{.table = m.table, .which = Factor::p, .in = m.p, .out = out, .flags = m.flags};
  args.scratch = arena.zeros<double>(m.table->scratch_doubles());
  return {[args](const Stream& s) { orthonormalize(s, args); },
          12.0 * static_cast<double>(m.table->p_elements()), 0, m.shape};
}

// Returns the division of the factors R of all matrices by the norms of their columns.
Problem normalized(Arena& arena, int64_t size, int rank) {
  Matrices m = matrices(arena, size, rank);
  int64_t count = 0;
  for (const MatrixDescriptor& d : m.table->host()) count += int64_t{d.cols} * d.rank;
  const NormalizeColumns args{m.table, m.q, arena.zeros<float>(count), m.flags};
  return {[args](const Stream& s) { normalize_columns(s, args); }, 12.0 * static_cast<double>(count), 0,
          m.shape};
}

struct CasesByRank {
  const char *op, *prefix, *family;
  Problem (*make)(Arena& arena, int64_t size, int rank);
  std::vector<int> ranks;
};

std::vector<KernelCase> make_powersgd_cases() {
  const CasesByRank table[] = {
      {"powersgd_project", "", "powersgd", project, {1, 4, 32, 64}},
      {"powersgd_back_project", "", "powersgd", back_project, {1, 4, 32, 64}},
      {"powersgd_project_onto", "", "powersgd", project_onto, {1, 4, 32}},
      {"powersgd_reconstruct", "", "powersgd", reconstruct, {1, 4, 32, 64}},
      {"powersgd_settle", "", "powersgd", settle, {1, 4}},
      {"powersgd_form", "", "powersgd", form, {1, 32}},
      {"powersgd_overwrite", "", "powersgd", overwrite, {32}},
      {"gemm", "P = M Q, ", "powersgd-blas", by_library<Product::project>, {32, 64}},
      {"gemm", "Q = M^T P, ", "powersgd-blas", by_library<Product::back_project>, {32, 64}},
      {"gemm", "E -= P Q^T, ", "powersgd-blas", by_library<Product::residual>, {32, 64}},
      {"orthonormalize", "", "orthonormalize", orthonormal, {1, 4, 32, 256}},
      {"normalize_columns", "", "normalize_columns", normalized, {4, 256}},
  };
  std::vector<KernelCase> all;
  for (const CasesByRank& cases : table) {
    for (int rank : cases.ranks) {
      all.push_back(
          {cases.op, fmt::format("{}rank {}", cases.prefix, rank), cases.family,
           [make = cases.make, rank](Arena& arena, int64_t size) { return make(arena, size, rank); }});
    }
  }
  return all;
}

}  // namespace

std::span<const KernelCase> powersgd_cases() {
  static const std::vector<KernelCase> cases = make_powersgd_cases();
  return cases;
}

// Cases of the wire formats, packing, random-k and the optimizers: one flat array of `size` bytes of floats.

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
