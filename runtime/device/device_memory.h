// The location of memory that another library has allocated.
#pragma once

namespace gradwire {

// Returns whether `address` is in the memory of a CUDA device. False in builds without CUDA.
bool is_cuda_memory(const void* address);

}  // namespace gradwire
