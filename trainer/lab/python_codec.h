// A codec written in Python: `--compression FILE.py[:KEY=VALUE...]`, for experiments
// (docs/for-researchers.md).
#pragma once

#include <memory>
#include <vector>

#include "collectives/codec/codec.h"
#include "trainer/config/config.h"

namespace gradwire {

// Returns the codec of the bucket's file, which runs in a Python process of its own. A step packs the
// bucket's tensors, lets the class encode them, gathers all ranks' messages, and lets the class decode them.
// Ranks check that they hold the same bits. An error on any rank, with the same text, is BadInput on all. If
// a gradient of any rank is not finite, the mean becomes NaN and the class does not see this rank's gradient.
std::unique_ptr<Codec> make_python_codec(const BucketContext& context, uint64_t seed, double timeout_s);

// Throws BadInput if a spec's file is missing, or if the run does not support codecs in Python.
void check_python_codecs(const TrainConfig& config, const std::vector<CompressionSpec>& specs);

}  // namespace gradwire
