// Enqueues kernels that tests/simt compiles as C++ on a stream of the stand-in. Includes no CUDA header,
// because kernels see tests/simt's vector types instead of CUDA's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

struct CUstream_st;

namespace gradwire::standin {

struct KernelCall {
  const char* name;    // the name given to cuda::launch()
  const void* kernel;  // the kernel's key in cudaFuncSetAttribute
  std::array<unsigned, 3> grid, block;
  size_t shared_bytes;
  CUstream_st* stream;
  std::function<void()> run;  // runs the whole grid
};

// Checks a launch against CUDA's limits and enqueues the launch, or records it if the stream is capturing.
// Throws DeviceError, as cuda::launch() does.
void launch(KernelCall call);

// Enqueues `run` like a kernel, for libraries whose calls take a stream (cuBLAS). `pointers` lists the device
// memory that `run` reads and writes. Returns a cudaError_t.
int enqueue_library_call(const char* name, CUstream_st* stream, std::span<const void* const> pointers,
                         std::function<void()> run);

// Runs other streams for a while. Work calls this function while waiting for another stream's work.
void let_other_streams_run();

// Returns a number from the machine's seeded random sequence.
uint64_t draw();

}  // namespace gradwire::standin
