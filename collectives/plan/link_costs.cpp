#include "collectives/plan/link_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "collectives/agreement/all_gather.h"
#include "runtime/device/properties.h"
#include "runtime/device/unwinding.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

// The cost of a fourth-generation NVLink; a quarter of the throughput is deducted for headers.
constexpr LinkCosts::Pattern kNvlink{.latency_us = 4, .bytes_per_us = 340e3};
constexpr LinkCosts::Pattern kPcie{.latency_us = 8, .bytes_per_us = 20e3};
constexpr double kPeerReadUs = 1;
constexpr size_t kSmallBytes = 64;       // per message
constexpr size_t kLeastLarge = 2 << 20;  // smallest number of bytes that a rank sends in a large round
constexpr size_t kMostLarge =
    64 << 20;  // largest number of bytes that a rank sends in a large round, between GPUs
constexpr double kLongestRoundUs = 10e3;  // limit on the duration of a large round

class Meter {
 public:
  Meter(Transport& transport, const Stream& stream, int ranks_per_node, size_t most_bytes)
      : transport_(transport),
        stream_(stream),
        most_bytes_(most_bytes),
        out_(transport.device(), most_bytes),
        // Each small message takes 64 bytes, whatever the number of ranks.
        in_(transport.device(), std::max(most_bytes, kSmallBytes * static_cast<size_t>(transport.world()))),
        begin_(Event::create_timer(transport.device())),
        end_(Event::create_timer(transport.device())),
        call_{mix(0x6c696e6b, static_cast<uint64_t>(ranks_per_node)), "measuring the links"},
        label_{call_.hash, call_.what} {
    fill_zero(stream, out_.data(), out_.bytes());
    transport.begin_call(stream, call_);
  }

  LinkCosts::Pattern measure(const std::vector<int>& to, const std::vector<int>& from) {
    const size_t messages = std::max<size_t>(1, to.size());
    return fit([&](size_t all) { return all / messages / 4 * 4; },
               [&](size_t each) { return static_cast<double>(each * to.size()); },
               [&](size_t each) {
                 return [this, transfers = exchange(to, from, each)] {
                   transport_.exchange(stream_, transfers, label_);
                 };
               });
  }

  LinkCosts::Pattern measure_library() {
    const double n = transport_.world();
    const auto bytes = [n](size_t size) { return 2 * (n - 1) / n * static_cast<double>(size); };
    return fit([](size_t all) { return all / 4 * 4; }, bytes,
               [&](size_t size) {
                 return [this, size, sent = static_cast<uint64_t>(bytes(size))] {
                   transport_.native_allreduce()->allreduce(stream_, out_.as<float>(), in_.as<float>(),
                                                            static_cast<int64_t>(size / 4), false, sent,
                                                            label_.what);
                 };
               });
  }

 private:
  // Measures one pattern with rounds of several sizes. `share(all)` is the size of a message (or of an
  // allreduce's buffer) when a rank sends `all` bytes. `bytes(share)` is the number of bytes that a round of
  // this size moves. `round(share)` returns the function that enqueues the round.
  template <typename Share, typename Bytes, typename Round>
  LinkCosts::Pattern fit(Share share, Bytes bytes, Round round) {
    const double small = round_us(round(kSmallBytes), 8, 6);
    auto time = [&](size_t all) { return round_us(round(share(all)), 1, 3); };
    // NVLink moves 2 MiB in less time than a round takes to start, so the measurement of a fast link needs
    // larger messages.
    size_t large_bytes = kLeastLarge;
    double large = time(large_bytes);
    const double slowest = slowest_us(large);
    while (large_bytes < most_bytes_ &&
           slowest * static_cast<double>(2 * large_bytes) / kLeastLarge < kLongestRoundUs) {
      large_bytes *= 2;
    }
    if (large_bytes > kLeastLarge) large = time(large_bytes);
    // The cost per byte comes from two large rounds, because part of the latency overlaps with a large
    // transfer, and a rate limiter passes the first bytes as a burst.
    const size_t medium_bytes = large_bytes / 4;
    const double medium = time(medium_bytes);
    const double most = bytes(share(large_bytes)), fewer = bytes(share(medium_bytes));
    // Clamp the cost per byte: where latency dominates, noise must make bytes neither free nor more expensive
    // than the whole round.
    const double more = std::clamp((large - medium) * most / (most - fewer), 0.5 * large, large);
    return {small, most / more};
  }

  std::vector<Transfer> exchange(const std::vector<int>& to, const std::vector<int>& from, size_t bytes) {
    std::vector<Transfer> transfers;
    for (int peer : to) transfers.push_back({Transfer::Kind::send, peer, out_.data(), bytes});
    size_t at = 0;
    for (int peer : from) {
      transfers.push_back({Transfer::Kind::receive, peer, in_.as<std::byte>() + at, bytes});
      at += bytes;
    }
    return transfers;
  }

  // Returns the shortest time of `repeats` runs of `rounds` consecutive rounds, after one warm-up run. Events
  // measure the time. Each run begins with an unmeasured round, which synchronizes the ranks and, on a GPU,
  // gives the host time to enqueue the other rounds.
  template <typename Round>
  double round_us(const Round& round, int rounds, int repeats) {
    const FinishOnError finish(stream_);  // rounds use memory owned by `round`
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i <= repeats; ++i) {
      stream_.synchronize();
      round();
      begin_.record(stream_);
      for (int k = 0; k < rounds; ++k) round();
      end_.record(stream_);
      stream_.synchronize();
      if (i > 0) best = std::min(best, elapsed_ms(begin_, end_) * 1e3 / rounds);
    }
    return std::max(best, 1e-3);
  }

  // Returns the slowest rank's time, from which all ranks derive the same number of bytes to exchange.
  double slowest_us(double mine) {
    const auto all = all_gather_value(transport_, stream_, mine, "agreeing on the bytes to measure with");
    transport_.begin_call(stream_, call_);
    return *std::max_element(all.begin(), all.end());
  }

  Transport& transport_;
  const Stream& stream_;
  const size_t most_bytes_;
  Buffer out_, in_;
  Event begin_, end_;
  const Call call_;
  const ExchangeLabel label_;
  const FinishOnError finish_{stream_};
};

std::string text(const char* what, const LinkCosts::Pattern& p) {
  return fmt::format("{} {:.3g} us and {:.3g} GB/s", what, p.latency_us, p.bytes_per_us / 1e3);
}

}  // namespace

std::string LinkCosts::to_string() const {
  std::string all = fmt::format("{}, {}", text("to a neighbour", neighbour), text("to all", all_pairs));
  if (intra_node != all_pairs || inter_node != all_pairs) {
    all += fmt::format(", {}, {}", text("inside a node", intra_node), text("between nodes", inter_node));
  }
  if (library_measured) all += ", " + text("NCCL's allreduce", library);
  return all;
}

LinkCosts measure_link_costs(Transport& transport, const Stream& stream, int ranks_per_node,
                             size_t most_bytes) {
  if (most_bytes == 0) most_bytes = transport.device().is_cuda() ? kMostLarge : kLeastLarge;
  const int world = transport.world(), rank = transport.rank();
  LinkCosts costs;
  if (world == 1) return costs;
  auto others = [&](int begin, int end, int step) {
    std::vector<int> ranks;
    for (int r = begin; r < end; r += step) {
      if (r != rank) ranks.push_back(r);
    }
    return ranks;
  };
  const bool nodes = ranks_per_node > 1 && ranks_per_node < world;
  {
    Meter meter(transport, stream, ranks_per_node, most_bytes);
    const auto all = others(0, world, 1);
    costs.neighbour = meter.measure({(rank + 1) % world}, {(rank + world - 1) % world});
    costs.all_pairs = meter.measure(all, all);
    if (nodes) {
      const int first = rank / ranks_per_node * ranks_per_node;
      const auto here = others(first, first + ranks_per_node, 1);
      const auto alike = others(rank % ranks_per_node, world, ranks_per_node);
      costs.intra_node = meter.measure(here, here);
      costs.inter_node = meter.measure(alike, alike);
    }
    costs.library_measured = transport.native_allreduce() != nullptr;
    if (costs.library_measured) costs.library = meter.measure_library();
  }
  const Device device = transport.device();
  costs.peer_memory = reaches_peers_over_nvlink(device) ? kNvlink : kPcie;
  LinkCosts::Pattern* patterns[] = {&costs.neighbour,  &costs.all_pairs, &costs.intra_node,
                                    &costs.inter_node, &costs.library,   &costs.peer_memory};
  std::vector<double> mine;
  for (const auto* p : patterns) {
    mine.push_back(p->latency_us);
    mine.push_back(p->bytes_per_us);
  }
  for (const auto& theirs : all_gather(transport, stream, mine, "agreeing on what the links cost")) {
    for (size_t i = 0; i < std::size(patterns); ++i) {
      patterns[i]->latency_us = std::max(patterns[i]->latency_us, theirs[2 * i]);
      patterns[i]->bytes_per_us = std::min(patterns[i]->bytes_per_us, theirs[2 * i + 1]);
    }
  }
  if (!nodes) costs.intra_node = costs.inter_node = costs.all_pairs;
  if (device.is_host()) {
    costs.peer_memory = costs.all_pairs;
  } else {
    costs.peer_read_us = kPeerReadUs;
  }
  costs.measured = true;
  return costs;
}

}  // namespace gradwire
