// Cristian's algorithm: a rank asks rank 0 for the time. Rank 0's answer was correct at some moment between
// the request and the reply.
#include "collectives/agreement/shared_clock.h"

#include <cmath>
#include <limits>

#include "collectives/transport/transport.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTries = 8;

class TimeExchange {
 public:
  explicit TimeExchange(Transport& transport)
      : transport_(transport),
        stream_(transport.device().is_host() ? Stream::immediate_host()
                                             : Stream::create(transport.device(), "clock alignment")),
        value_(make_buffer<int64_t>(transport.device(), 1)) {
    fill_zero(stream_, value_.data(), value_.bytes());
    transport_.begin_call(stream_, call_);
  }

  int64_t receive(int from) {
    exchange({Transfer::Kind::receive, from, value_.data(), value_.bytes()});
    return to_host(stream_, value_.as<const int64_t>(), 1)[0];
  }
  void send(int to, int64_t value) {
    store(stream_, value_.data(), &value, sizeof value);
    exchange({Transfer::Kind::send, to, value_.data(), value_.bytes()});
    stream_.synchronize();
  }
  void check() { transport_.check(); }

 private:
  void exchange(const Transfer& transfer) {
    transfers_ = {transfer};
    transport_.exchange(stream_, transfers_, label_);
    stream_.synchronize();
  }

  Transport& transport_;
  const Call call_{0x636c6f636b, "agreeing on the time"};
  const ExchangeLabel label_{call_.hash, call_.what};
  std::vector<Transfer> transfers_;
  Stream stream_;
  Buffer value_;
};

}  // namespace

SharedInstant agree_on_instant(Transport& transport, const std::function<Clock::time_point()>& now) {
  auto now_ns = [&] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now().time_since_epoch()).count();
  };
  const int64_t start = now_ns();
  auto instant = [](int64_t ns) { return Clock::time_point(std::chrono::nanoseconds(ns)); };
  if (transport.world() == 1) return {instant(start), 0};
  TimeExchange exchange(transport);
  if (transport.rank() == 0) {
    for (int rank = 1; rank < transport.world(); ++rank) {
      for (int i = 0; i < kTries; ++i) {
        exchange.receive(rank);
        exchange.send(rank, now_ns());
      }
      exchange.send(rank, start);
    }
    exchange.check();
    return {instant(start), 0};
  }
  // ahead: how far rank 0's clock is ahead of this rank's clock, in nanoseconds
  int64_t round_trip = std::numeric_limits<int64_t>::max(), ahead = 0;
  for (int i = 0; i < kTries; ++i) {
    const int64_t asked = now_ns();
    exchange.send(0, asked);
    const int64_t theirs = exchange.receive(0);
    const int64_t answered = now_ns();
    if (answered - asked >= round_trip) continue;
    round_trip = answered - asked;
    ahead = theirs - (asked + round_trip / 2);
  }
  const int64_t theirs = exchange.receive(0);
  exchange.check();
  if (std::abs(ahead) <= round_trip / 2) return {instant(theirs), 0};
  return {instant(theirs - ahead), static_cast<double>(round_trip) / 2e3};
}

}  // namespace gradwire
