// The loops of the host's PowerSGD passes: each loop processes a piece of a matrix and is compiled for
// several instruction sets.
#pragma once

#include <cstdint>

#include "kernels/powersgd/powersgd.h"

namespace gradwire::host {

// Arguments for rows of M = grad + E, stored into the residual, and of P = M Q. E = residual + pending_p
// pending_q^T.
struct ProjectRows {
  const float* grad;       // (rows, cols)
  float* residual;         // (rows, cols) or null
  const float* pending_p;  // (rows, rank) or null
  const float* pending_q;  // (cols, rank)
  const float* q;          // (cols, rank)
  float* p;                // (rows, rank)
  int64_t rows, cols;
  int rank;
};
void project_rows(const ProjectRows& a);

// Arguments for a piece of M^T P: some rows and columns of M. If `residual` is given, M is formed from grad
// and residual, and stored in the residual.
struct BackProjectPiece {
  const float* m;          // (rows, columns), rows `cols` apart: M, or grad
  float* residual;         // laid out as m, or null
  const float* pending_p;  // (rows, rank) or null
  const float* pending_q;  // (columns, rank)
  const float* p;          // (rows, rank)
  float* sums;             // (rank, stride), out: transposed; undefined from `columns` on
  int64_t rows, columns, cols, stride;
  int rank;
};
// Returns the largest number of columns per piece for this rank. `stride` is the piece's columns, rounded up
// to kStrip.
int64_t piece_columns(int rank, int64_t cols);
inline constexpr int64_t kStrip = 64;
void back_project_piece(const BackProjectPiece& a);
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

}  // namespace gradwire::host
