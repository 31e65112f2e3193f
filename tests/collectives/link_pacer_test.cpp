// Properties of emulated links, on a clock that the tests set.
#include "collectives/transport/emulated_link.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <random>
#include <vector>

#include "runtime/util/error.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;
using Time = LinkPacer::Time;
using Flow = LinkPacer::Flow;

constexpr Time kStart{1h};

Flow& add(std::deque<Flow>& flows, int from, int to, size_t bytes) {
  Flow& flow = flows.emplace_back();
  flow.from = from, flow.to = to, flow.bytes = bytes;
  return flow;
}

// Returns when the whole message has arrived. Calls arrived() only at the times that earliest() returns.
Time arrival(LinkPacer& pacer, Flow& flow, Time now) {
  while (pacer.arrived(flow, now) < flow.bytes) {
    const Time next = pacer.earliest(flow, flow.bytes);
    EXPECT_GT(next, now);
    now = next;
  }
  return now;
}

TEST(EmulatedLink, ParsesRatesAndDelays) {
  const EmulatedLink plain = EmulatedLink::parse("100Mbit"), delayed = EmulatedLink::parse("1.5gbit,20ms");
  EXPECT_EQ(plain.bits_per_s, 1e8);
  EXPECT_EQ(plain.delay, 0ns);
  EXPECT_EQ(delayed.bits_per_s, 1.5e9);
  EXPECT_EQ(delayed.delay, 20ms);
  for (const char* text :
       {"100kbit", "100Mbit", "1Gbit,20ms", "2.5Gbit,1.5s", "1Tbit,10us", "1Gbit,0us,128KiB",
        "1Gbit,1ms,12.5kB", "5Gbit,then=100Mbit@20s", "1Gbit,1ms,12.5kB,then=2Gbit@500ms"}) {
    EXPECT_EQ(EmulatedLink::parse(text).to_string(), text);
  }
  EXPECT_EQ(EmulatedLink::parse("100000kbit,1000us").to_string(), "100Mbit,1ms");
  for (const char* text : {"1Gbps", "1Gb/s", "1Gbit/s", "1G", "1g", "1GBIT"}) {
    EXPECT_EQ(EmulatedLink::parse(text).to_string(), "1Gbit") << text;
  }
  EXPECT_FALSE(EmulatedLink{});
}

TEST(EmulatedLink, RejectsOtherTexts) {
  for (const char* text : {"0", "fast", "", "100", "100MB", "-1Mbit", "0Mbit", "1kbit", "2Tbit", "Mbit",
                           "nanMbit", "1e3Mbit", "100 Mbit", "1..5Mbit"}) {
    expect_error<BadInput>([&] { EmulatedLink::parse(text); },
                           {fmt::format("--link {}", text), "not a rate", "100Mbit"});
  }
  for (const char* text : {"1Gbit,", "1Gbit,20", "1Gbit,-1ms", "1Gbit,11s", "1Gbit,fast", "1Gbit,,128KiB"}) {
    expect_error<BadInput>([&] { EmulatedLink::parse(text); },
                           {fmt::format("--link {}", text), "not a delay", "20ms"});
  }
  for (const char* text :
       {"1Gbit,20ms,", "1Gbit,20ms,1ms", "1Gbit,1ms,-1kB", "1Gbit,1ms,2000MB", "1Gbit,1ms,1kB,1"}) {
    expect_error<BadInput>([&] { EmulatedLink::parse(text); },
                           {fmt::format("--link {}", text), "not a burst"});
  }
  for (const char* text : {"1Gbit,then=", "1Gbit,then=fast@1s", "1Gbit,then=1kbit@1s"}) {
    expect_error<BadInput>([&] { EmulatedLink::parse(text); },
                           {fmt::format("--link {}", text), "not a rate"});
  }
  for (const char* text :
       {"1Gbit,then=1Mbit", "1Gbit,then=1Mbit@", "1Gbit,then=1Mbit@20", "1Gbit,then=1Mbit@-1s"}) {
    expect_error<BadInput>([&] { EmulatedLink::parse(text); },
                           {fmt::format("--link {}", text), "not a time"});
  }
}

TEST(LinkPacer, MessageTakesTheTimeOfItsBytesAndHeadersPlusTheDelay) {
  LinkPacer pacer({.bits_per_s = 1e8, .delay = 5ms}, 2);
  std::deque<Flow> flows;
  Flow& flow = add(flows, 0, 1, 144'800);  // 100 packets of 1514 bytes
  pacer.post(flow, kStart);
  const Time end = arrival(pacer, flow, kStart);
  EXPECT_NEAR(std::chrono::duration<double>(end - kStart).count(), 0.005 + 151'400 * 8e-8, 1e-6);
}

TEST(LinkPacer, RateChangesAtItsTimeAfterTheFirstMessage) {
  LinkPacer pacer({.bits_per_s = 1e9, .then_bits_per_s = 1e7, .then_after = 2s}, 2);
  std::deque<Flow> flows;
  const auto seconds = [&](Time at) {
    Flow& flow = add(flows, 0, 1, 144'800);
    pacer.post(flow, at);
    return std::chrono::duration<double>(arrival(pacer, flow, at) - at).count();
  };
  EXPECT_NEAR(seconds(kStart), 151'400 * 8e-9, 1e-6);
  EXPECT_NEAR(seconds(kStart + 1s), 151'400 * 8e-9, 1e-6);
  EXPECT_NEAR(seconds(kStart + 3s), 151'400 * 8e-7, 1e-5);
  // A message during which the rate changes.
  LinkPacer faster({.bits_per_s = 1e7, .then_bits_per_s = 1e9, .then_after = 60ms}, 2);
  Flow& flow = add(flows, 0, 1, 144'800);
  faster.post(flow, kStart);
  const double half = 0.5 * 151'400 * 8e-7;
  EXPECT_NEAR(std::chrono::duration<double>(arrival(faster, flow, kStart) - kStart).count(), 0.06, half / 5);
  // Groups that are split off continue on the same clock.
  EXPECT_EQ(pacer.link().since, kStart);
  LinkPacer split(pacer.link(), 2);
  Flow& late = add(flows, 0, 1, 144'800);
  split.post(late, kStart + 3s);
  EXPECT_GE(arrival(split, late, kStart + 3s), kStart + 3s + 100ms);
}

// Posts random messages, and samples the clock at random.
void check_windows(size_t burst) {
  constexpr int kWorld = 4, kMessages = 60;
  std::mt19937 random(1);
  LinkPacer pacer({.bits_per_s = 1e8, .delay = 1ms, .burst = burst}, kWorld);
  std::deque<Flow> flows;
  std::array<std::vector<std::pair<Time, size_t>>, kWorld> received;
  Time now = kStart;
  auto max_in = [&](std::chrono::nanoseconds window) {
    return std::chrono::duration<double>(window).count() * 1e8 / 8 * 1448 / 1514 + 2.0 * pacer.turn_bytes() +
           burst;
  };
  auto all_arrived = [&] {
    return std::all_of(flows.begin(), flows.end(), [&](Flow& f) { return pacer.arrived(f, now) == f.bytes; });
  };
  while (flows.size() < kMessages || !all_arrived()) {
    if (flows.size() < kMessages && random() % 4 == 0) {
      const int from = static_cast<int>(random() % kWorld);
      const int to = static_cast<int>((from + 1 + random() % (kWorld - 1)) % kWorld);
      pacer.post(add(flows, from, to, random() % 200'000), now);
    }
    now += std::chrono::microseconds(random() % 2000);
    std::array<size_t, kWorld> out{}, in{};
    for (Flow& flow : flows) {
      out[static_cast<size_t>(flow.from)] += pacer.arrived(flow, now);
      in[static_cast<size_t>(flow.to)] += pacer.arrived(flow, now);
    }
    for (size_t i = 0; i < in.size(); ++i) received[i].emplace_back(now, in[i]);
    for (const size_t bytes : out) ASSERT_LE(static_cast<double>(bytes), max_in(now - kStart));
  }
  for (const auto& samples : received) {
    for (size_t a = 0; a < samples.size(); ++a) {
      for (size_t b = a + 1; b < samples.size(); ++b) {
        ASSERT_LE(static_cast<double>(samples[b].second - samples[a].second),
                  max_in(samples[b].first - samples[a].first));
      }
    }
  }
}

TEST(LinkPacer, NoWindowPassesMoreThanTheBucket) {
  for (const size_t burst : {0, 20'000, 131'072}) check_windows(burst);
}

TEST(LinkPacer, BurstPassesAtOnceAfterAPause) {
  LinkPacer pacer({.bits_per_s = 1e8, .burst = 151'400}, 2);
  std::deque<Flow> flows;
  Flow &first = add(flows, 0, 1, 144'800), &second = add(flows, 0, 1, 144'800);
  pacer.post(first, kStart);
  pacer.post(second, kStart);
  EXPECT_EQ(pacer.arrived(first, kStart), first.bytes);
  EXPECT_GE(arrival(pacer, second, kStart),
            kStart + pacer.duration(144'800) - pacer.duration(pacer.turn_bytes()));
}

TEST(LinkPacer, CallersThatLookLateLoseNoRate) {
  std::vector<Time> ends;
  for (const bool often : {false, true}) {
    LinkPacer pacer({.bits_per_s = 1e9}, 3);
    std::deque<Flow> flows;
    Flow &first = add(flows, 0, 1, 1'000'000), &second = add(flows, 0, 2, 1'000'000);
    pacer.post(first, kStart);
    pacer.post(second, kStart);
    for (Time t = kStart; often && t < kStart + 100ms; t += 10us) pacer.arrived(second, t);
    const Time looked = kStart + 100ms;
    EXPECT_EQ(pacer.arrived(first, looked), first.bytes);
    EXPECT_EQ(pacer.arrived(second, looked), second.bytes);
    Flow& third = add(flows, 0, 1, 1'000'000);  // shows when the link is free
    pacer.post(third, looked);
    ends.push_back(arrival(pacer, third, looked));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// Every rank sends to every other rank at once, as in a two-shot. Shared fairly, all links are busy to the
// end.
TEST(LinkPacer, RoundsOfAllPairsKeepEveryLinkBusy) {
  for (const int world : {2, 3, 4, 8}) {
    LinkPacer pacer({.bits_per_s = 1e8}, world);
    std::deque<Flow> flows;
    const size_t bytes = 100 * 1448;
    for (int from = 0; from < world; ++from) {
      for (int to = 0; to < world; ++to) {
        if (from != to) pacer.post(add(flows, from, to, bytes), kStart);
      }
    }
    Time last = kStart;
    for (Flow& flow : flows) last = std::max(last, arrival(pacer, flow, last));
    const auto ideal = (world - 1) * pacer.duration(bytes);
    EXPECT_GE(last - kStart, ideal);
    EXPECT_LE(last - kStart, ideal + 2 * pacer.duration(pacer.turn_bytes())) << world;
  }
}

TEST(LinkPacer, SeveralSendersShareTheReceiversLink) {
  LinkPacer pacer({.bits_per_s = 1e8}, 4);
  std::deque<Flow> flows;
  Time last = kStart;
  for (int from : {1, 2, 3}) pacer.post(add(flows, from, 0, 144'800), kStart);
  for (Flow& flow : flows) last = std::max(last, arrival(pacer, flow, last));
  EXPECT_GE(last - kStart, 3 * pacer.duration(144'800));
}

TEST(LinkPacer, MessagesInsideANodeArriveAtOnce) {
  LinkPacer pacer({.bits_per_s = 1e8, .delay = 1s, .ranks_per_node = 2}, 4);
  std::deque<Flow> flows;
  Flow &inside = add(flows, 2, 3, 1'000'000), &between = add(flows, 1, 2, 1'000'000);
  pacer.post(inside, kStart);
  pacer.post(between, kStart);
  EXPECT_EQ(pacer.arrived(inside, kStart), inside.bytes);
  EXPECT_EQ(pacer.arrived(between, kStart), 0u);
}

TEST(LinkPacer, WithdrawnMessagesUseTheLinkNoLonger) {
  LinkPacer pacer({.bits_per_s = 1e8}, 2);
  std::deque<Flow> flows;
  Flow &first = add(flows, 0, 1, 10'000'000), &second = add(flows, 0, 1, 144'800);
  pacer.post(first, kStart);
  pacer.arrived(first, kStart + 1ms);
  pacer.withdraw(first);
  pacer.post(second, kStart + 1ms);
  EXPECT_LE(arrival(pacer, second, kStart + 1ms),
            kStart + 1ms + pacer.duration(144'800) + pacer.duration(pacer.turn_bytes()));
}

// A receiver between processes takes whatever has come, at random times.
TEST(LinkPacer, ReceivesNoMoreThanTheRateAfterABurst) {
  for (const double bits : {1e5, 1e6, 1e8, 1e10}) {
    std::mt19937 random(2);
    LinkPacer pacer({.bits_per_s = bits}, 2);
    const double burst =
        std::max(0.004, 2 * std::chrono::duration<double>(pacer.duration(pacer.turn_bytes())).count());
    Time now = kStart;
    size_t received = 0;
    while (now < kStart + 2s) {
      const size_t most = pacer.may_receive(0, now);
      if (most == 0) {
        EXPECT_GT(pacer.may_receive(0, pacer.may_receive_at(0)), 0u);
      } else {
        const size_t bytes = 1 + random() % most;
        pacer.received(0, bytes, now);
        received += bytes;
      }
      now += std::chrono::microseconds(random() % 300);
      const double time = std::chrono::duration<double>(now - kStart).count();
      ASSERT_LE(static_cast<double>(received), bits / 8 * (time + burst)) << bits;
    }
    EXPECT_GT(static_cast<double>(received), 0.5 * 2 * bits / 8 * 1448 / 1514) << bits;
  }
}

TEST(LinkPacer, ReceivesAfterAChangeToTheSlowestRate) {
  LinkPacer pacer({.bits_per_s = 1e10, .then_bits_per_s = 1e5, .then_after = 1s}, 2);
  std::deque<Flow> flows;
  pacer.post(add(flows, 0, 1, 1448), kStart);
  Time now = kStart + 2s;
  for (int packet = 0; packet < 100; ++packet) {
    if (pacer.may_receive(0, now) == 0) now = pacer.may_receive_at(0);
    ASSERT_GT(pacer.may_receive(0, now), 0u) << packet;
    pacer.received(0, 1448, now);
  }
  EXPECT_GE(now - kStart, 2s + 90 * pacer.duration(1448, now));
}

}  // namespace
}  // namespace gradwire::testing
