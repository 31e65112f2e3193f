// Mean and standard deviation per channel, for normalization.
#pragma once

#include "trainer/data/dataset.h"

namespace gradwire {

// Sets mean and stddev of both splits to the statistics of the training images, scaled to 0..1. Computes them
// from a histogram of byte values, so only the final operations round. A constant channel gets stddev 1.
void set_statistics(DataSplits& splits);

}  // namespace gradwire
