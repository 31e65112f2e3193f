// Measures a device's speed of matrix products and memory copies, for comparison with the log's TFLOP/s.
#pragma once

#include <limits>

#include "kernels/gemm/gemm.h"
#include "runtime/device/device.h"

namespace gradwire {

// The speeds of a device. NaN means not measured.
struct Peaks {
  double tflops = std::numeric_limits<double>::quiet_NaN();  // speed of a large product of random matrices
  double copy_gb_per_s = std::numeric_limits<double>::quiet_NaN();  // bytes read plus bytes written
  double fma_share = std::numeric_limits<double>::quiet_NaN();      // host: measure/products.h
};

// Measures the peaks. Blocks for about a tenth of a second. No other work should run on the device.
//   product   host: 768^3 FP32, one on each of the process's threads
//             CUDA: 8192^3 (FP32: 4096^3) in `precision`
//   copy      host: 64 MiB on all threads; CUDA: 256 MiB
// Returns the best of several runs and of earlier calls of this process, so that all runs of `compare` refer
// to the same peak.
Peaks measure_peaks(Device device, Precision precision);

}  // namespace gradwire
