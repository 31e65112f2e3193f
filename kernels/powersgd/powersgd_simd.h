// The loops of the host's PowerSGD passes: a piece of a matrix each, compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "kernels/powersgd/powersgd.h"

namespace gradwire::host {

// Rows of M = grad + E (stored into the residual), P = M Q. E = residual + pending_p pending_q^T.
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

// Rows of some columns of M^T P. Where `residual` is given, M is formed from grad and residual, and stored there.
struct BackProjectPiece {
  const float* m;          // (rows, columns), rows `cols` apart: M, or grad
  float* residual;         // as m, or null
  const float* pending_p;  // (rows, rank) or null
  const float* pending_q;  // (columns, rank)
  const float* p;          // (rows, rank)
  float* sums;             // (rank, stride), out: turned around, and garbage from `columns` on
  int64_t rows, columns, cols, stride;
  int rank;
};
// Columns of a piece of this rank, at most; `stride` is theirs, or fewer, rounded up to kStrip.
int64_t piece_columns(int rank, int64_t cols);
inline constexpr int64_t kStrip = 64;
void back_project_piece(const BackProjectPiece& a);
// Q (columns, rank) = the sum of `pieces` arrays (rank, stride), one behind the other, in order. Changes the first.
void add_pieces(float* sums, int64_t pieces, int64_t columns, int64_t stride, int rank, float* q);

// Rows of out = scale * P Q^T, or of out += P Q^T, which becomes 0 where it is not finite.
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
