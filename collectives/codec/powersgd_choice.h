// Chooses which of PowerSGD's passes take their products from a BLAS library (kernels/powersgd/library.h).
//
// A model of an H200 decides (docs/results/2026-11-26-gpu). Sums in another order have other last bits, so a
// pass uses the library only if the models of all ranks choose it.
#pragma once

#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/library.h"

namespace gradwire {

struct PowerSgdPass {
  enum Kind : uint8_t { project, project_onto, back_project };
  Kind kind = project;
  const MatrixTable* table = nullptr;
  bool forms_m = false;  // with error feedback; never for back_project
};

// A pass's times, in microseconds.
struct PassTimes {
  double fused_us = 0, library_us = 0;
  bool library_is_faster() const { return library_us < fused_us; }
};

// Returns the times that a model predicts. The model was fitted to an H200's times of many shapes and ranks.
PassTimes model_times(const PowerSgdPass& pass);

// Returns, for each pass, the library for its products, or null for the fused kernels. On the host, where
// only tests have a library, every pass uses the library. Collective if the device can have a library.
std::vector<ThinProducts*> choose_products(const BucketContext& context,
                                           const std::vector<PowerSgdPass>& passes);

// Returns the passes with a library, such as "; products by cuBLAS 13.0.2: project, back_project".
std::string described_products(const std::vector<PowerSgdPass>& passes,
                               const std::vector<ThinProducts*>& libraries);

}  // namespace gradwire
