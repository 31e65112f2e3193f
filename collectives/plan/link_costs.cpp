#include "collectives/plan/link_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "collectives/agreement/statements.h"
#include "runtime/device/device.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

using namespace std::chrono_literals;

constexpr size_t kSmallBytes = 64;  // per message
// The number of bytes that a rank sends in the first round that measures throughput, and the most in a round.
constexpr size_t kFirstBytes = 1 << 10, kMaxBytes = 2 << 20, kMaxBytesOnGpus = 64 << 20;

class Meter {
 public:
  Meter(Transport& transport, const Stream& stream, int ranks_per_node, double us, size_t max_bytes)
      : transport_(transport),
        stream_(stream),
        us_(us),
        max_bytes_(max_bytes),
        out_(transport.device(), max_bytes),
        // Each small message takes 64 bytes, whatever the number of ranks.
        in_(transport.device(), std::max(max_bytes, kSmallBytes * static_cast<size_t>(transport.world()))),
        begin_(Event::create_timer(transport.device())),
        end_(Event::create_timer(transport.device())),
        call_{mix(0x6c696e6b, static_cast<uint64_t>(ranks_per_node)), "measuring the links"},
        label_{call_.hash, call_.what} {
    fill_zero(stream, out_.data(), out_.bytes());
  }

  LinkCosts::Pattern measure(const std::vector<int>& to, const std::vector<int>& from) {
    const size_t messages = std::max<size_t>(1, to.size());
    return fit([&](size_t all) { return std::max<size_t>(4, all / messages / 4 * 4); },
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
                   transport_.allreduce(stream_, out_.as<float>(), in_.as<float>(),
                                        static_cast<int64_t>(size / 4), false, sent, label_.what);
                 };
               });
  }

 private:
  struct Point {
    size_t share;
    std::vector<double> us = {};
    // Returns the second shortest time if there are three. A run is delayed by an interruption, during which
    // a rate limiter can save up to pass the next run at once.
    double typical_us() {
      std::ranges::sort(us);
      return us[us.size() / 3];
    }
  };

  // Measures one pattern with rounds of growing sizes, for about us_. `share(all)` is the size of a
  // message (or of an allreduce's buffer) when a rank sends `all` bytes. `bytes(share)` is the number of
  // bytes that a round of this size moves. `round(share)` returns the function that enqueues the round.
  template <typename Share, typename Bytes, typename Round>
  LinkCosts::Pattern fit(Share share, Bytes bytes, Round round) {
    round_us(round(kSmallBytes), 1);  // connects the ranks
    const double end = agree_on_time() + us_;
    const auto left = [&] { return end - now_; };
    // Measures a point again. Returns the time that this took the slowest rank.
    const auto run = [&](Point& point, int rounds = 1) {
      const double before = now_;
      point.us.push_back(round_us(round(point.share), rounds));
      return agree_on_time() - before;
    };
    std::vector<Point> points{{kSmallBytes}};
    double latency = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 9 && (i == 0 || left() > us_ * (i == 1 ? 0.5 : 0.875)); ++i) {
      const int rounds = std::min(1 << i, 8);
      if (i < 4) points[0].us.clear();  // the ranks' skew distorts shorter runs
      latency = std::min(latency, run(points[0], rounds) / (rounds + 2));
    }
    double took = 3 * latency;
    for (size_t all = kFirstBytes; left() > took;) {
      Point& point = points.emplace_back(share(all));
      took = run(point);
      // Several short runs use up a rate limiter's burst before the rounds are large. Interruptions must not
      // end the growth.
      const auto is_short = [&] { return 16 * took < left(); };
      for (int i = 1; i < 3 && took < left() && (is_short() || left() < 8 * took); ++i) {
        if (i == 1) point.us.clear();
        took = run(point);
      }
      const bool latency_dominates = took < 5 * latency;
      // Keep time to repeat large rounds.
      if (all == max_bytes_ || left() < (latency_dominates ? 2 : 8) * took) break;
      all = std::min(max_bytes_, all * (latency_dominates && !is_short() ? 8 : 2));
    }
    const double small = *std::ranges::min_element(points[0].us);
    Point &large = points.back(), &medium = points[std::max<size_t>(points.size(), 3) - 3];
    for (int i = 0; i < 5 && points.size() > 1 && left() > 1.5 * took; ++i) {
      if (i == 0) large.us.clear(), medium.us.clear();
      run(medium);
      took = run(large);
    }
    const double large_us = large.typical_us(), more_us = large_us - medium.typical_us();
    // Where bytes make no difference compared with the latency, assume a rate.
    const double least = more_us < small / 4 ? LinkCosts::Pattern{}.bytes_per_us : 0;
    const double most = bytes(large.share), fewer = bytes(medium.share);
    if (most <= fewer) return {small, least};
    // The cost per byte comes from two large rounds, because part of the latency overlaps with a large
    // transfer, and a rate limiter passes the first bytes as a burst. Clamp the cost per byte: noise must
    // make bytes neither free nor more expensive than the whole round.
    const double all_us = std::clamp(more_us * most / (most - fewer), 0.5 * large_us, large_us);
    return {small, std::max(most / all_us, least)};
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

  // Returns the time of a round, from `rounds` consecutive rounds. Events measure the time. An unmeasured
  // round precedes them, which synchronizes the ranks and, on a GPU, gives the host time to enqueue the
  // others.
  template <typename Round>
  double round_us(const Round& round, int rounds) {
    const FinishOnError finish(stream_);  // rounds use memory owned by `round`
    stream_.synchronize();
    transport_.begin_call(stream_, call_);  // read before this function returns
    round();
    begin_.record(stream_);
    for (int k = 0; k < rounds; ++k) round();
    end_.record(stream_);
    stream_.synchronize();
    return std::max(elapsed_ms(begin_, end_) * 1e3 / rounds, 1e-3);
  }

  // Returns the slowest rank's time since the beginning, in microseconds, from which all ranks decide alike.
  double agree_on_time() {
    const std::chrono::duration<double, std::micro> mine = std::chrono::steady_clock::now() - start_;
    const auto all =
        all_gather_value(transport_, stream_, mine.count(), "agreeing on the bytes to measure with");
    return now_ = *std::max_element(all.begin(), all.end());
  }

  Transport& transport_;
  const Stream& stream_;
  const double us_;
  const size_t max_bytes_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double now_ = 0;  // result of agree_on_time()
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
                             std::chrono::milliseconds limit, size_t max_bytes) {
  if (max_bytes == 0) max_bytes = transport.device().is_cuda() ? kMaxBytesOnGpus : kMaxBytes;
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
    costs.library_measured = transport.has_allreduce();
    const int patterns = 2 + (nodes ? 2 : 0) + (costs.library_measured ? 1 : 0);
    Meter meter(transport, stream, ranks_per_node, limit / 1us / patterns, max_bytes);
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
    if (costs.library_measured) costs.library = meter.measure_library();
  }
  LinkCosts::Pattern* patterns[] = {&costs.neighbour, &costs.all_pairs, &costs.intra_node, &costs.inter_node,
                                    &costs.library};
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
  costs.measured = true;
  return costs;
}

}  // namespace gradwire
