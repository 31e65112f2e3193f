// Scalar reference: one column at a time.
#include "kernels/powersgd/normalize_columns.h"

namespace gradwire::reference {

void normalize_columns(const NormalizeColumns& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    if (a.flags[matrix] != 0) continue;
    const MatrixDescriptor& d = a.table->host()[matrix];
    for (int k = 0; k < d.rank; ++k) {
      double squares = 0.0;
      for (int64_t row = 0; row < d.cols; ++row) {
        const double x = a.q[d.q_offset + row * d.rank + k];
        squares += x * x;
      }
      for (int64_t row = 0; row < d.cols; ++row) {
        const int64_t at = d.q_offset + row * d.rank + k;
        if (!a.orthonormal) a.basis[at] = a.q[at] * column_scale(squares);
        a.q[at] = squares > 0 || !a.orthonormal ? shape_scale(d.rows, d.cols) * a.basis[at] : 0.0f;
      }
    }
  }
}

}  // namespace gradwire::reference
