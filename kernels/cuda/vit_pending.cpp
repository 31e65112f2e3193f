// Stand-ins until the CUDA kernels of gemm.h, vit.h and optimizer.h arrive.
#include "kernels/gemm.h"
#include "kernels/optimizer.h"
#include "kernels/vit.h"

namespace gradwire::cuda {
#define GW_PENDING(op, Args)                              \
  void op(CudaStream, const Args&) {                      \
    throw DeviceError(#op ": not yet available on CUDA"); \
  }
GW_PENDING(gemm, Gemm)
GW_PENDING(patchify, Patchify)
GW_PENDING(assemble_tokens, AssembleTokens)
GW_PENDING(assemble_tokens_backward, AssembleTokensBackward)
GW_PENDING(layer_norm, LayerNorm)
GW_PENDING(layer_norm_backward, LayerNormBackward)
GW_PENDING(softmax, Softmax)
GW_PENDING(softmax_backward, SoftmaxBackward)
GW_PENDING(bias_gelu, BiasGelu)
GW_PENDING(bias_gelu_backward, BiasGeluBackward)
GW_PENDING(bias_residual, BiasResidual)
GW_PENDING(column_sum, ColumnSum)
GW_PENDING(split_heads, SplitHeads)
GW_PENDING(split_heads_backward, SplitHeadsBackward)
GW_PENDING(merge_heads, MergeHeads)
GW_PENDING(cross_entropy, CrossEntropy)
GW_PENDING(sgd_step, SgdStep)
GW_PENDING(adamw_step, AdamWStep)
}  // namespace gradwire::cuda
