// Network and process faults, injected into this process's rank.
//
// The transport writes to its sockets with sendmsg(), which this executable defines itself (faults.cpp). So
// what a rank sends can be delayed, corrupted or cut off as by a network, without the transport's knowledge.
#pragma once

#include <chrono>
#include <cstdint>

namespace gradwire::testing {

// From now on everything this process sends to other ranks arrives `delay` later; what
// arrives here is not delayed.
void delay_what_is_sent(std::chrono::milliseconds delay);
// Flips a bit in the magic number of the next header that this process sends (each call and each
// exchange begins with one).
void corrupt_next_header();
// The same in the frame before a message: in the message's length.
void corrupt_next_frame();
// A bit of the next payload that this process sends.
void corrupt_next_payload();
// Resets the connection to which this process writes next, once: both ends see an error.
void reset_next_connection();

}  // namespace gradwire::testing
