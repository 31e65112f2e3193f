// Controls of the stand-in for cuBLAS (cublas_stand_in.cpp).
#pragma once

namespace gradwire::simt {

// Makes cuBLASLt have no algorithm for products with GELU, as on a GPU or for types that it does not support.
// Plans are cached, so a product's shape should be new.
void refuse_gelu_epilogues(bool refuses);
// Does the same for products with a bias.
void refuse_biases(bool refuses);

}  // namespace gradwire::simt
