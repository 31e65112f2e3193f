// What tests ask of the stand-in for cuBLAS (cublas_stand_in.cpp).
#pragma once

namespace gradwire::simt {

// Whether cuBLASLt has no algorithm for products with GELU, as on a GPU or for types that it does not know. Plans are
// kept, so a product's shape should be one that was not asked for before.
void refuse_gelu_epilogues(bool refuses);
// The same of products with a bias.
void refuse_biases(bool refuses);

}  // namespace gradwire::simt
