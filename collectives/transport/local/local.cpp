#include "collectives/transport/local/local.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "runtime/device/capture.h"
#include "runtime/device/properties.h"
#include "runtime/threads/running_clock.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

using Clock = RunningClock;

// A pending send. Lives in the sender's exchange() until finished or withdrawn.
struct Offer {
  const void* data = nullptr;
  size_t bytes = 0;
  const ExchangeLabel* label = nullptr;
  enum class State { waiting, copying, finished } state = State::waiting;
  Event ready;  // CUDA: recorded when the data is complete
  Event taken;  // CUDA: recorded after the copy
};

// The peer windows of all ranks.
struct PeerGroup {
  std::vector<Buffer> memory;  // by rank
  // By rank: the number of calls it had made on arrival; empty before that, or if unknown.
  std::vector<std::optional<uint64_t>> calls_before;
  std::vector<bool> here;  // by rank: has arrived
  int ready = 0, taken = 0;
  std::vector<uint64_t> arrivals;  // by rank: at rendezvous()
};

// State shared by the ranks of one process. One lock suffices: exchanges are few, and copies happen outside
// it.
class Hub {
 public:
  Hub(std::vector<Device> where, std::chrono::milliseconds timeout)
      : world(static_cast<int>(where.size())),
        timeout(timeout),
        devices(std::move(where)),
        changed_(world),
        offers_(world * world) {}

  std::deque<Offer*>& box(int from, int to) { return offers_[from * world + to]; }

  // Waits until `condition` holds. Throws if the group failed. Throws and fails the group at the deadline;
  // `pending` then describes the wait. Requires the lock.
  template <typename Condition, typename Pending>
  void wait(std::unique_lock<std::mutex>& lock, int rank, Condition condition, Pending pending) {
    auto deadline = Clock::now() + timeout;
    while (!condition()) {
      if (!failure.empty()) throw CommError(fmt::format("rank {}: {}: {}", rank, pending(), failure));
      if (changed_[rank].wait_until(lock, deadline) == std::cv_status::timeout && !condition() &&
          failure.empty()) {
        std::string text =
            fmt::format("rank {}: no progress for {} ms: {}", rank, timeout.count(), pending());
        fail(text);
        throw CommError(text);
      }
    }
  }

  // Records that `rank` makes its call number `sequence`. The first rank to arrive defines the call. Requires
  // the lock.
  void enter(int rank, uint64_t sequence, const Call& call) {
    if (!failure.empty()) throw CommError(fmt::format("rank {}: {}: {}", rank, call.what, failure));
    const size_t index = sequence - first_open_;
    if (index == open_.size()) open_.push_back({call.hash, rank, 0, call.what});
    OpenCall& open = open_[index];
    if (open.hash != call.hash) {
      std::string text = fmt::format("ranks disagree: call {} of rank {} is {}, of rank {} it is {}{}",
                                     sequence, open.rank, open.what, rank, call.what,
                                     open.what == call.what ? "; the calls differ in something else" : "");
      fail(text);
      throw CommError(text);
    }
    entered_[static_cast<size_t>(rank)] = {sequence, call.what};
    compare_windows();
    ++open.arrived;
    while (!open_.empty() && open_.front().arrived == world) {
      open_.pop_front();
      ++first_open_;
    }
  }

  // A rank with transport=lsa in its spec opens windows and waits for the others. A rank without it continues
  // to its next call and waits there. Detects this before either deadline. Requires the lock.
  void compare_windows() {
    for (const auto& [number, group] : peers) {
      for (int r = 0; r < world; ++r) {
        const auto& before = group->calls_before[static_cast<size_t>(r)];
        for (int other = 0; before && other < world; ++other) {
          const Entered& its = entered_[static_cast<size_t>(other)];
          if (group->here[static_cast<size_t>(other)] || its.sequence <= *before) continue;
          const std::string text = fmt::format(
              "ranks disagree: after {} calls rank {} opens windows, as transport=lsa needs; rank {} makes "
              "call {}, {}, without; give all ranks the same spec",
              *before, r, other, its.sequence, its.what);
          fail(text);
          throw CommError(text);
        }
      }
    }
  }

  // Requires the lock.
  void fail(const std::string& reason) {
    if (failure.empty()) failure = "the group failed: " + reason;
    for (const auto& weak : windows) {
      if (const auto alive = weak.lock()) alive->stop();
    }
    wake_all();
  }
  void wake(int rank) { changed_[rank].notify_all(); }
  void wake_all() {
    for (std::condition_variable& c : changed_) c.notify_all();
  }
  void wait_for_copy(std::unique_lock<std::mutex>& lock, int rank, const Offer& offer) {
    changed_[rank].wait(lock, [&] { return offer.state != Offer::State::copying; });
  }

  const int world;
  const std::chrono::milliseconds timeout;
  const std::vector<Device> devices;  // by rank
  std::mutex mutex;
  // By split and first member: transports not yet fetched by their ranks.
  std::map<std::pair<int, int>, std::vector<std::unique_ptr<Transport>>> splits;
  std::map<int, std::shared_ptr<PeerGroup>> peers;  // by number, until all ranks have taken theirs
  std::vector<std::weak_ptr<PeerWindows>> windows;  // of all ranks, for stop()
  const RunningClock::Watch watch;
  std::string failure;
  int at_barrier = 0;
  uint64_t barriers = 0;

 private:
  // A call not yet made by all ranks.
  struct OpenCall {
    uint64_t hash;
    int rank;  // the first to make it
    int arrived;
    std::string what;
  };
  // The latest call begun by a rank.
  struct Entered {
    uint64_t sequence = 0;
    std::string what;
  };
  std::vector<Entered> entered_{static_cast<size_t>(world)};
  // One per rank, so that a message wakes only its receiver.
  std::vector<std::condition_variable> changed_;
  std::deque<OpenCall> open_;
  uint64_t first_open_ = 1;  // the number of open_[0]
  std::vector<std::deque<Offer*>> offers_;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<Hub> hub, int rank, Device device)
      : hub_(std::move(hub)), rank_(rank), device_(device), waits_(hub_->world) {}

  int rank() const override { return rank_; }
  int world() const override { return hub_->world; }
  Device device() const override { return device_; }
  const char* name() const override { return "local"; }

  void begin(const Stream& stream, const Call& call) override {
    auto enter = [this, &call] {
      std::lock_guard lock(hub_->mutex);
      hub_->enter(rank_, ++sequence_, call);
    };
    Capture::current() != nullptr ? replays_ = true : ++calls_;
    device_.is_host() ? stream.submit(enter) : enter();
  }

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    if (device_.is_host()) {
      stream.submit([this, &transfers, &label] { run(nullptr, transfers, label); });
    } else {
      run(&stream, transfers, label);
    }
  }

  std::string capture_obstacle() const override {
    if (device_.is_host() || hub_->world == 1) return "";
    return "ranks of one process on GPUs meet on the host in each exchange; start one process per rank "
           "(torchrun, srun or mpirun)";
  }

  void barrier() override {
    std::unique_lock lock(hub_->mutex);
    uint64_t mine = hub_->barriers;
    if (++hub_->at_barrier == hub_->world) {
      hub_->at_barrier = 0;
      ++hub_->barriers;
      hub_->wake_all();
    }
    hub_->wait(
        lock, rank_, [&] { return hub_->barriers != mine; },
        [&] {
          return fmt::format("at a barrier that {} of {} ranks have reached", hub_->at_barrier, hub_->world);
        });
  }

  // On CUDA this would measure the time to enqueue.
  std::vector<double> waited_s() const override {
    return device_.is_host() ? waits_.seconds() : std::vector<double>{};
  }

  // The first member to arrive makes the transports of all members.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override {
    const int which = splits_++;
    if (members.empty()) return nullptr;
    std::lock_guard lock(hub_->mutex);
    const auto group = hub_->splits.try_emplace({which, members.front()}).first;
    auto& transports = group->second;
    if (transports.empty()) {
      std::vector<Device> devices;
      for (int r : members) devices.push_back(hub_->devices[static_cast<size_t>(r)]);
      transports = make_local_transports(devices, hub_->timeout);
    }
    const auto me = std::find(members.begin(), members.end(), rank_) - members.begin();
    std::unique_ptr<Transport> mine = std::move(transports[static_cast<size_t>(me)]);
    if (std::none_of(transports.begin(), transports.end(), [](const auto& t) { return t != nullptr; })) {
      hub_->splits.erase(group);
    }
    return mine;
  }

  std::string peer_obstacle(int group) override {
    const int ranks = group > 0 ? group : hub_->world;
    if (ranks > kMostPeers) return fmt::format("{} ranks; at most {} can", ranks, kMostPeers);
    for (int a = 0; a < hub_->world; ++a) {
      for (int b = a / ranks * ranks; b < std::min(hub_->world, a / ranks * ranks + ranks); ++b) {
        const Device from = hub_->devices[static_cast<size_t>(a)], to = hub_->devices[static_cast<size_t>(b)];
        if (!enable_access(from, to))
          return fmt::format("{} cannot access memory of {}", from.name(), to.name());
      }
    }
    return sharing_obstacle(hub_->devices, loads_kernels_lazily());
  }

  void run_over_peers(const Stream& stream, PeerWindows& windows, uint64_t bytes, const std::string& what,
                      const std::function<void(const Stream&)>& work) override {
    if (!device_.is_host()) {
      check();
      rendezvous(windows, what + ", before its kernel is launched");
      try {
        work(stream);
      } catch (const std::exception& error) {
        std::lock_guard lock(hub_->mutex);
        hub_->fail(fmt::format("rank {}: {}: {}", rank_, what, error.what()));
        throw;
      }
      rendezvous(windows, what + ", after its kernel is launched");
      bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
      return;
    }
    stream.submit([this, &windows, bytes, &what, work] {
      const Stream now = Stream::immediate_host();
      try {
        work(now);
        now.synchronize();
      } catch (const CommError& error) {
        std::lock_guard lock(hub_->mutex);
        const std::string cause = windows.failure();  // empty: another rank stopped this one
        if (hub_->failure.empty()) hub_->fail(fmt::format("rank {}: {}: {}", rank_, what, cause));
        throw CommError(fmt::format("rank {}: {}: {}", rank_, what, hub_->failure));
      }
      bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
    });
  }

  void abort(const std::string& reason) override {
    std::lock_guard lock(hub_->mutex);
    hub_->fail(fmt::format("rank {} gave up: {}", rank_, reason));
  }
  void check() override {
    std::lock_guard lock(hub_->mutex);
    for (const auto& weak : hub_->windows) {
      const auto alive = weak.lock();
      const std::string reported = alive ? alive->failure() : "";
      if (!reported.empty() && hub_->failure.empty())
        hub_->fail(fmt::format("rank {}: {}", alive->first + alive->memory.rank, reported));
    }
    if (!hub_->failure.empty()) throw CommError(fmt::format("rank {}: {}", rank_, hub_->failure));
  }

 protected:
  std::shared_ptr<PeerWindows> make_peer_windows(int64_t half_bytes, int ranks) override {
    const auto bytes = static_cast<size_t>(peer_window_bytes(half_bytes));
    Buffer mine(device_, bytes);
    const Stream stream = device_.is_host() ? Stream::immediate_host() : Stream::create(device_, "set-up");
    fill_zero(stream, mine.data(), bytes);
    stream.synchronize();
    auto made = std::make_shared<PeerWindows>();
    made->report = Buffer::pinned(device_, sizeof(PeerReport));
    new (made->report.data()) PeerReport();

    const int which = peer_groups_++;
    std::unique_lock lock(hub_->mutex);
    std::shared_ptr<PeerGroup>& entry = hub_->peers[which];
    if (!entry) {
      const auto world = static_cast<size_t>(hub_->world);
      entry = std::make_shared<PeerGroup>();
      entry->memory.resize(world), entry->calls_before.resize(world), entry->here.resize(world);
      entry->arrivals.resize(world);
    }
    const std::shared_ptr<PeerGroup> group = entry;
    group->memory[rank_] = std::move(mine);
    group->here[static_cast<size_t>(rank_)] = true;
    if (!replays_) group->calls_before[static_cast<size_t>(rank_)] = calls_;
    hub_->compare_windows();
    ++group->ready;
    hub_->wake_all();
    hub_->wait(
        lock, rank_, [&] { return group->ready == hub_->world; },
        [&] { return fmt::format("opening windows: {} of {} ranks have", group->ready, hub_->world); });
    PeerMemory& m = made->memory;
    m.world = ranks > 0 ? ranks : hub_->world;
    made->first = rank_ / m.world * m.world;
    for (int r = 0; r < m.world; ++r) m.windows[r] = group->memory[made->first + r].as<std::byte>();
    m.rank = rank_ - made->first;
    m.half_bytes = half_bytes;
    m.report = made->report.as<PeerReport>();
    m.patience_ns = std::chrono::nanoseconds(hub_->timeout).count();
    m.blocks = kMostPeerBlocks;
    for (const Device& d : hub_->devices) {
      const auto alike = static_cast<int>(std::count(hub_->devices.begin(), hub_->devices.end(), d));
      m.blocks = std::min(m.blocks, peer_blocks(multiprocessors(d), alike));
    }
    detail::make_current(device_);
    made->keep = group;
    std::erase_if(hub_->windows, [](const auto& weak) { return weak.expired(); });
    hub_->windows.push_back(made);
    if (++group->taken == hub_->world) hub_->peers.erase(which);
    return made;
  }

 private:
  // Two rendezvous of the ranks' threads enclose the launch of kernels that wait for each other. Otherwise
  // one rank could block in a call that waits for another rank's kernel (cudaFree, a kernel's first launch)
  // and never launch its own.
  void rendezvous(const PeerWindows& windows, const std::string& what) {
    std::vector<uint64_t>& arrivals = static_cast<PeerGroup*>(windows.keep.get())->arrivals;
    std::unique_lock lock(hub_->mutex);
    const uint64_t mine = ++arrivals[static_cast<size_t>(rank_)];
    const auto late = [&] { return std::ranges::find_if(arrivals, [&](uint64_t n) { return n < mine; }); };
    if (late() == arrivals.end()) return hub_->wake_all();
    hub_->wait(
        lock, rank_, [&] { return late() == arrivals.end(); },
        [&] { return fmt::format("{}: waiting for rank {}", what, late() - arrivals.begin()); });
  }

  std::string here(const ExchangeLabel& label) const {
    return sequence_ == 0 ? label.what : fmt::format("call {}, {}", sequence_, label.what);
  }

  // `stream` is null on the host, where data moves now. On CUDA only events and copies are enqueued.
  void run(const Stream* stream, const std::vector<Transfer>& transfers, const ExchangeLabel& label) {
    std::deque<Offer> mine;
    for (const Transfer& t : transfers) {
      if (t.kind != Transfer::Kind::send) continue;
      Offer& offer = mine.emplace_back();
      offer.data = t.data;
      offer.bytes = t.bytes;
      offer.label = &label;
      if (stream) {
        offer.ready = Event::create(device_);
        offer.ready.record(*stream);
      }
    }
    std::unique_lock lock(hub_->mutex);
    // An offer points into this stack frame, so it must be withdrawn before the frame ends, even on an
    // exception. After an exception the caller may free the data, so wait for the peers' enqueued copies.
    struct Withdraw {
      LocalTransport* self;
      std::unique_lock<std::mutex>& lock;
      std::deque<Offer>& mine;
      bool failed = true;
      ~Withdraw() {
        if (!lock.owns_lock()) lock.lock();
        for (int to = 0; to < self->hub_->world; ++to) {
          auto& box = self->hub_->box(self->rank_, to);
          for (Offer& offer : mine) std::erase(box, &offer);
        }
        for (Offer& offer : mine) self->hub_->wait_for_copy(lock, self->rank_, offer);
        if (!failed || self->device_.is_host()) return;
        lock.unlock();
        for (Offer& offer : mine) {
          if (offer.state == Offer::State::finished) self->wait_until_done(offer.taken);
        }
      }
    } withdraw{this, lock, mine};

    auto next = mine.begin();
    for (const Transfer& t : transfers) {
      if (t.kind != Transfer::Kind::send) continue;
      hub_->box(rank_, t.peer).push_back(&*next++);
    }
    lock.unlock();
    for (const Transfer& t : transfers) {
      if (t.kind == Transfer::Kind::send) hub_->wake(t.peer);
    }
    lock.lock();

    std::vector<const Transfer*> receives;
    for (const Transfer& t : transfers) {
      if (t.kind == Transfer::Kind::receive) receives.push_back(&t);
    }
    while (!receives.empty()) {
      auto takeable = receives.end();
      waits_.measure([&] {
        hub_->wait(
            lock, rank_,
            [&] {
              takeable = std::find_if(receives.begin(), receives.end(),
                                      [&](const Transfer* t) { return !hub_->box(t->peer, rank_).empty(); });
              return takeable != receives.end();
            },
            [&] {
              return fmt::format("{}: waiting to receive {} bytes from rank {}", here(label),
                                 receives.front()->bytes, receives.front()->peer);
            });
        return (*takeable)->peer;
      });
      take(lock, stream, **takeable, label);
      receives.erase(takeable);
    }
    hub_->wait(
        lock, rank_,
        [&] {
          return std::all_of(mine.begin(), mine.end(),
                             [](const Offer& o) { return o.state == Offer::State::finished; });
        },
        [&] { return here(label) + ": waiting for a peer to receive what was sent"; });
    if (stream) {
      for (const Offer& offer : mine) stream->wait(offer.taken);
    }
    withdraw.failed = false;
    for (const Offer& offer : mine) bytes_sent_.fetch_add(offer.bytes, std::memory_order_relaxed);
  }

  // Runs while an exception is in flight, so errors are swallowed. Waits at most until the deadline.
  void wait_until_done(const Event& event) const noexcept {
    try {
      event.synchronize_until(std::chrono::steady_clock::now() + hub_->timeout);
    } catch (...) {
    }
  }
  void wait_until_done(const Stream& stream) const noexcept {
    try {
      Event end = Event::create(device_);
      end.record(stream);
      wait_until_done(end);
    } catch (...) {
    }
  }

  // Receives the oldest offer of t.peer. Holds the lock on entry and exit, but not while copying.
  void take(std::unique_lock<std::mutex>& lock, const Stream* stream, const Transfer& t,
            const ExchangeLabel& label) {
    auto& box = hub_->box(t.peer, rank_);
    Offer& offer = *box.front();
    if (offer.bytes != t.bytes || offer.label->tag != label.tag) {
      std::string text = fmt::format(
          "ranks disagree: rank {} is in {} and expects {} bytes from rank {}, which is in {} and sends {}",
          rank_, label.what, t.bytes, t.peer, offer.label->what, offer.bytes);
      hub_->fail(text);
      throw CommError(text);
    }
    box.pop_front();
    offer.state = Offer::State::copying;
    lock.unlock();
    try {
      if (stream) {
        stream->wait(offer.ready);
        copy(*stream, t.data, offer.data, t.bytes);
        offer.taken = Event::create(device_);
        offer.taken.record(*stream);
      } else if (t.bytes > 0) {
        std::memcpy(t.data, offer.data, t.bytes);
      }
    } catch (const std::exception& error) {
      // The sender waits without a deadline while its memory is being read. The copy may already be enqueued,
      // without an event for its end.
      if (stream) wait_until_done(*stream);
      lock.lock();
      offer.state = Offer::State::waiting;
      hub_->fail(fmt::format("rank {} in {}: {}", rank_, here(label), error.what()));
      throw;
    }
    lock.lock();
    offer.state = Offer::State::finished;
    lock.unlock();
    hub_->wake(t.peer);
    lock.lock();
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  Device device_;
  uint64_t sequence_ = 0;  // number of the current call; used only by the thread that runs exchanges
  int splits_ = 0, peer_groups_ = 0;
  uint64_t calls_ = 0;    // begun by this rank's threads, perhaps not yet by its stream
  bool replays_ = false;  // a graph makes some calls; those are not counted
  Waits waits_;
};

}  // namespace

std::string sharing_obstacle(const std::vector<Device>& devices, bool lazily) {
  if (!lazily) return "";
  for (const Device& d : devices) {
    const auto ranks = std::count(devices.begin(), devices.end(), d);
    if (d.is_host() || ranks == 1) continue;
    return fmt::format(
        "{} ranks share {}, where loading a kernel may wait for one that waits for another rank; set "
        "CUDA_MODULE_LOADING=EAGER in the environment, or give each rank a GPU",
        ranks, d.name());
  }
  return "";
}

std::vector<std::unique_ptr<Transport>> make_local_transports(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout) {
  if (devices.empty()) throw BadInput("a local group needs at least one rank");
  for (Device d : devices) {
    if (d.kind != devices[0].kind)
      throw BadInput("ranks of one process must all be on the host or all on CUDA devices");
  }
  for (Device from : devices) {
    for (Device to : devices) enable_access(from, to);  // each rank copies from its peers' memory
  }
  auto hub = std::make_shared<Hub>(devices, timeout);
  std::vector<std::unique_ptr<Transport>> transports;
  for (size_t r = 0; r < devices.size(); ++r) {
    transports.push_back(std::make_unique<LocalTransport>(hub, static_cast<int>(r), devices[r]));
  }
  return transports;
}

}  // namespace gradwire
