#include "kernels/vit/vit.h"

#include "kernels/math/column_chunks.h"

namespace gradwire {

int64_t column_sum_workspace(int64_t rows, int64_t width) {
  return column_chunks(rows).count * width;
}
int64_t layer_norm_backward_workspace(int64_t rows, int64_t width) {
  return 2 * column_sum_workspace(rows, width);
}

}  // namespace gradwire
