// Chooses which of PowerSGD's passes take their products from a BLAS library (kernels/powersgd/library.h).
//
// GRADWIRE_POWERSGD_PRODUCTS selects one way for all passes. Otherwise, if the device has a library: with a
// file in GRADWIRE_TUNING, both ways are timed once for each pass over a bucket's matrices, and the file
// keeps the result; without a file model_times() decides. Ranks may measure different times, and another
// order of summation changes the last bits, so all ranks follow rank 0: a run's bits depend on rank 0's
// device and file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/gemm/tuning.h"
#include "kernels/powersgd/library.h"

namespace gradwire {

struct PowerSgdPass {
  enum Kind : uint8_t { project, project_onto, back_project };
  Kind kind = project;
  const MatrixTable* table = nullptr;
  bool forms_m = false;  // with error feedback; never for back_project

  // Returns the pass's key in a file: "project rank=4 with residual 2x4096x1024 3072x1024".
  std::string text() const;
};

// A pass's times, in microseconds.
struct PassTimes {
  double fused_us = 0, library_us = 0;
  bool library_is_faster() const { return library_us < fused_us; }
};

// Returns times modelled on an H200's measurements of many shapes and ranks.
PassTimes model_times(const PowerSgdPass& pass);
// Measures on the stream's device: synchronizes it, and temporarily allocates two copies of the matrices.
PassTimes measure_times(const Stream& stream, const PowerSgdPass& pass, ThinProducts& library);

// Returns whether the library is faster: from the file, or measured and then added to the file.
bool find_or_measure(TuningFile& file, const std::string& device, const std::string& library,
                     const PowerSgdPass& pass, const std::function<PassTimes()>& measure);

// Returns for each pass the library for its products, or null: the fused kernels. Collective if the device
// could have a library. Throws BadInput if GRADWIRE_POWERSGD_PRODUCTS is not one of auto, fused and library,
// or requests an unavailable library.
std::vector<ThinProducts*> choose_products(const BucketContext& context,
                                           const std::vector<PowerSgdPass>& passes);

// Returns "; products by cuBLAS 13.0.2: project, back_project": the passes with a library.
std::string described_products(const std::vector<PowerSgdPass>& passes,
                               const std::vector<ThinProducts*>& libraries);

}  // namespace gradwire
