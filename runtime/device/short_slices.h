#pragma once

namespace gradwire {

// Asks Linux (6.12 and later; earlier versions ignore the request) to run this thread in slices of 0.1 ms,
// the shortest possible. The thread has the same share of a core as other threads, but runs soon after it
// wakes up. Meant for threads that wait for a network while other threads compute. Needs no privileges; a
// failure has no effect.
void ask_for_short_slices();

}  // namespace gradwire
