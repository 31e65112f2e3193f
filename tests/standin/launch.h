// How a kernel that tests/simt compiles as C++ gets onto a stream of the stand-in. Includes no CUDA header,
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
  const void* kernel;  // identifies it to cudaFuncSetAttribute
  std::array<unsigned, 3> grid, block;
  size_t shared_bytes;
  CUstream_st* stream;
  std::function<void()> run;  // runs the whole grid
};

// Checks the limits of a launch and enqueues it, or records it if the stream is capturing. Throws
// DeviceError, as cuda::launch() does.
void launch(KernelCall call);

// Enqueues `run` like a kernel: for libraries whose calls take a stream (cuBLAS). `pointers`: to the device
// memory that it reads and writes. Returns a cudaError_t.
int enqueue_library_call(const char* name, CUstream_st* stream, std::span<const void* const> pointers,
                         std::function<void()> run);

// Called by a kernel that waits for a kernel of another rank: lets other streams run for a while.
void let_other_streams_run();

// Draws a number from the machine's seeded sequence.
uint64_t draw();

}  // namespace gradwire::standin
