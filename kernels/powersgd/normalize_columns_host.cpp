// A task per matrix: two passes over R, row by row.
#include <vector>

#include "kernels/powersgd/normalize_columns.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {

void normalize_columns(const NormalizeColumns& a) {
  parallel_for(a.table->count(), 1, [&](int64_t matrix, int64_t) {
    if (a.flags[matrix] != 0) return;
    const MatrixDescriptor& d = a.table->host()[matrix];
    std::vector<double> squares(static_cast<size_t>(d.rank), 0.0);
    float* const q = a.q + d.q_offset;
    for (int64_t row = 0; row < d.cols; ++row) {
      for (int k = 0; k < d.rank; ++k) {
        const double x = q[row * d.rank + k];
        squares[static_cast<size_t>(k)] += x * x;
      }
    }
    std::vector<float> scales;  // of R or, with `orthonormal`, of Q
    for (const double sum : squares)
      scales.push_back(!a.orthonormal ? column_scale(sum) : sum > 0 ? 1.0f : 0.0f);
    const float shape = shape_scale(d.rows, d.cols);
    float* const basis = a.basis + d.q_offset;
    for (int64_t row = 0; row < d.cols; ++row) {
      for (int k = 0; k < d.rank; ++k) {
        const int64_t at = row * d.rank + k;
        const float x = (a.orthonormal ? basis[at] : q[at]) * scales[static_cast<size_t>(k)];
        if (!a.orthonormal) basis[at] = x;
        q[at] = shape * x;
      }
    }
  });
}

}  // namespace gradwire::host
