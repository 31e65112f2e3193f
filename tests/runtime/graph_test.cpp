// Graphs. Each launch repeats the captured work in order. Work that cannot be repeated is rejected during
// capture.
#include "runtime/device/graph.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "runtime/util/error.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

class GraphTest : public ::testing::TestWithParam<Device> {
 protected:
  Stream a = Stream::create(GetParam(), "a"), b = Stream::create(GetParam(), "b");
  Buffer counters = make_buffer<uint64_t>(GetParam(), 2);
  uint64_t* counter(int i) const { return counters.as<uint64_t>() + i; }
  void SetUp() override {
    fill_zero(a, counters.data(), counters.bytes());
    increment(a, counter(0));  // loads the kernels before the capture
    a.synchronize();
  }
  std::array<uint64_t, 2> values() const {
    auto v = to_host(a, counters.as<const uint64_t>(), 2);
    return {v[0], v[1]};
  }
};
GW_INSTANTIATE_ON_DEVICES(GraphTest);

TEST_P(GraphTest, CapturingRunsNothingAndEachLaunchRunsEverything) {
  const Graph graph = Graph::capture(a, [&] {
    increment(a, counter(0));
    copy(a, counter(1), counter(0), sizeof(uint64_t));
    increment(a, counter(0));
  });
  EXPECT_EQ(values(), (std::array<uint64_t, 2>{1, 0}));
  for (uint64_t launch = 1; launch <= 5; ++launch) {
    graph.launch();
    EXPECT_EQ(values(), (std::array<uint64_t, 2>{1 + 2 * launch, 2 * launch}));
  }
}

TEST_P(GraphTest, LaunchesAreInOrderWithTheStreamsOtherWork) {
  const Graph graph = Graph::capture(a, [&] { increment(a, counter(0)); });
  for (uint64_t i = 0; i < 100; ++i) {
    const uint64_t value = 10 * i;
    store(a, counter(0), &value, sizeof value);
    graph.launch();
    copy(a, counter(1), counter(0), sizeof value);
    ASSERT_EQ(values()[1], value + 1);
  }
}

// Runs work on stream b between two waits, as a reducer does during backward. A missing edge gives a wrong
// count and a race that ThreadSanitizer reports.
TEST_P(GraphTest, JoinsForkedStreamsAndWaitsForThem) {
  Event forked = Event::create(GetParam()), joined = Event::create(GetParam());
  const Graph graph = Graph::capture(a, [&] {
    for (int i = 0; i < 10; ++i) {
      increment(a, counter(0));
      forked.record(a);
      b.wait(forked);
      copy(b, counter(1), counter(0), sizeof(uint64_t));
      increment(b, counter(1));
      joined.record(b);
      a.wait(joined);
      copy(a, counter(0), counter(1), sizeof(uint64_t));
    }
  });
  for (int launch = 0; launch < 20; ++launch) graph.launch();
  EXPECT_EQ(values(), (std::array<uint64_t, 2>{401, 401}));
}

TEST_P(GraphTest, EachLaunchRecordsTheCapturedTimers) {
  Event begin = Event::create_timer(GetParam()), end = Event::create_timer(GetParam());
  Event before = Event::create_timer(GetParam());
  const Graph graph = Graph::capture(a, [&] {
    begin.record(a);
    increment(a, counter(0));
    end.record(a);
  });
  for (int launch = 0; launch < 3; ++launch) {
    before.record(a);
    graph.launch();
    a.synchronize();
    EXPECT_GE(elapsed_ms(before, begin), 0.0);
    EXPECT_GE(elapsed_ms(begin, end), 0.0);
  }
}

TEST_P(GraphTest, RejectsByNameWorkThatCannotBeReplayedAndEndsTheCapture) {
  Event outside = Event::create(GetParam()), inside = Event::create(GetParam());
  Event timer = Event::create_timer(GetParam());
  outside.record(a);
  struct Case {
    const char* culprit;
    std::function<void()> enqueue;
  };
  uint64_t one = 1;
  const std::vector<Case> cases = {
      {"Stream::synchronize (b)", [&] { b.synchronize(); }},
      {"Event::synchronize", [&] { outside.synchronize(); }},
      {"Event::query", [&] { outside.query(); }},
      {"Buffer (12 bytes)", [&] { Buffer(GetParam(), 12); }},
      {"store", [&] { store(a, counter(0), &one, sizeof one); }},
      {"Graph::capture", [&] { Graph::capture(b, [] {}); }},
      {"not recorded in this capture", [&] { a.wait(outside); }},
      {"is a timer",
       [&] {
         timer.record(a);
         a.wait(timer);
       }},
      {"'b', which has not joined", [&] { increment(b, counter(0)); }},
      {"'b', which has not joined", [&] { inside.record(b); }},
      {"before the work of stream 'b'",
       [&] {
         inside.record(a);
         b.wait(inside);
         increment(b, counter(0));
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.culprit);
    testing::expect_error<DeviceError>([&] { Graph::capture(a, c.enqueue); }, {c.culprit, "'a'"});
    increment(a, counter(1));  // both streams still work after the rejected capture
    increment(b, counter(0));
    b.synchronize();
    a.synchronize();
  }
  EXPECT_EQ(values(), (std::array<uint64_t, 2>{1 + cases.size(), cases.size()}));
}

TEST_P(GraphTest, CapturedEventsAreInvisibleUntilRecordedOutside) {
  Event event = Event::create(GetParam());
  const Graph graph = Graph::capture(a, [&] {
    increment(a, counter(0));
    event.record(a);
  });
  graph.launch();
  a.synchronize();
  EXPECT_THROW(b.wait(event), DeviceError);
  EXPECT_THROW(event.synchronize(), DeviceError);
  EXPECT_THROW(event.query(), DeviceError);
  EXPECT_THROW(elapsed_ms(event, event), DeviceError);
  event.record(a);
  b.wait(event);
  b.synchronize();
  EXPECT_TRUE(event.query());
}

TEST(HostGraph, AnErrorInALaunchFailsTheStreamWithoutDeadlock) {
  Stream a = Stream::create(Device::host(), "a"), b = Stream::create(Device::host(), "b");
  Event forked = Event::create(Device::host()), joined = Event::create(Device::host());
  int runs = 0;
  const Graph graph = Graph::capture(a, [&] {
    forked.record(a);
    b.wait(forked);
    b.submit([&] {
      if (++runs == 2) throw BadInput("second launch");
    });
    joined.record(b);
    a.wait(joined);
  });
  graph.launch();
  a.synchronize();
  graph.launch();
  EXPECT_THROW(a.synchronize(), BadInput);
}

}  // namespace
}  // namespace gradwire
