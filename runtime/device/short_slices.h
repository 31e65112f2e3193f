#pragma once

namespace gradwire {

// Asks Linux (6.12 and later; others ignore it) to run this thread in slices of 0.1 ms, the shortest
// possible. The thread gets the same share of a core as others, but soon after it wakes up: for threads that
// wait for a network while others compute. Needs no privileges; has no effect if it fails.
void ask_for_short_slices();

}  // namespace gradwire
