// The loops of the host's PowerSGD passes: a piece of a matrix each, compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "kernels/powersgd/powersgd.h"

namespace gradwire::host {

inline constexpr int64_t kStrip = 64;  // columns whose sums are held in registers
inline constexpr int64_t kMaxPanelColumns = 1024;

// Rows of M = grad + residual (stored), P = M Q.
struct ProjectRows {
  const float* grad;  // (rows, cols)
  float* residual;    // (rows, cols) or null
  const float* q;     // (cols, rank)
  float* p;           // (rows, rank)
  int64_t rows, cols;
  int rank;
};
void project_rows(const ProjectRows& a);

// A panel of columns: Q = M^T P, residual = M - P Q^T.
struct BackProjectPanel {
  const float* m;   // (rows, panel), rows `cols` apart
  float* residual;  // the same memory, or null; rows as of m
  const float* p;   // (rows, rank)
  float* q;         // (panel, rank)
  int64_t rows, cols, panel;
  int rank;
};
void back_project_panel(const BackProjectPanel& a);
// The same panel of M = m + residual (stored): Q = M^T P. `residual` is other memory, or null.
void project_onto_panel(const BackProjectPanel& a);

// Rows of out = scale * P Q^T, or of out += P Q^T where that is finite.
enum class Reconstruct : uint8_t { store, stream, add_finite };
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
