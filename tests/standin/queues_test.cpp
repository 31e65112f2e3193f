// Tests the stand-in's hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). Streams that share a queue have false
// dependencies, which do not affect programs ordered by events.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "runtime/device/device.h"
#include "tests/standin/launch.h"
#include "tests/standin/machine.h"

namespace gradwire {
namespace {

// Sets the number of hardware queues for streams that are created during the lifetime of a Connections.
class Connections {
 public:
  explicit Connections(int count) : kept_(set(count)) {}
  ~Connections() { set(kept_); }
  Connections(const Connections&) = delete;

 private:
  static int set(int count) {
    const std::lock_guard lock(standin::machine().mutex);
    return std::exchange(standin::machine().connections, count);
  }
  int kept_;
};

void run_on(const Stream& stream, std::function<void()> run) {
  standin::launch({"test", nullptr, {1, 1, 1}, {1, 1, 1}, 0, stream.native(), std::move(run)});
}

struct StandinQueues : ::testing::Test {
  void SetUp() override {
    if (cuda_device_count() < 1) GTEST_SKIP() << "GRADWIRE_STANDIN_GPUS=0";
    device_ = Device::cuda(0);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    first_ = Stream::create(device_, "first");
  }
  Stream create(bool shares_queue) {
    for (int tries = 0; tries < 100; ++tries) {
      Stream made = Stream::create(device_, "test");
      if ((made.native()->connection == first_.native()->connection) == shares_queue) return made;
      others_.push_back(made);
    }
    ADD_FAILURE() << "all streams have one queue, or none has that of the first";
    return {};
  }

  // Returns whether a waiting kernel on the first stream sees the write of a kernel on `setter`. Another
  // kernel follows on the first stream. `next_before_setter` enqueues the following kernel before
  // the writing kernel instead of after the writing kernel.
  bool sees(const Stream& setter, bool next_before_setter) {
    std::atomic<bool> written = false, all_enqueued = false;
    bool seen = false;
    run_on(first_, [&] {
      for (int patience = 500; !written && patience > 0; patience -= all_enqueued ? 1 : 0)
        standin::let_other_streams_run();
      seen = written;
    });
    if (next_before_setter) run_on(first_, [] {});
    run_on(setter, [&] { written = true; });
    if (!next_before_setter) run_on(first_, [] {});
    all_enqueued = true;
    first_.synchronize();
    setter.synchronize();
    return seen;
  }

  Device device_;
  Stream first_;
  std::vector<Stream> others_;
};

TEST_F(StandinQueues, AKernelBehindTheWaitingStreamsNextOneNeverStarts) {
  const Connections connections(2);
  const Stream sharing = create(true), other = create(false);
  for (int i = 0; i < 4; ++i) {
    EXPECT_FALSE(sees(sharing, true));
    EXPECT_TRUE(sees(sharing, false));
    EXPECT_TRUE(sees(other, true));
    EXPECT_TRUE(sees(other, false));
  }
}

TEST_F(StandinQueues, StreamsShareNoneWhileThereAreAsManyQueues) {
  const Connections connections(standin::kMaxConnections);
  std::vector<Stream> streams;
  std::set<int> queues;
  {
    const std::lock_guard lock(standin::machine().mutex);
    const auto& used = standin::machine().devices[0].streams_of_connection;
    for (int i = 0; i < standin::kMaxConnections; ++i) {
      if (used[i] > 0) queues.insert(i);
    }
  }
  while (queues.size() < standin::kMaxConnections) {
    streams.push_back(Stream::create(device_, "test"));
    EXPECT_TRUE(queues.insert(streams.back().native()->connection).second);
  }
  const Stream more = Stream::create(device_, "test");
  EXPECT_FALSE(queues.insert(more.native()->connection).second);
}

// One step of a random program over a few cells of device memory. A step reads one cell and changes another
// cell.
struct Step {
  size_t stream, from, to;
  uint64_t number;

  void run(uint64_t* cells) const { cells[to] = cells[to] * 6364136223846793005u + cells[from] + number; }
};
constexpr size_t kStreams = 12, kCells = 5, kSteps = 80;

std::vector<Step> random_program(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Step> steps;
  for (uint64_t i = 0; i < kSteps; ++i)
    steps.push_back({random() % kStreams, random() % kCells, random() % kCells, i});
  return steps;
}

std::vector<uint64_t> in_sequence(const std::vector<Step>& steps) {
  std::vector<uint64_t> cells(kCells);
  for (const Step& step : steps) step.run(cells.data());
  return cells;
}

// Runs the steps on their streams and returns the cells. If `with_events`, each step waits for the earlier
// steps that use the same cells.
std::vector<uint64_t> on_streams(const std::vector<Step>& steps, bool with_events) {
  const Device device = Device::cuda(0);
  const Stream last = Stream::create(device, "last");
  std::vector<Stream> streams;
  for (size_t i = 0; i < kStreams; ++i) streams.push_back(Stream::create(device, "test"));
  const Buffer cells(device, kCells * sizeof(uint64_t));
  fill_zero(last, cells.data(), cells.bytes());
  last.synchronize();
  std::vector<Event> events;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Stream& stream = streams[steps[i].stream];
    for (size_t before = 0; with_events && before < i; ++before) {
      const Step &a = steps[before], &b = steps[i];
      if (a.to == b.to || a.to == b.from || a.from == b.to) stream.wait(events[before]);
    }
    run_on(stream, [step = steps[i], data = cells.as<uint64_t>()] { step.run(data); });
    events.push_back(Event::create(device));
    events.back().record(stream);
  }
  for (const Event& event : events) last.wait(event);
  std::vector<uint64_t> result(kCells);
  copy(last, result.data(), cells.data(), cells.bytes());
  last.synchronize();
  return result;
}

TEST_F(StandinQueues, ProgramsOrderedByEventsHaveTheSameResult) {
  for (int connections : {1, 2, 3, 8, standin::kMaxConnections}) {
    const Connections limit(connections);
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const std::vector<Step> steps = random_program(seed);
      EXPECT_EQ(on_streams(steps, true), in_sequence(steps)) << connections << " queues, seed " << seed;
    }
  }
}

TEST_F(StandinQueues, OneQueueKeepsTheOrderAndHidesMissingWaits) {
  auto wrong = [](int connections) {
    const Connections limit(connections);
    int count = 0;
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const std::vector<Step> steps = random_program(seed);
      count += on_streams(steps, false) == in_sequence(steps) ? 0 : 1;
    }
    return count;
  };
  EXPECT_EQ(wrong(1), 0);
  EXPECT_GT(wrong(standin::kMaxConnections), 0);
}

}  // namespace
}  // namespace gradwire
