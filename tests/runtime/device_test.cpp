// Devices and streams: order within a stream, events between streams, and propagation of errors without
// hangs.
#include "runtime/device/device.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

class DeviceTest : public ::testing::TestWithParam<Device> {};

TEST_P(DeviceTest, CopyStoreAndIncrementHappenInStreamOrder) {
  Stream stream = Stream::create(GetParam(), "test");
  Buffer counter = make_buffer<uint64_t>(GetParam(), 1);
  uint64_t start = 40, seen = 0;
  store(stream, counter.data(), &start, sizeof start);
  start = 7;  // captured by value: changing it later has no effect
  increment(stream, counter.as<uint64_t>());
  increment(stream, counter.as<uint64_t>());
  copy(stream, &seen, counter.data(), sizeof seen);
  stream.synchronize();
  EXPECT_EQ(seen, 42u);
  fill_zero(stream, counter.data(), sizeof seen);
  EXPECT_EQ(to_host(stream, counter.as<const uint64_t>(), 1)[0], 0u);
}

TEST_P(DeviceTest, WaitOrdersWorkOfTwoStreams) {
  Stream a = Stream::create(GetParam(), "a"), b = Stream::create(GetParam(), "b");
  Buffer x = make_buffer<uint64_t>(GetParam(), 1);
  for (uint64_t i = 0; i < 200; ++i) {
    Event written = Event::create(GetParam()), read = Event::create(GetParam());
    uint64_t seen = ~uint64_t{0};
    store(a, x.data(), &i, sizeof i);
    written.record(a);
    b.wait(written);
    copy(b, &seen, x.data(), sizeof seen);
    read.record(b);
    a.wait(read);
    b.synchronize();
    ASSERT_EQ(seen, i);
  }
}

TEST_P(DeviceTest, NeverRecordedEventIsDone) {
  Event event = Event::create(GetParam());
  EXPECT_TRUE(event.query());
  event.synchronize();
  Stream stream = Stream::create(GetParam(), "test");
  stream.wait(event);
  stream.synchronize();
}

TEST_P(DeviceTest, ElapsedTimeIsNotNegative) {
  Stream stream = Stream::create(GetParam(), "test");
  Event start = Event::create_timer(GetParam()), end = Event::create_timer(GetParam());
  start.record(stream);
  end.record(stream);
  stream.synchronize();
  EXPECT_GE(elapsed_ms(start, end), 0.0);
  Event order = Event::create(GetParam());
  order.record(stream);
  stream.synchronize();
  EXPECT_THROW(elapsed_ms(order, end), DeviceError) << "events for ordering have no timestamps";
}

// Uses memory on two streams, and frees it before the first stream has written it. The second stream waits
// for the first stream.
TEST_P(DeviceTest, StreamOrderedMemoryOutlivesWorkThatUsesIt) {
  const Stream stream = Stream::create(GetParam(), "test"), other = Stream::create(GetParam(), "other");
  Event allocated = Event::create(GetParam()), used = Event::create(GetParam());
  Buffer result(GetParam(), 4 << 10);
  for (int round = 0; round < 20; ++round) {
    Buffer memory = Buffer::in_order(stream, 4 << 10);
    fill_zero(stream, memory.data(), memory.bytes());
    allocated.record(stream);
    other.wait(allocated);
    increment(other, memory.as<uint64_t>());
    copy(other, result.data(), memory.data(), memory.bytes());
    used.record(other);
    stream.wait(used);
  }
  EXPECT_EQ(to_host(other, result.as<const uint64_t>(), 2), (std::vector<uint64_t>{1, 0}));
  EXPECT_FALSE(Buffer::in_order(stream, 0));
  stream.synchronize();
}

TEST_P(DeviceTest, StreamsReportTheirPriority) {
  using Priority = Stream::Priority;
  EXPECT_EQ(Stream::create(GetParam(), "test").priority(), Priority::normal);
  EXPECT_EQ(Stream::create(GetParam(), "test", Priority::high).priority(), Priority::high);
}

// Scheduling parameters of the calling thread, laid out as the kernel's struct sched_attr.
struct Scheduling {
  uint32_t size = 0, policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t slice_ns = 0, deadline_ns = 0, period_ns = 0;
};
Scheduling scheduling() {
  Scheduling out;
  EXPECT_EQ(syscall(SYS_sched_getattr, 0, &out, sizeof out, 0), 0) << std::strerror(errno);
  return out;
}

TEST(HostStream, HighPriorityShortensTimeSlicesAndKeepsTheShare) {
  Scheduling of[2];
  for (const auto priority : {Stream::Priority::normal, Stream::Priority::high}) {
    const Stream stream = Stream::create(Device::host(), "test", priority);
    stream.submit([&] { of[static_cast<int>(priority)] = scheduling(); });
    stream.synchronize();
  }
  EXPECT_EQ(of[0].policy, of[1].policy);
  EXPECT_EQ(of[0].nice, of[1].nice);
  if (of[0].slice_ns == 0) GTEST_SKIP() << "this kernel does not support time slices per thread (6.12 does)";
  EXPECT_EQ(of[1].slice_ns, 100'000U);
  EXPECT_LT(of[1].slice_ns, of[0].slice_ns);
}

TEST_P(DeviceTest, CountsMemoryUntilTheLastHandleIsDestroyed) {
  const MemoryUse before = memory_use(GetParam());
  constexpr int64_t kBytes = 1 << 20;
  Buffer first(GetParam(), kBytes);
  {
    const Buffer second(GetParam(), 2 * kBytes), same = first;
    EXPECT_EQ(memory_use(GetParam()).bytes, before.bytes + 3 * kBytes);
    const Buffer view = Buffer::view(GetParam(), second.data(), kBytes);
    EXPECT_EQ(memory_use(GetParam()).bytes, before.bytes + 3 * kBytes) << "a view owns no memory";
  }
  EXPECT_EQ(memory_use(GetParam()).bytes, before.bytes + kBytes);
  EXPECT_GE(memory_use(GetParam()).peak, before.bytes + 3 * kBytes);
  reset_memory_peak(GetParam());
  EXPECT_EQ(memory_use(GetParam()).peak, before.bytes + kBytes);
  first = {};
  EXPECT_EQ(memory_use(GetParam()).bytes, before.bytes);
}

TEST_P(DeviceTest, BuffersAreAlignedAndEmptyOnesAreNull) {
  for (size_t bytes : {1u, 7u, 4096u}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(Buffer(GetParam(), bytes).data()) % 256, 0u);
  }
  EXPECT_EQ(Buffer(GetParam(), 0).data(), nullptr);
}

TEST_P(DeviceTest, RefusedMemoryNamesItsSizeAndItsGpu) {
  if (GetParam().is_host()) return;  // see Resources.ThrowsOutOfResourcesWhenHostMemoryIsExhausted
  const DeviceMemory memory = device_memory(GetParam());
  EXPECT_LE(memory.free, memory.total);
  testing::expect_error<OutOfResources>(
      [&] { Buffer(GetParam(), memory.total + 1); },
      {fmt::format("of {} bytes on {} (", memory.total + 1, GetParam().name()),
       fmt::format(" of {} bytes free)", memory.total)});
}

GW_INSTANTIATE_ON_DEVICES(DeviceTest);

TEST(HostStream, FirstErrorIsRethrownAndLaterTasksAreSkipped) {
  Stream stream = Stream::create(Device::host(), "test");
  bool ran = false;
  stream.submit([] { throw BadInput("first"); });
  stream.submit([&] { ran = true; });
  stream.submit([] { throw BadInput("second"); });
  try {
    stream.synchronize();
    FAIL() << "no error";
  } catch (const BadInput& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  EXPECT_FALSE(ran);
}

TEST(HostStream, ErrorsPropagateThroughEventsWithoutDeadlock) {
  Stream a = Stream::create(Device::host(), "a"), b = Stream::create(Device::host(), "b");
  Event event = Event::create(Device::host());
  bool ran = false;
  a.submit([] { throw BadInput("from a"); });
  event.record(a);
  b.wait(event);
  b.submit([&] { ran = true; });
  EXPECT_THROW(b.synchronize(), BadInput);
  EXPECT_THROW(event.synchronize(), BadInput);
  EXPECT_FALSE(ran);
}

TEST(HostStream, ImmediateStreamRunsInTheCaller) {
  Stream stream = Stream::immediate_host();
  std::thread::id runner;
  stream.submit([&] { runner = std::this_thread::get_id(); });
  EXPECT_EQ(runner, std::this_thread::get_id());
  EXPECT_THROW(stream.submit([] { throw BadInput("at once"); }), BadInput);
}

TEST(ThreadPool, CoversEveryIndexOnceForEveryGrain) {
  for (int64_t count : {0, 1, 7, 1000, 4097}) {
    for (int64_t grain : {1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
      parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        for (int64_t i = begin; i < end; ++i) ++hits[i];
      });
      for (auto& h : hits) ASSERT_EQ(h.load(), 1);
    }
  }
}

TEST(ThreadPool, ManyCallersAndNestedCallsFinish) {
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        parallel_for(
            8, 1, [&](int64_t, int64_t) { parallel_for(4, 1, [&](int64_t b, int64_t e) { sum += e - b; }); });
      }
    });
  }
  for (auto& c : callers) c.join();
  EXPECT_EQ(sum.load(), 6 * 50 * 8 * 4);
}

TEST(ThreadPool, RethrowsTheBodysException) {
  auto body = [](int64_t begin, int64_t) {
    if (begin == 57) throw BadInput("57");
  };
  EXPECT_THROW(parallel_for(100, 1, body), BadInput);
}

TEST(CudaDevice, ReportsWhyCudaIsUnavailable) {
  if (cuda_device_count() == 0) {
    EXPECT_FALSE(cuda_unavailable_reason().empty());
    EXPECT_THROW(Stream::create(Device::cuda(0), "none"), DeviceError);
  } else {
    EXPECT_TRUE(cuda_unavailable_reason().empty());
  }
}

// Reports if the available devices, on which all op tests run, exclude a visible GPU.
TEST(CudaDevice, OpTestsRunOnEveryVisibleGpu) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "skipped: no GPU: " << cuda_unavailable_reason();
  EXPECT_EQ(available_devices().size(), 1u + static_cast<size_t>(cuda_device_count()));
  for (int i = 0; i < cuda_device_count(); ++i) EXPECT_EQ(available_devices()[1 + i], Device::cuda(i));
}

}  // namespace
}  // namespace gradwire
