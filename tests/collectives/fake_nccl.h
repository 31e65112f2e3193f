// NCCL's functions over host memory. The communicators belong to threads of one process, and groups run on
// host streams. As in NCCL, operations wait for a peer until the communicator is aborted. After an abort, the
// data is garbage, and the stream continues without an error.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "collectives/transport/nccl/nccl_transport.h"
#include "runtime/device/graph.h"

namespace gradwire::testing {

struct FakeWire {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> boxes;  // messages by (from, to)
};

struct FakeComm {
  std::shared_ptr<FakeWire> wire;
  int rank = 0, world = 1;
  std::atomic<int> async{ncclSuccess};     // result of ncclCommGetAsyncError when not busy
  std::atomic<int> busy{0};                // number of remaining calls that return ncclInProgress
  int busy_after_group = 0;                // each group sets busy to this value
  ncclResult_t send_result = ncclSuccess;  // result of ncclSend
  std::atomic<bool> stopped{false};
  std::atomic<int> aborted{0}, finalized{0}, destroyed{0}, revoked{0}, groups{0};
  std::atomic<int> sends{0}, receives{0}, all_reduces{0};
  std::atomic<int> threads{0};  // number of threads that NCCL would have created: one per nonblocking group
  std::atomic<bool> stuck{false};  // if true, a call returns only when the communicator is stopped
  std::atomic<int> waiting{0};     // number of calls that have not returned
  // number of ncclCommGetAsyncError calls by thread; guarded by wire->mutex
  std::map<std::thread::id, int> asked;
  std::atomic<std::thread::id> aborted_by{};
  std::string log;  // transfers of the last group: "(s1:4 r2:8)"

  ncclComm_t handle() { return reinterpret_cast<ncclComm_t>(this); }
  void stop() {
    stopped = true;
    std::lock_guard lock(wire->mutex);
    wire->changed.notify_all();
  }
  void wait_until_stopped() {
    ++waiting;
    {
      std::unique_lock lock(wire->mutex);
      wire->changed.wait(lock, [&] { return stopped.load(); });
    }
    --waiting;
  }
};

inline FakeComm& fake(ncclComm_t comm) {
  return *reinterpret_cast<FakeComm*>(comm);
}

// A world of fake communicators that are destroyed together.
struct FakeWorld {
  explicit FakeWorld(int world) {
    auto wire = std::make_shared<FakeWire>();
    for (int r = 0; r < world; ++r) {
      auto& c = comms.emplace_back(std::make_unique<FakeComm>());
      c->wire = wire;
      c->rank = r;
      c->world = world;
    }
  }
  ~FakeWorld() {  // calls that timed out may still use their communicators
    for (const auto& comm : comms) {
      if (comm->waiting != 0) comm->stop();
      while (comm->waiting != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  FakeComm& operator[](int rank) { return *comms[rank]; }
  std::vector<std::unique_ptr<FakeComm>> comms;
};

struct FakeOperation {
  bool send;
  void* data;
  size_t bytes;
  int peer;
  FakeComm* comm;
  const Stream* stream;
};

struct FakeGroup {
  int depth = 0;
  std::vector<FakeOperation> operations;
};
inline FakeGroup& fake_group() {
  static thread_local FakeGroup group;
  return group;
}

inline void run_fake(const std::vector<FakeOperation>& operations) {
  for (const FakeOperation& op : operations) {
    if (!op.send) continue;
    FakeWire& wire = *op.comm->wire;
    std::lock_guard lock(wire.mutex);
    const char* data = static_cast<const char*>(op.data);
    wire.boxes[{op.comm->rank, op.peer}].emplace_back(data, data + op.bytes);
    wire.changed.notify_all();
  }
  for (const FakeOperation& op : operations) {
    if (op.send) continue;
    FakeWire& wire = *op.comm->wire;
    std::unique_lock lock(wire.mutex);
    auto& box = wire.boxes[{op.peer, op.comm->rank}];
    wire.changed.wait(lock, [&] { return op.comm->stopped || !box.empty(); });
    if (op.comm->stopped) return;
    std::vector<char> message = std::move(box.front());
    box.pop_front();
    EXPECT_EQ(message.size(), op.bytes) << "NCCL does not check this";
    std::memcpy(op.data, message.data(), std::min(op.bytes, message.size()));
  }
}

// Adds up all ranks' values from the last rank to the first, unlike every schedule.
inline void run_fake_all_reduce(FakeComm& comm, const float* in, float* out, size_t count, bool mean) {
  FakeWire& wire = *comm.wire;
  const float factor = mean ? 1.0f / static_cast<float>(comm.world) : 1.0f;
  std::vector<float> mine(in, in + count), sum(count);
  for (float& x : mine) x *= factor;
  const size_t bytes = count * sizeof(float);
  {
    std::lock_guard lock(wire.mutex);
    const char* data = reinterpret_cast<const char*>(mine.data());
    for (int to = 0; to < comm.world; ++to) {
      if (to != comm.rank) wire.boxes[{comm.rank, to}].emplace_back(data, data + bytes);
    }
    wire.changed.notify_all();
  }
  for (int from = comm.world - 1; from >= 0; --from) {
    std::vector<float> theirs = mine;
    if (from != comm.rank) {
      std::unique_lock lock(wire.mutex);
      auto& box = wire.boxes[{from, comm.rank}];
      wire.changed.wait(lock, [&] { return comm.stopped || !box.empty(); });
      if (comm.stopped) return;
      EXPECT_EQ(box.front().size(), bytes);
      std::memcpy(theirs.data(), box.front().data(), std::min(bytes, box.front().size()));
      box.pop_front();
    }
    for (size_t i = 0; i < count; ++i) sum[i] += theirs[i];
  }
  std::copy(sum.begin(), sum.end(), out);
}

// The communicators that shrink() made for survivors, keyed by the parent's wire, and the communicators that
// split() made, keyed by wire and color. split() waits until all ranks have called it, so that the number of
// ranks per color is known.
struct FakeShrinks {
  struct Split {
    std::map<int, std::vector<std::pair<int, int>>> colors;  // (key, rank) of each member
    int called = 0;
    std::condition_variable everyone;
    std::map<int, std::unique_ptr<FakeWorld>> worlds;
  };
  std::mutex mutex;
  // The key keeps the parent's wire alive, so that the wire's address is not reused.
  std::map<std::shared_ptr<FakeWire>, std::unique_ptr<FakeWorld>> worlds;
  std::map<std::shared_ptr<FakeWire>, Split> splits;
};
inline FakeShrinks& fake_shrinks() {
  static FakeShrinks shrinks;
  return shrinks;
}

inline void fake_states(NcclApi& a) {
  a.get_version = [](int* version) { return *version = 22809, ncclSuccess; };
  a.error_string = [](ncclResult_t r) -> const char* {
    return r == ncclRemoteError ? "remote process exited" : "fake error";
  };
  a.async_error = [](ncclComm_t c, ncclResult_t* r) {
    {
      std::lock_guard lock(fake(c).wire->mutex);
      ++fake(c).asked[std::this_thread::get_id()];
    }
    *r =
        fake(c).busy > 0 ? (--fake(c).busy, ncclInProgress) : static_cast<ncclResult_t>(fake(c).async.load());
    return ncclSuccess;
  };
  a.count = [](const ncclComm_t c, int* n) { return *n = fake(c).world, ncclSuccess; };
  a.user_rank = [](const ncclComm_t c, int* r) { return *r = fake(c).rank, ncclSuccess; };
  a.abort = [](ncclComm_t c) {
    fake(c).aborted_by = std::this_thread::get_id();
    ++fake(c).aborted;
    fake(c).stop();
    return ncclSuccess;
  };
  a.revoke = [](ncclComm_t c, int) {
    ++fake(c).revoked;
    fake(c).stop();
    fake(c).busy = 2;
    return ncclInProgress;
  };
  a.finalize = [](ncclComm_t c) { return ++fake(c).finalized, fake(c).busy = 2, ncclInProgress; };
  a.destroy = [](ncclComm_t c) { return ++fake(c).destroyed, ncclSuccess; };
}

inline void fake_transfers(NcclApi& a) {
  a.group_start = [] { return ++fake_group().depth, ncclSuccess; };
  a.send = [](const void* data, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
    fake_group().operations.push_back(
        {true, const_cast<void*>(data), n, peer, &fake(c), reinterpret_cast<const Stream*>(s)});
    return fake(c).send_result;
  };
  a.receive = [](void* data, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
    fake_group().operations.push_back({false, data, n, peer, &fake(c), reinterpret_cast<const Stream*>(s)});
    return ncclSuccess;
  };
  a.group_end = []() -> ncclResult_t {
    EXPECT_EQ(fake_group().depth, 1);
    --fake_group().depth;
    auto operations = std::move(fake_group().operations);
    fake_group().operations.clear();
    if (operations.empty()) return ncclSuccess;
    FakeComm& comm = *operations[0].comm;
    ++comm.groups;
    comm.log.clear();
    for (const auto& op : operations) {
      comm.log += fmt::format(" {}{}:{}", op.send ? 's' : 'r', op.peer, op.bytes);
      ++(op.send ? comm.sends : comm.receives);
    }
    if (comm.stuck) {
      comm.wait_until_stopped();
      return ncclInternalError;
    }
    if (comm.send_result != ncclSuccess) return ncclSuccess;
    operations[0].stream->submit([operations] { run_fake(operations); });
    comm.busy = comm.busy_after_group;
    if (comm.busy_after_group == 0) return ncclSuccess;
    ++comm.threads;
    return ncclInProgress;
  };
  a.all_reduce = [](const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                    ncclComm_t c, cudaStream_t s) -> ncclResult_t {
    EXPECT_EQ(type, ncclFloat32);
    EXPECT_TRUE(op == ncclSum || op == ncclAvg);
    EXPECT_EQ(fake_group().depth, 0);
    FakeComm& comm = fake(c);
    ++comm.all_reduces;
    if (comm.stuck) {
      comm.wait_until_stopped();
      return ncclInternalError;
    }
    reinterpret_cast<const Stream*>(s)->submit([&comm, in, out, count, op] {
      run_fake_all_reduce(comm, static_cast<const float*>(in), static_cast<float*>(out), count,
                          op == ncclAvg);
    });
    comm.busy = comm.busy_after_group;
    return comm.busy_after_group == 0 ? ncclSuccess : ncclInProgress;
  };
}

inline void fake_children(NcclApi& a) {
  a.shrink = [](ncclComm_t c, int* out, int n, ncclComm_t* child, ncclConfig_t* config, int) {
    EXPECT_EQ(config->blocking, 1);
    FakeComm& parent = fake(c);
    int mine = 0;
    for (int r = 0; r < parent.rank; ++r) mine += std::find(out, out + n, r) == out + n;
    std::lock_guard lock(fake_shrinks().mutex);
    auto& world = fake_shrinks().worlds[parent.wire];
    if (!world) world = std::make_unique<FakeWorld>(parent.world - n);
    *child = (*world)[mine].handle();
    parent.busy = 1;
    (*world)[mine].busy = 2;
    return ncclInProgress;
  };
  a.split = [](ncclComm_t c, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
    EXPECT_EQ(config->blocking, 1);
    FakeComm& parent = fake(c);
    std::unique_lock lock(fake_shrinks().mutex);
    FakeShrinks::Split& split = fake_shrinks().splits[parent.wire];
    if (color != NCCL_SPLIT_NOCOLOR) split.colors[color].emplace_back(key, parent.rank);
    if (++split.called == parent.world) split.everyone.notify_all();
    split.everyone.wait(lock, [&] { return split.called == parent.world; });
    parent.busy = 1;
    if (color == NCCL_SPLIT_NOCOLOR) return *child = nullptr, ncclInProgress;
    auto& members = split.colors[color];
    std::sort(members.begin(), members.end());
    auto& world = split.worlds[color];
    if (!world) world = std::make_unique<FakeWorld>(static_cast<int>(members.size()));
    const auto me = std::find(members.begin(), members.end(), std::pair(key, parent.rank));
    FakeComm& made = (*world)[static_cast<int>(me - members.begin())];
    made.busy = 2;
    *child = made.handle();
    return ncclInProgress;
  };
}

inline const NcclApi& fake_nccl() {
  static const NcclApi api = [] {
    NcclApi a;
    fake_states(a);
    fake_transfers(a);
    fake_children(a);
    return a;
  }();
  return api;
}

// Records the progress of an exchange on a host stream.
class HostMark final : public ExchangeMark {
 public:
  void begin(const Stream& stream) override {
    *state_ = 0;
    stream.submit([s = state_] { *s = 1; });
  }
  void end(const Stream& stream) override {
    stream.submit([s = state_] { *s = 2; });
  }
  Progress poll() override { return static_cast<Progress>(state_->load()); }

 private:
  std::shared_ptr<std::atomic<int>> state_ = std::make_shared<std::atomic<int>>(0);
};

class HostCalls : public GpuCalls {
 public:
  bool capturing(const Stream&) override { return Capture::current() != nullptr; }
  cudaStream_t native(const Stream& s) override {
    return reinterpret_cast<cudaStream_t>(const_cast<Stream*>(&s));
  }
  std::unique_ptr<ExchangeMark> make_mark() override {
    ++made;
    return std::make_unique<HostMark>();
  }
  // Makes a mark for a captured exchange. Allows one capture per object.
  std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) override {
    auto words = std::make_shared<std::array<uint64_t, 2>>();
    if (!launches_) {
      launches_ = words;
      stream.submit([words] { std::atomic_ref((*words)[1]).fetch_add(1); });
    }
    auto write = [](const Stream& on, uint64_t* word, uint64_t value) {
      on.submit([word, value] { std::atomic_ref(*word).store(value); });
    };
    uint64_t* const state = &(*words)[0];
    auto memory = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(words, launches_);
    return std::make_unique<WrittenMark>(write, state, &(*launches_)[1], memory);
  }
  void enter_thread() override { ++threads; }
  std::atomic<int> made{0};
  std::atomic<int> threads{0};  // number of threads that the transport started

 private:
  std::shared_ptr<std::array<uint64_t, 2>> launches_;
};

// Returns a rank's settings for the fake NCCL.
inline NcclSetup fake_setup(FakeComm& comm, std::chrono::milliseconds timeout = std::chrono::seconds(20),
                            const NcclApi& api = fake_nccl()) {
  return {.api = &api,
          .gpu = std::make_shared<HostCalls>(),
          .comm = comm.handle(),
          .device = Device::host(),
          .timeout = timeout};
}

}  // namespace gradwire::testing
