// Ranks over the fake NCCL, with one thread per rank.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/util/error.h"
#include "tests/collectives/fake_nccl.h"
#include "tests/support/threads.h"

namespace gradwire::testing {

struct NcclRank {
  std::unique_ptr<NcclTransport> transport;
  FakeComm* comm = nullptr;
  Stream stream = Stream::create(Device::host(), "test");
};

// Runs a body on every rank. Returns every rank's error, or "" for success.
inline std::vector<std::string> run_nccl(int world, const std::function<NcclSetup(int)>& make,
                                         const std::function<void(NcclRank&)>& body) {
  return errors_in_threads(world, [&](int r) {
    NcclRank rank;
    NcclSetup s = make(r);
    rank.comm = &fake(s.comm);
    rank.transport = std::make_unique<NcclTransport>(std::move(s));
    struct Drain {  // waits for enqueued work, which uses the transport
      Stream& stream;
      ~Drain() { stream.synchronize(); }
    } drain{rank.stream};
    body(rank);
  });
}
// Runs a body on every rank with the same settings.
inline std::vector<std::string> run_nccl(FakeWorld& world, std::chrono::milliseconds timeout,
                                         const std::function<void(NcclRank&)>& body) {
  return run_nccl(
      static_cast<int>(world.comms.size()), [&](int r) { return fake_setup(world[r], timeout); }, body);
}

// Exchanges 4 bytes with every other rank, `steps` times.
inline void all_to_all(NcclRank& rank, int steps) {
  const int world = rank.transport->world(), me = rank.transport->rank();
  std::vector<int> in(world), out(world, me);
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == me) continue;
    transfers.push_back({Transfer::Kind::send, peer, &out[peer], 4});
    transfers.push_back({Transfer::Kind::receive, peer, &in[peer], 4});
  }
  for (int step = 0; step < steps; ++step) {
    rank.transport->exchange(rank.stream, transfers, {1, fmt::format("step {}", step)});
    rank.stream.synchronize();
    rank.transport->check();
    for (int peer = 0; peer < world; ++peer) {
      if (peer != me && in[peer] != peer) throw Error("wrong data passed check()");
    }
  }
}

}  // namespace gradwire::testing
