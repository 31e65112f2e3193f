#include "trainer/measure/link_matrix.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "collectives/agreement/statements.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device_cuda.h"

namespace gradwire {
namespace {

constexpr size_t kSmallBytes = 64, kLeastLarge = 256 << 10, kMostLarge = 32 << 20;
constexpr double kLargeUs = 10e3;

double best_round_us(Communicator& comm, const Stream& stream, const std::vector<Transfer>& transfers,
                     const ExchangeLabel& label, int rounds, int repeats) {
  using Clock = std::chrono::steady_clock;
  const FinishOnError finish(stream);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= repeats; ++i) {  // the first run is a warm-up
    const auto start = Clock::now();
    for (int k = 0; k < rounds; ++k) comm.transport().exchange(stream, transfers, label);
    stream.synchronize();
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / rounds;
    if (i > 0) best = std::min(best, us);
  }
  comm.check();
  return best;
}

}  // namespace

LinkMatrix measure_link_matrix(Communicator& comm, const Stream& stream, const LinkCosts& costs) {
  const int world = comm.world(), rank = comm.rank();
  const auto wanted = static_cast<size_t>(costs.neighbour.bytes_per_us * kLargeUs);
  const size_t large = std::clamp(wanted, kLeastLarge, kMostLarge) / 4 * 4;
  const Buffer out(comm.device(), large), in(comm.device(), large);
  fill_zero(stream, out.data(), large);
  std::vector<double> mine(static_cast<size_t>(2 * world));
  const Call call{0x6c696e6d, "measuring each link"};
  const ExchangeLabel label{call.hash, call.what};
  comm.transport().begin_call(stream, call);
  // Neighbours check the call at their first exchange, and a pair measured below need not be neighbours.
  const std::vector<Transfer> round{
      {Transfer::Kind::send, (rank + 1) % world, out.data(), kSmallBytes},
      {Transfer::Kind::receive, (rank + world - 1) % world, in.data(), kSmallBytes}};
  const FinishOnError finish(stream);
  comm.transport().exchange(stream, round, label);
  for (int a = 0; a < world; ++a) {
    for (int b = a + 1; b < world; ++b) {
      stream.synchronize();
      comm.barrier();  // no other traffic on the links
      if (rank != a && rank != b) continue;
      const int peer = rank == a ? b : a;
      auto transfers = [&](size_t bytes) {
        return std::vector<Transfer>{{Transfer::Kind::send, peer, out.data(), bytes},
                                     {Transfer::Kind::receive, peer, in.data(), bytes}};
      };
      const double small_us = best_round_us(comm, stream, transfers(kSmallBytes), label, 16, 4);
      const double large_us = best_round_us(comm, stream, transfers(large), label, 1, 3);
      mine[static_cast<size_t>(2 * peer)] = small_us;
      // If latency dominates, noise may make the difference tiny or negative. Therefore use at least half of
      // large_us.
      mine[static_cast<size_t>(2 * peer + 1)] =
          static_cast<double>(large) / std::max(large_us - small_us, 0.5 * large_us) / 1e3;
    }
  }
  const auto all = all_gather(comm.transport(), stream, mine, "speed of each link");
  LinkMatrix matrix{.world = world,
                    .links = std::vector<LinkMatrix::Link>(static_cast<size_t>(world * world))};
  for (int a = 0; a < world; ++a) {
    for (int b = 0; b < world; ++b) {
      if (a == b) continue;
      const auto &from = all[static_cast<size_t>(a)], &to = all[static_cast<size_t>(b)];
      const auto i = static_cast<size_t>(2 * b), j = static_cast<size_t>(2 * a);
      matrix.links[static_cast<size_t>(a * world + b)] = {std::max(from[i], to[j]),
                                                          std::min(from[i + 1], to[j + 1])};
    }
  }
  return matrix;
}

}  // namespace gradwire
