// Faults of a network and of processes, planted into the rank that this process is.
//
// The transport writes to its sockets with sendmsg(), which this executable defines itself (faults.cpp): so what
// leaves a rank can be held up, spoiled or cut off, as a network would, without the transport knowing.
#pragma once

#include <chrono>
#include <cstdint>

namespace gradwire::testing {

// From now on everything this process sends to other ranks arrives `delay` later; what arrives here is not
// delayed.
void delay_what_is_sent(std::chrono::milliseconds delay);
// Flips a bit in the magic number of the next header (of a call, then of an exchange) that this process
// sends.
void corrupt_next_header();
// The same in the frame that goes before each message: in how long it says that the message is.
void corrupt_next_frame();
// Resets, once, the connection to which this process writes next: both ends see an error.
void reset_next_connection();

}  // namespace gradwire::testing
