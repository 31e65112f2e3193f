#include "kernels/vit/vit.h"

#include "kernels/math/column_chunks.h"

namespace gradwire {

int64_t column_sum_workspace(int64_t rows, int64_t width) {
  return column_chunks(rows).count * width;
}
int64_t layer_norm_backward_workspace(int64_t rows, int64_t width) {
  return 2 * column_sum_workspace(rows, width);
}

GW_DEFINE_TYPED_OP(patchify, Patchify)
GW_DEFINE_TYPED_OP(assemble_tokens, AssembleTokens)
GW_DEFINE_TYPED_OP(assemble_tokens_backward, AssembleTokensBackward)
GW_DEFINE_TYPED_OP(layer_norm, LayerNorm)
GW_DEFINE_TYPED_OP(layer_norm_backward, LayerNormBackward)
GW_DEFINE_TYPED_OP(softmax, Softmax)
GW_DEFINE_TYPED_OP(softmax_backward, SoftmaxBackward)
GW_DEFINE_TYPED_OP(bias_gelu, BiasGelu)
GW_DEFINE_TYPED_OP(bias_gelu_backward, BiasGeluBackward)
GW_DEFINE_TYPED_OP(bias_residual, BiasResidual)
GW_DEFINE_TYPED_OP(column_sum, ColumnSum)
GW_DEFINE_TYPED_OP(split_heads, SplitHeads)
GW_DEFINE_TYPED_OP(split_heads_backward, SplitHeadsBackward)
GW_DEFINE_TYPED_OP(merge_heads, MergeHeads)
GW_DEFINE_TYPED_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire
