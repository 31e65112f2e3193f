#include "collectives/codec/powersgd_choice.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/agreement/all_gather.h"

namespace gradwire {
namespace {

const char* name(PowerSgdPass::Kind kind) {
  constexpr const char* kNames[] = {"project", "project_onto", "back_project"};
  return kNames[kind];
}

}  // namespace

PassTimes model_times(const PowerSgdPass& pass) {
  // Coefficients of the model, in microseconds per million elements of M, fitted to 151 and 9 matrices at
  // ranks 1 to 64 on an H200 (docs/results/2026-11-26-gpu). Kernels that sum over rows read M again for every
  // eight columns of P.
  constexpr double kLaunchUs = 2.5, kLeastProductUs = 5;
  constexpr int kColumnsAtOnce = 8;
  const int rank = pass.table->max_rank();
  const double rereads = (rank + kColumnsAtOnce - 1) / kColumnsAtOnce - 1;
  double fused = 0, product = 6.1 + 0.026 * rank;
  switch (pass.kind) {
    case PowerSgdPass::project:
      fused = (pass.forms_m ? 3.9 : 1.2) + 0.31 * rank;
      product = 6.1 + 0.073 * rank;
      break;
    case PowerSgdPass::project_onto:
      fused = pass.forms_m ? 4.7 + 6.0 * rereads : 1.0 + 1.3 * rereads;
      break;
    case PowerSgdPass::back_project:
      fused = 1.0 + 1.3 * rereads;
      break;
  }
  const auto millions = 1e-6 * static_cast<double>(pass.table->elements());
  double library_us = pass.forms_m ? millions * (2.8 + 0.055 * rank) + 3 * kLaunchUs : kLaunchUs;
  for (const MatrixDescriptor& d : pass.table->host())
    library_us += std::max(kLeastProductUs, 1e-6 * d.rows * d.cols * product);
  return {.fused_us = millions * fused + kLaunchUs, .library_us = library_us};
}

std::vector<ThinProducts*> choose_products(const BucketContext& c, const std::vector<PowerSgdPass>& passes) {
  std::vector<ThinProducts*> chosen(passes.size());
  const Device device = c.transport->device();
  ThinProducts* const library = thin_products(device);
  // On the host only tests provide a library.
  if (passes.empty() || (device.is_host() && library == nullptr)) return chosen;
  std::vector<double> mine;
  for (const PowerSgdPass& pass : passes)
    mine.push_back(library != nullptr && (device.is_host() || model_times(pass).library_is_faster()) ? 1 : 0);
  std::vector<std::vector<double>> all{mine};
  if (c.transport->world() > 1)
    all = all_gather(*c.transport, c.stream, mine, c.name + ", choosing PowerSGD's products");
  for (size_t i = 0; i < passes.size(); ++i) {
    if (std::ranges::all_of(all, [&](const auto& rank) { return rank[i] != 0; })) chosen[i] = library;
  }
  return chosen;
}

std::string described_products(const std::vector<PowerSgdPass>& passes,
                               const std::vector<ThinProducts*>& libraries) {
  std::string text;
  for (size_t i = 0; i < passes.size(); ++i) {
    if (libraries[i] == nullptr) continue;
    text += text.empty() ? fmt::format("; products by {}: ", libraries[i]->name()) : ", ";
    text += name(passes[i].kind);
  }
  return text;
}

}  // namespace gradwire
