// Ranks with peer memory whose kernels run concurrently, for tests of kernels over peer memory.
#pragma once

#include <cstring>
#include <vector>

#include "runtime/device/peers.h"
#include "tests/simt/runtime.h"

namespace gradwire::testing {

// A group of ranks with peer memory.
class Group {
 public:
  Group(int world, int64_t half_bytes) : reports_(world) {
    for (int r = 0; r < world; ++r) {
      windows_.emplace_back(static_cast<size_t>(peer_window_bytes(half_bytes)) / 16);
      // The initial contents are arbitrary except for the signals.
      std::memset(windows_[r].data(), 0xff, windows_[r].size() * sizeof(Line));
      std::memset(windows_[r].data(), 0, kPeerHeaderBytes);
    }
    for (int r = 0; r < world; ++r) {
      PeerMemory& m = peers.emplace_back();
      for (int other = 0; other < world; ++other) m.windows[other] = windows_[other].data()->bytes;
      m.rank = r;
      m.world = world;
      m.half_bytes = half_bytes;
      m.report = &reports_[r];
      m.patience_ns = int64_t{3600} * 1'000'000'000;
    }
  }
  PeerReport& report(int rank) { return reports_[rank]; }
  std::vector<PeerMemory> peers;

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  std::vector<std::vector<Line>> windows_;
  std::vector<PeerReport> reports_;
};

inline std::vector<float> values(int64_t n, uint32_t seed, float spread) {
  std::vector<float> all(n);
  for (size_t i = 0; i < all.size(); ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float x = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
    all[i] = i % 5 == 0 ? x * spread : x;
  }
  return all;
}

// Limits the shim to one order of threads per launch while this object exists, because it takes seconds to
// simulate blocks of thousands of values (top-k).
class OneSchedule {
 public:
  explicit OneSchedule(bool only) : before_(simt::options().schedules) {
    if (only) simt::options().schedules = 1;
  }
  ~OneSchedule() { simt::options().schedules = before_; }

 private:
  const int before_;
};

// Plants a bug during its lifetime: no thread waits at barriers of this number.
struct Unheeded {
  explicit Unheeded(int barrier) { simt::options().unheeded_barrier = barrier; }
  ~Unheeded() { simt::options().unheeded_barrier = -1; }
};

}  // namespace gradwire::testing
