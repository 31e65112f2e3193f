// --optimizer dion:... and muon...: optimizers of the layers' matrices. AdamW updates the other tensors.
#pragma once

#include <string>
#include <vector>

#include "trainer/config/config.h"

namespace gradwire {

// Returns whether --optimizer's text names one of these optimizers.
bool is_matrix_optimizer(const std::string& text);
// The forms of the texts, for messages: "dion:rank=R[,...] or muon[:...]".
inline constexpr const char* kMatrixOptimizers =
    "dion:rank=R[,mu=X][,orth=on|off][,lr=X] or muon[:mu=X][,lr=X]";

// Applies --optimizer's text to the run's settings and to the compressions. `automatic`: --compression is
// auto. Throws BadInput for an unknown option or a compression that does not fit.
void resolve_matrix_optimizer(const std::string& text, bool automatic, TrainConfig& config,
                              std::vector<CompressionSpec>& compressions);

// Throws BadInput if Muon and a flag that divides or defers the update are combined.
void check_muon(const TrainConfig& config);

}  // namespace gradwire
