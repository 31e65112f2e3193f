// `gradwire doctor`: what this machine and this build support, and what is off and why; with several ranks,
// how fast their links are and which compression pays.
#pragma once

#include "trainer/cli/options.h"

namespace gradwire {

// Defaults that differ from train's: vit_b_32, batches of 32, a timeout of 10 s.
Options doctor_defaults();

// Prints the report on rank 0 and, with options.json, writes it to a file. Collective if a launcher has
// started several processes. Takes seconds; throws CommError when a rank does not answer in time.
void doctor(Options options);

}  // namespace gradwire
