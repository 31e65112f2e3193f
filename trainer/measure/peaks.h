// Measures a device's speed of matrix products and memory copies, for comparison with the log's TFLOP/s.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "kernels/gemm/gemm.h"
#include "runtime/device/device.h"

namespace gradwire {

// The speeds of a device. NaN means not measured.
struct Peaks {
  double tflops = std::numeric_limits<double>::quiet_NaN();  // speed of a large product of random matrices
  double copy_gb_per_s = std::numeric_limits<double>::quiet_NaN();  // bytes read plus bytes written
  double fma_share = std::numeric_limits<double>::quiet_NaN();      // host: from measure_products()
};

// Measures the peaks. Blocks for about a tenth of a second. No other work should run on the device.
//   product   host: 768^3 FP32, one on each of the process's threads
//             CUDA: 8192^3 (FP32: 4096^3) in `precision`
//   copy      host: 64 MiB on all threads; CUDA: 256 MiB
// Returns the best of several runs and of earlier calls of this process, so that all runs of `compare` refer
// to the same peak.
Peaks measure_peaks(Device device, Precision precision);

// The machine's network interfaces and InfiniBand or RoCE ports, from sysfs.

struct NetInterface {
  std::string name;
  bool up = false;
  int64_t megabits = -1;  // megabits per second; -1 if unknown
};
struct InfinibandPort {
  std::string device;  // "mlx5_0"
  int port = 1;
  std::string link;  // "InfiniBand" or "Ethernet" (RoCE)
  std::string rate;  // "200 Gb/sec (4X HDR)"
  bool active = false;
};
struct Network {
  std::vector<NetInterface> interfaces;  // sorted by name, without loopback
  std::vector<InfinibandPort> ports;
};

// Reads sysfs at `sys`. Never throws; skips unreadable entries.
Network find_network(const std::string& sys = "/sys");

// The BLAS library for products on the host, and its speed relative to the processor's peak.

// Returns "OpenBLAS 0.3.21, Zen kernels", and the reason if OpenBLAS did not choose the kernels. Throws
// BadInput when GRADWIRE_BLAS_KERNELS names unknown kernels.
std::string host_products_text();

// Returns the speed of an FP32 product as a fraction of the core's FMA peak, each speed the best of several
// runs in the calling thread. Measures the thread's CPU time, so other programs on the same cores hardly
// matter. Blocks for about 50 ms. Returns NaN if the processor has no AVX2 or the build is sanitized.
double measure_fma_share();

// Returns a warning about slow products; "" when the fraction is high enough or NaN.
std::string slow_products_warning(double fma_share);

// Times work on a stream.

struct Timing {
  double fastest_ms = 0;  // shortest run, least disturbed by other work
  double mean_ms = 0;     // mean over the runs, which includes the effect of other work
  double deviation = 0;   // standard deviation of a run, divided by the mean
};

// Runs `work`, which enqueues on `stream`, once as a warm-up, then 2 to 20 times until `budget_ms` have
// passed. Times each run with two events. Blocks.
Timing time_runs(const Stream& stream, const std::function<void()>& work, double budget_ms);

// Measures what compression loses in one step, on given gradients.

// Returns the relative L2 error of the mean of two ranks that both have these gradients, in the first step:
// the root mean square of ||mean - g|| / ||g|| over tensors, weighted by their elements. Tensors of zeros do
// not count. `gradients`: in packed_layout(), with zeros in gaps. Both ranks are threads that use `device`;
// nothing is sent to other processes. Works bucket by bucket, so that it needs little memory. Ignores
// schedule= and intra_node=, which the pair may not be able to follow. Returns NaN if a value is not finite,
// and 0 if all are 0. Blocks.
double encode_error(Device device, const std::vector<GradientTensor>& tensors,
                    const std::vector<float>& gradients, const std::string& spec);
// Does the same, or returns nothing if the measurement fails: a run can continue without it.
std::optional<double> try_encode_error(Device device, const std::vector<GradientTensor>& tensors,
                                       const std::vector<float>& gradients, const std::string& spec);

}  // namespace gradwire
