// The loops of the host's PowerSGD passes: each loop processes a piece of a matrix and is compiled for
// several instruction sets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/powersgd/powersgd.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {

// Some rows and columns of M. With a residual, M = grad + E is stored into it, with E = residual + pending_p
// pending_q^T; without one, M is grad.
struct MatrixPart {
  const float* grad;       // (rows, columns), rows `cols` apart
  float* residual;         // laid out as grad, or null
  const float* pending_p;  // (rows, rank) or null
  const float* pending_q;  // (columns, rank)
  int64_t rows, columns, cols;
  int rank;
};
// Computes P = M Q for whole rows; q (cols, rank), p (rows, rank).
void project_rows(const MatrixPart& m, const float* q, float* p);

// Returns the largest number of columns per piece for this rank. `stride` is the piece's columns, rounded up
// to kStrip.
int64_t piece_columns(int rank, int64_t cols);
inline constexpr int64_t kStrip = 64;
// Computes sums (rank, stride) = P^T M, undefined from `columns` on; p (rows, rank).
void back_project_piece(const MatrixPart& m, const float* p, float* sums, int64_t stride);
// Computes Q (columns, rank) as the sum of `pieces` consecutive arrays (rank, stride), in order. Overwrites
// the first array.
void add_pieces(float* sums, int64_t pieces, int64_t columns, int64_t stride, int rank, float* q);

// The mode of reconstruction: out = scale * P Q^T, stored or streamed past the caches; or settling, out += P
// Q^T, which becomes 0 where it is not finite.
enum class Reconstruct : uint8_t { store, stream, settle };
struct ReconstructRows {
  const float* p;  // (rows, rank)
  const float* q;  // (cols, rank)
  float* out;      // (rows, cols)
  float scale;
  int64_t rows, cols;
  int rank;
  Reconstruct mode;
};
void reconstruct_rows(const ReconstructRows& a);

// Runs body(item, part) for the parts of all items, of which parts(item) is the number, in up to 16 runs of
// adjacent parts per thread.
template <typename T, typename Parts, typename Body>
void for_parts(const std::vector<T>& items, const Parts& parts, const Body& body) {
  std::vector<int64_t> first{0};
  for (const T& item : items) first.push_back(first.back() + parts(item));
  const int64_t run = std::max<int64_t>(1, first.back() / (int64_t{16} * host_threads()));
  parallel_for(first.back(), run, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const auto i = std::upper_bound(first.begin(), first.end(), at) - first.begin() - 1;
      body(items[static_cast<size_t>(i)], at - first[static_cast<size_t>(i)]);
    }
  });
}

}  // namespace gradwire::host
