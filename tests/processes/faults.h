// Network and process faults, injected into this process's rank.
//
// The transport writes to its sockets with sendmsg(), which this executable defines itself (faults.cpp). So a
// rank's data can be delayed, corrupted or cut off as by a network, transparently to the transport.
#pragma once

#include <chrono>
#include <cstdint>

namespace gradwire::testing {

// Delays all data that this process sends to other ranks from now on by `delay`. Received data is not
// delayed.
void delay_what_is_sent(std::chrono::milliseconds delay);
// Flips a bit in the magic number of the next header that this process sends. Each call begins with a header.
void corrupt_next_header();
// Flips a bit in the next frame that this process sends: in the message's length, which the frame contains.
void corrupt_next_frame();
// Flips a bit of the next payload that this process sends.
void corrupt_next_payload();
// Resets the next connection to which this process writes, once. Both ends of the connection see an error.
void reset_next_connection();

}  // namespace gradwire::testing
