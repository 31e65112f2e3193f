// Controls of the stand-in for cuBLAS (cublas_stand_in.cpp).
#pragma once

namespace gradwire::simt {

// Makes the heuristic of cuBLASLt find no algorithm for products with GELU, as on a GPU that does not support
// them. Tests should use a new product shape, because plans are cached.
void refuse_gelu_epilogues(bool refuses);
// Makes the heuristic find no algorithm for products with a bias.
void refuse_biases(bool refuses);

}  // namespace gradwire::simt
