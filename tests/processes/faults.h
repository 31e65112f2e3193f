// Network and process faults, injected into this process's rank.
//
// The transport writes to its sockets with sendmsg(), which this executable defines itself (faults.cpp). So a
// rank's data can be delayed, corrupted or cut off as by a network, transparently to the transport.
#pragma once

#include <chrono>
#include <cstdint>

namespace gradwire::testing {

// Delays everything that this process sends to other ranks from now on by `delay`; received data is not
// delayed.
void delay_what_is_sent(std::chrono::milliseconds delay);
// Flips a bit in the magic number of the next header that this process sends (each call and each exchange
// begins with a header).
void corrupt_next_header();
// Flips a bit in the frame before a message: in the message's length.
void corrupt_next_frame();
// Flips a bit of the next payload that this process sends.
void corrupt_next_payload();
// Resets the connection to which this process writes next, once: both ends see an error.
void reset_next_connection();

}  // namespace gradwire::testing
