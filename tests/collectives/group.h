// Runs a body on every rank of a local group, with one thread per rank, as a training process does.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "runtime/device/device.h"
#include "tests/support/normal.h"

namespace gradwire::testing {

using namespace std::chrono_literals;

// Runs `body` on every rank. Rethrows the lowest rank's error after all ranks have ended. A rank that throws
// aborts the group, as in the trainer.
inline void run_ranks(int world, Device device, std::chrono::milliseconds timeout,
                      const std::function<void(Communicator&)>& body) {
  auto group = Communicator::create_local(std::vector<Device>(world, device), timeout);
  std::vector<std::exception_ptr> errors(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*group[r]);
      } catch (const std::exception& error) {
        errors[r] = std::current_exception();
        group[r]->abort(fmt::format("rank {}: {}", r, error.what()));
      }
    });
  }
  for (auto& t : threads) t.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

inline void run_ranks(int world, Device device, const std::function<void(Communicator&)>& body) {
  run_ranks(world, device, 60s, body);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline double norm(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return std::sqrt(sum);
}

}  // namespace gradwire::testing
