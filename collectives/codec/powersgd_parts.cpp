#include "collectives/codec/powersgd_parts.h"

#include <algorithm>

#include "collectives/codec/dense.h"

namespace gradwire {

// Factors and dense pieces begin at multiples of 4 elements for vectorized kernels, or at blocks of the wire
// format. The gaps are zero.
PowerSgdPlan::PowerSgdPlan(const BucketContext& c) {
  const int64_t unit = packing_unit(c.spec.wire, 4);
  const auto up = [unit](int64_t x) { return (x + unit - 1) / unit * unit; };
  std::vector<BucketTensor> others;
  for (const BucketTensor& t : c.tensors) {
    if (int rank = powersgd_rank(c.spec, t.rows, t.cols)) {
      matrices.push_back({t.offset, p_elements, q_elements, static_cast<int32_t>(t.rows),
                          static_cast<int32_t>(t.cols), rank, t.index});
      tensors.push_back(t.index);
      p_elements += up(t.rows * rank);
      q_elements += up(t.cols * rank);
    } else {
      others.push_back(t);
    }
  }
  dense = pack_tensors(others, unit);
  dense_elements = packed_elements(dense, unit);
}

std::vector<Segment> PowerSgdPlan::dense_after(int64_t elements) const {
  std::vector<Segment> all = dense;
  for (Segment& s : all) s.packed += elements;
  return all;
}

std::unique_ptr<Program> make_plain_start(const BucketContext& c) {
  if (c.spec.start == 0) return nullptr;
  const auto choice = c.choose(c.elements, kFp32);
  Program::Options options = c.plain_options("", choice.slice_bytes);
  options.what += ", before PowerSGD starts";
  return std::make_unique<Program>(*c.transport, choice.schedule,
                                   ProgramBuffers{c.gradients, c.gradients, nullptr, c.elements}, options);
}

void draw_basis(const Stream& stream, const MatrixTable& matrices, Factor which, const Buffer& basis,
                int32_t* flags, uint64_t seed, const uint64_t* step) {
  if (matrices.count() == 0) return;
  fill_zero(stream, basis.data(), basis.bytes());
  orthonormalize(stream, {.table = &matrices,
                          .which = which,
                          .in = basis.as<const float>(),
                          .out = basis.as<float>(),
                          .flags = flags,
                          .seed = seed,
                          .step = step});
}

void settle(const Stream& stream, const MatrixTable& matrices, float* residual, const PendingFactors& pending,
            Factor zeroed, int64_t begin, int64_t end) {
  for (int matrix = 0; matrix < matrices.count(); ++matrix) {
    const MatrixDescriptor& d = matrices.host()[matrix];
    if (d.offset >= end || d.offset + int64_t{d.rows} * d.cols <= begin) continue;
    powersgd_settle(stream, {.table = &matrices, .residual = residual, .pending = pending, .matrix = matrix});
    const bool p = zeroed == Factor::p;
    const float* factor = p ? pending.p + d.p_offset : pending.q + d.q_offset;
    fill_zero(stream, const_cast<float*>(factor), sizeof(float) * (p ? d.rows : d.cols) * d.rank);
  }
}

int powersgd_rank(const CompressionSpec& spec, int64_t rows, int64_t cols) {
  if (rows <= 1 || cols <= 1) return 0;
  const int64_t rank = std::min({rows, cols, int64_t{spec.rank}});
  const bool worth_it = static_cast<double>((rows + cols) * rank) * spec.min_ratio <
                        static_cast<double>(rows) * static_cast<double>(cols);
  const bool addressable = rows < (1 << 30) && cols < (1 << 30) && rows * cols < (int64_t{1} << 40);
  return worth_it && addressable ? static_cast<int>(rank) : 0;
}

}  // namespace gradwire
