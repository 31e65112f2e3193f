// In place of kernels/powersgd/library_cuda.cpp, which loads the real cuBLAS: the stand-in has none to load.
#include "kernels/powersgd/library.h"

namespace gradwire::cuda {

ThinProducts* thin_products(std::string& obstacle) {
  obstacle = "the stand-in for the CUDA runtime (tests/standin) has no cuBLAS to load";
  return nullptr;
}

}  // namespace gradwire::cuda
