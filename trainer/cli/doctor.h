// `gradwire doctor`: what this machine and this build offer, what is off and why; and, of several ranks, what
// their links give and which compression would pay.
#pragma once

#include "trainer/cli/options.h"

namespace gradwire {

// What doctor looks at unless flags say otherwise: vit_b_32 with batches of 32, and short deadlines.
Options doctor_defaults();

// Prints (rank 0) and, with options.json, writes it all. Collective where a launcher has started several
// processes. Takes seconds; throws CommError when a rank does not answer in time.
void doctor(Options options);

}  // namespace gradwire
