// Checks that the ranks of a run were started with the same settings and data. Processes have separate flags,
// and ranks must not average gradients of different trainings.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "collectives/communicator/communicator.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"

namespace gradwire {

// Describes the data. Reads all images: call once per process, and not while other ranks wait.
std::string described_data(const DataSplits& data);
// Describes the settings, the data (described_data()) and the arithmetic.
std::string described_run(const TrainConfig& config, const std::string& data);

// Returns the first line in which two descriptions differ: "learning rate 0.1 there, 0.2 here".
std::string first_difference(const std::string& remote, const std::string& local);

// Compares the descriptions of all ranks, which are processes. Collective. Throws BadInput on rank 0, which
// names the rank and the difference.
void check_agreement(const std::string& local, Communicator& comm);

// A fingerprint of parameters by their bits: equal hashes on all ranks mean equal models.

// Returns the FNV-1a hash of the values' 32-bit words. Every bit affects the hash: -0 differs from 0, and
// NaNs with different bits differ.
uint64_t parameter_hash(std::span<const float> values);
// Returns the value as 16 hexadecimal digits.
std::string hex(uint64_t value);

}  // namespace gradwire
