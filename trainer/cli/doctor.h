// `gradwire doctor` reports which features this machine and this build support, and why other features
// are off. With several ranks, also reports the speed of their links and recommends a compression.
#pragma once

#include "trainer/cli/flags.h"

namespace gradwire {

// Returns doctor's default options, which differ from the defaults of train: vit_b_32, batches of 32, a
// timeout of 10 s.
RunOptions doctor_defaults();

// Prints the report on rank 0 and, with options.json, writes it to a file. Collective if a launcher has
// started several processes. Blocks for seconds. Throws CommError when a rank does not answer in time.
void doctor(RunOptions options);

}  // namespace gradwire
