#include "bench/cases/kernel_cases.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/gemm/gemm.h"
#include "kernels/passes/passes.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"
#include "kernels/randk/randk.h"
#include "kernels/wire/floats.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire::bench {

Arena::Arena(const Stream& stream_, int64_t bytes)
    : stream(stream_), memory_(stream.device(), static_cast<size_t>(bytes)) {
  std::mt19937 generator(1);
  std::normal_distribution<float> distribution;
  normal_.resize(1 << 20);
  for (float& value : normal_) value = distribution(generator);
}

void Arena::reset() {
  stream.synchronize();
  used_ = 0;
  objects_.clear();
}

void* Arena::take(int64_t bytes) {
  int64_t aligned = (bytes + 255) / 256 * 256;
  if (used_ + aligned > static_cast<int64_t>(memory_.bytes())) {
    throw Error("a benchmark case needs more arena than kArenaPerSize times its size; raise kArenaPerSize");
  }
  void* data = memory_.as<char>() + used_;
  used_ += aligned;
  fill_zero(stream, data, static_cast<size_t>(bytes));
  return data;
}

float* Arena::repeated(int64_t count, std::span<const float> pattern) {
  auto* data = static_cast<float*>(take(count * 4));
  for (int64_t done = 0; done < count; done += static_cast<int64_t>(pattern.size())) {
    int64_t now = std::min(count - done, static_cast<int64_t>(pattern.size()));
    copy(stream, data + done, pattern.data(), static_cast<size_t>(now) * 4);
  }
  stream.synchronize();
  return data;
}

float* Arena::filled(int64_t count, float value) {
  return repeated(count,
                  std::vector<float>(static_cast<size_t>(std::clamp<int64_t>(count, 1, 1 << 18)), value));
}

Problem reduce_encode_problem(Wire wire, Arena& arena, int64_t size, int inputs, bool residual,
                              Rounding rounding) {
  ReduceEncode args;
  args.count = size / 4;
  for (int i = 0; i < inputs; ++i) {
    auto* input = arena.zeros<uint8_t>(wire->bytes(args.count));
    args.inputs[i] = input;
    if (i == 0) {
      wire->reduce_encode(arena.stream,
                          {.own = arena.normal(args.count), .wire = input, .count = args.count});
    } else {
      copy(arena.stream, input, args.inputs[0], static_cast<size_t>(wire->bytes(args.count)));
    }
  }
  args.num_inputs = inputs;
  args.own_position = inputs / 2;
  args.own = arena.normal(args.count);
  args.residual = residual ? arena.zeros(args.count) : nullptr;
  args.wire = arena.zeros<uint8_t>(wire->bytes(args.count));
  args.rounding.mode = rounding;
  const double bytes = (residual ? 12 : 4) + wire->bytes_per_value() * (1 + inputs);
  return {[wire, args](const Stream& s) { wire->reduce_encode(s, args); },
          bytes * static_cast<double>(args.count), 0, std::to_string(args.count)};
}

Problem decode_problem(Wire wire, Arena& arena, int64_t size) {
  auto* encoded = arena.zeros<uint8_t>(wire->bytes(size / 4));
  wire->reduce_encode(arena.stream, {.own = arena.normal(size / 4), .wire = encoded, .count = size / 4});
  Decode args{.wire = encoded, .out = arena.zeros(size / 4), .count = size / 4};
  return {[wire, args](const Stream& s) { wire->decode(s, args); },
          (4 + wire->bytes_per_value()) * static_cast<double>(args.count), 0, std::to_string(args.count)};
}

namespace {

// `size` bytes of gradients as the matrices of a ViT-B's layers if they fit, otherwise as one square matrix.
struct Matrices {
  const MatrixTable* table;
  float *grad, *residual, *p, *q;
  PendingFactors pending;
  int32_t* flags;
  std::string shape;

  Matrices(Arena& arena, int64_t size, int rank) {
    // Rows and columns of the layer's weights: MLP, MLP, in_proj, out_proj.
    constexpr std::pair<int32_t, int32_t> kLayer[] = {{3072, 768}, {768, 3072}, {2304, 768}, {768, 768}};
    std::vector<MatrixDescriptor> list;
    int64_t offset = 0, p_count = 0, q_count = 0;
    auto add = [&](int32_t rows, int32_t cols) {
      list.push_back({offset, p_count, q_count, rows, cols, std::min({rank, rows, cols}),
                      static_cast<int32_t>(list.size())});
      offset += int64_t{rows} * cols;
      p_count += int64_t{rows} * list.back().rank;
      q_count += int64_t{cols} * list.back().rank;
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
    shape = list.size() == 1 ? fmt::format("{}x{} r{}", list[0].rows, list[0].cols, list[0].rank)
                             : fmt::format("{} matrices r{}", list.size(), list[0].rank);
    table = arena.make<MatrixTable>(arena.stream, std::move(list));
    grad = arena.normal(offset);
    residual = arena.normal(offset);
    p = arena.normal(p_count);
    q = arena.normal(q_count);
    // One pending factor is zero, so that the residual does not grow from launch to launch.
    pending = {arena.zeros(p_count), arena.normal(q_count)};
    flags = arena.zeros<int32_t>(table->count());
  }

  // Returns a launch that moves `bytes` per element, and multiplies each matrix `products` times by a factor.
  template <typename Args>
  Problem launch(void (*op)(const Stream&, const Args&), const Args& args, double bytes, int products) const {
    double flops = 0;
    for (const MatrixDescriptor& d : table->host()) flops += 2.0 * d.rows * d.cols * d.rank;
    return problem(op, args, bytes, table->elements(), shape, products * flops);
  }
};

// The products of the passes with the BLAS library, one call per matrix, for comparison. The library reads M
// once more, because the passes form M while they multiply.
enum class Product { project, back_project, residual };
template <Product kProduct>
Problem by_library(Arena&, const Matrices& m) {
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
  void (*const gemms)(const Stream&, const std::vector<Gemm>&) = [](const Stream& stream, const auto& all) {
    for (const Gemm& g : all) gemm(stream, g);
  };
  return m.launch(gemms, calls, kProduct == Product::residual ? 8 : 4, 1);
}

// Cases of PowerSGD, each at several ranks.
const struct {
  const char *op, *prefix, *family;
  std::vector<int> ranks;
  Problem (*make)(Arena& arena, const Matrices& m);
} kMatrixCases[] = {
    {"powersgd_project",
     "",
     "powersgd",
     {1, 4, 32, 64, 128},
     [](Arena&, const Matrices& m) {
       return m.launch(powersgd_project, {m.table, m.grad, m.residual, m.pending, m.q, m.p}, 12, 2);
     }},
    {"powersgd_back_project",
     "",
     "powersgd",
     {1, 4, 32, 64, 128},
     [](Arena&, const Matrices& m) {
       return m.launch(powersgd_back_project, {m.table, m.residual, m.p, m.q, m.flags}, 4, 1);
     }},
    {"powersgd_project_onto",
     "",
     "powersgd",
     {1, 4, 32},
     [](Arena&, const Matrices& m) {
       return m.launch(powersgd_project_onto, {m.table, m.grad, m.residual, m.pending, m.p, m.q}, 12, 2);
     }},
    {"powersgd_reconstruct",
     "",
     "powersgd",
     {1, 4, 32, 64},
     [](Arena&, const Matrices& m) {
       return m.launch(powersgd_reconstruct, {m.table, m.p, m.q, m.grad, 1.0f, m.flags}, 4, 1);
     }},
    {"powersgd_settle",
     "",
     "powersgd",
     {1, 4},
     [](Arena&, const Matrices& m) {
       return m.launch(powersgd_settle, {m.table, m.residual, m.pending}, 8, 1);
     }},
    {"powersgd_form",
     "",
     "powersgd",
     {1, 32},
     [](Arena&, const Matrices& m) {
       return m.launch(powersgd_form, {m.table, m.grad, m.residual, m.pending, m.flags}, 12, 1);
     }},
    {"powersgd_overwrite",
     "",
     "powersgd",
     {32},
     [](Arena& arena, const Matrices& m) {  // all marks are nonzero, the maximum work of the op
       const auto* marks = reinterpret_cast<const int32_t*>(arena.normal(m.table->count()));
       return problem(powersgd_overwrite, {.table = m.table, .marks = marks, .p = m.p}, 4,
                      m.table->p_elements() + m.table->count(), m.shape);
     }},
    {"gemm", "P = M Q, ", "powersgd-blas", {32, 64, 128}, by_library<Product::project>},
    {"gemm", "Q = M^T P, ", "powersgd-blas", {32, 64, 128}, by_library<Product::back_project>},
    {"gemm", "E -= P Q^T, ", "powersgd-blas", {32, 64}, by_library<Product::residual>},
    // The factors P of all matrices. Random columns take one pass.
    {"orthonormalize",
     "",
     "orthonormalize",
     {1, 4, 32, 256},
     [](Arena& arena, const Matrices& m) {
       Orthonormalize args{.table = m.table, .in = m.p, .flags = m.flags};
       args.out = arena.zeros(m.table->p_elements());
       args.scratch = arena.zeros<double>(m.table->scratch_doubles());
       return problem(orthonormalize, args, 12, m.table->p_elements(), m.shape);
     }},
    // The factors R of all matrices, divided by the norms of their columns.
    {"normalize_columns",
     "",
     "normalize_columns",
     {4, 256},
     [](Arena& arena, const Matrices& m) {
       const int64_t count = m.table->q_elements();
       return problem(normalize_columns, {m.table, m.q, arena.zeros(count), m.flags}, 12, count, m.shape);
     }},
};

template <int kInputs>
Problem reduce(Arena& arena, int64_t size) {
  Reduce args{.num_inputs = kInputs, .scale = 1.0f / (kInputs + 1), .count = size / 4};
  for (int i = 0; i < kInputs; ++i) args.inputs[i] = arena.normal(args.count);
  args.own = args.out = arena.normal(args.count);
  return problem(fp32_reduce, args, 8.0 + 4 * kInputs, args.count);
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
  const std::string shape = fmt::format("{} x {}", segments.size(), std::min(kPiece, count));
  const auto* table = arena.make<SegmentTable>(arena.stream, std::move(segments));
  return problem(pack, {table, arena.zeros(4 * count), arena.zeros(count), kUnpack}, 8, count, shape);
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
  const auto* table = arena.make<RandKTable>(arena.stream, tensors, 0.01);
  return {table,    arena.normal(size / 4),       residual ? arena.zeros(size / 4) : nullptr,
          size / 4, arena.zeros(table->values()), arena.zeros<int64_t>(table->values())};
}

template <bool kResidual>
Problem randk_gathering(Arena& arena, int64_t size) {
  const RandKGather args = randk(arena, size, kResidual);
  return problem(randk_gather, args, 4, (kResidual ? 4 : 2) * args.count + 3 * args.table->values(),
                 fmt::format("{} of {}", args.table->values(), args.count));
}

OptimizerScalars* scalars(Arena& arena) {
  auto* out = arena.zeros<OptimizerScalars>(1);
  OptimizerScalars value{.lr = 1e-6f, .correction1 = 0.9f, .correction2 = 0.9f};
  store(arena.stream, out, &value, sizeof value);
  return out;
}

template <bool kMomentum>
Problem sgd(Arena& arena, int64_t size) {
  SgdStep args{.params = arena.normal(size / 4), .grads = arena.normal(size / 4), .count = size / 4};
  if (kMomentum) args.velocity = arena.zeros(size / 4), args.momentum = 0.9f;
  args.scalars = scalars(arena);
  return problem(sgd_step, args, kMomentum ? 20 : 12, args.count);
}

// One flat array of `size` bytes of floats.
const KernelCase kFlatCases[] = {
    {"fp32_reduce", "1 input", "fp32", reduce<1>},
    {"fp32_reduce", "7 inputs", "fp32", reduce<7>},
    {"fp16_widen", "", "fp16",
     [](Arena& a, int64_t size) {
       return problem(fp16_widen, {a.zeros<uint16_t>(size / 4), a.normal(size / 4), size / 4}, 6, size / 4);
     }},
    {"fp16_narrow", "", "fp16",
     [](Arena& a, int64_t size) {
       return problem(fp16_narrow, {a.normal(size / 4), a.zeros<uint16_t>(size / 4), size / 4}, 6, size / 4);
     }},
    {"pack", "", "pack", packing<false>},
    {"pack", "unpack", "pack", packing<true>},
    {"randk_gather", "1 %, residual", "randk", randk_gathering<true>},
    {"randk_gather", "1 %", "randk", randk_gathering<false>},
    {"randk_scatter", "1 %", "randk",
     [](Arena& a, int64_t size) {
       const RandKGather g = randk(a, size, false);
       randk_gather(a.stream, g);
       const int64_t count = g.table->values();
       return problem(randk_scatter, {g.chosen, g.values, nullptr, g.grad, nullptr, count}, 16, count,
                      fmt::format("{} of {}", count, g.count));
     }},
    {"sgd_step", "momentum", "optimizer", sgd<true>},
    {"sgd_step", "", "optimizer", sgd<false>},
    {"adamw_step", "", "optimizer",
     [](Arena& a, int64_t size) {
       AdamWStep args{a.normal(size / 4), a.normal(size / 4), a.zeros(size / 4), a.filled(size / 4, 1.0f)};
       args.count = size / 4;
       args.scalars = scalars(a);
       return problem(adamw_step, args, 28, args.count);
     }},
    {"ef21_difference", "", "feedback",
     [](Arena& a, int64_t size) {
       // The estimate is zero, else the gradient would grow from launch to launch.
       const int64_t n = size / 4;
       return problem(ef21_difference, {a.normal(n), a.zeros(n), a.zeros(n), a.zeros(n), 1.0f, n}, 24, n);
     }},
    {"ef21_update", "", "feedback",
     [](Arena& a, int64_t size) {
       const int64_t n = size / 4;
       return problem(ef21_update, {a.zeros(n), a.normal(n), a.zeros(n), a.normal(n), 1.0f, n}, 28, n);
     }},
    {"clip_norm", "", "feedback",
     [](Arena& a, int64_t size) {
       // The array is above the norm in the first launch only, and is read in each.
       const int64_t n = size / 4;
       return problem(clip_norm, {a.normal(n), a.zeros<double>(clip_chunks(n)), 1.0f, n}, 4, n);
     }},
    {"momentum_add", "", "feedback",
     [](Arena& a, int64_t size) {
       return problem(momentum_add, {a.normal(size / 4), a.zeros(size / 4), 0.0f, size / 4}, 16, size / 4);
     }},
    {"momentum_mask", "", "feedback",
     [](Arena& a, int64_t size) {
       return problem(momentum_mask, {a.normal(size / 4), a.normal(size / 4), size / 4}, 12, size / 4);
     }},
};

}  // namespace

std::vector<KernelCase> kernel_cases() {
  std::vector<KernelCase> all;
  for (Wire wire : wire_formats()) {
    if (wire->exact) continue;
    auto add = [&](const char* variant, int inputs, bool residual, Rounding rounding = Rounding::nearest) {
      all.push_back(
          {fmt::format("{}_reduce_encode", wire->name), variant, wire->name, [=](Arena& arena, int64_t size) {
             return reduce_encode_problem(wire, arena, size, inputs, residual, rounding);
           }});
    };
    add("residual", 0, true);
    if (wire->stochastic) add("residual, stochastic", 0, true, Rounding::stochastic);
    add("", 0, false);
    add("1 input", 1, true);
    add("7 inputs", 7, true);
    all.push_back({fmt::format("{}_decode", wire->name), "", wire->name,
                   [=](Arena& arena, int64_t size) { return decode_problem(wire, arena, size); }});
  }
  all.insert(all.end(), std::begin(kFlatCases), std::end(kFlatCases));
  for (const auto& c : kMatrixCases) {
    for (int rank : c.ranks) {
      all.push_back({c.op, fmt::format("{}rank {}", c.prefix, rank), c.family,
                     [make = c.make, rank](Arena& arena, int64_t size) {
                       return make(arena, Matrices(arena, size, rank));
                     }});
    }
  }
  all.insert(all.end(), model_cases().begin(), model_cases().end());
  return all;
}

}  // namespace gradwire::bench
