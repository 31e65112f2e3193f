#pragma once

namespace gradwire {

// Asks Linux (6.12 and later; others ignore it) to run this thread in slices of 0.1 ms, the shortest there are. It gets
// no more of a core's time than other threads, but gets it soon after it wakes up: for threads that wait for a network
// while others compute. Needs no privileges, changes nothing if it fails.
void ask_for_short_slices();

}  // namespace gradwire
