// Where memory lies that a library of others has allocated.
#pragma once

namespace gradwire {

// Whether `address` is in the memory of a CUDA device. False in builds without CUDA.
bool is_cuda_memory(const void* address);

}  // namespace gradwire
