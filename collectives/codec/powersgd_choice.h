// Which of PowerSGD's passes take their products from a BLAS library (kernels/powersgd/library.h).
//
// GRADWIRE_POWERSGD_PRODUCTS names one way for all. Otherwise, where the device has a library, both ways are timed
// once for each pass over the matrices of a bucket, if GRADWIRE_TUNING names a file to keep the result in; without a file
// a model of an H100 decides. Ranks may find different times, and sums of another order have other last bits, so all ranks do
// what rank 0 found: a run's bits depend on rank 0's device and file.
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
  bool forms_m = false;  // with error feedback; back_project never does

  // What identifies it in a file: "project rank=4 with residual 2x4096x1024 3072x1024".
  std::string text() const;
};

// What a pass takes, in microseconds.
struct PassTimes {
  double fused_us = 0, library_us = 0;
  bool library_is_faster() const { return library_us < fused_us; }
};

// As an H200 measured passes of many shapes and ranks.
PassTimes model_times(const PowerSgdPass& pass);
// On the stream's device: it is waited for, and memory for two copies of the matrices is taken meanwhile.
PassTimes measure_times(const Stream& stream, const PowerSgdPass& pass, ThinProducts& library);

// Whether the library is faster: as in the file, or measured, and then added to it.
bool find_or_measure(TuningFile& file, const std::string& device, const std::string& library,
                     const PowerSgdPass& pass, const std::function<PassTimes()>& measure);

// For each pass the library that makes its products, or null: the fused kernels. Collective where the device could have a
// library. Throws BadInput if GRADWIRE_POWERSGD_PRODUCTS is none of auto, fused and library, or asks for a library that
// cannot be had.
std::vector<ThinProducts*> choose_products(const BucketContext& context,
                                           const std::vector<PowerSgdPass>& passes);

// "; products by cuBLAS 13.0.2: project, back_project", for those that have a library.
std::string described_products(const std::vector<PowerSgdPass>& passes,
                               const std::vector<ThinProducts*>& libraries);

}  // namespace gradwire
