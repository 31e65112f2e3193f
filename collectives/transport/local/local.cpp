#include "collectives/transport/local/local.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/transport/emulated_link.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/threads/running_clock.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// The shared state of all ranks. One lock suffices: exchanges are few, and copies happen without the lock.
class LocalHub {
 public:
  // A pending send. It lives in the sender's exchange until the send is finished or withdrawn.
  struct Offer {
    const void* data = nullptr;
    size_t bytes = 0;
    const ExchangeLabel* label = nullptr;
    enum class State { waiting, copying, copied, finished } state = State::waiting;
    Event ready;                // CUDA: recorded once the data is complete
    Event taken;                // CUDA: recorded after the copy
    LinkPacer::Flow flow = {};  // with emulated links: the message's way to the receiver
  };

  LocalHub(const std::vector<Device>& devices, std::chrono::milliseconds timeout, const EmulatedLink& link)
      : world(static_cast<int>(devices.size())),
        timeout(timeout),
        devices(devices),
        changed_(devices.size()),
        offers_(devices.size() * devices.size()) {
    if (link) links.emplace(link, world);
  }

  // Waits until `condition` holds. Throws if the group has failed. Fails the group and throws at the
  // deadline; `pending` then describes the wait. `again`: returns the next time at which the condition can
  // become true without a wake(). Requires the lock.
  template <typename Condition, typename Pending, typename Again = LinkPacer::Time (*)()>
  void wait(
      std::unique_lock<std::mutex>& lock, int rank, Condition condition, Pending pending,
      Again again = [] { return LinkPacer::Time::max(); }) {
    const auto deadline = RunningClock::now() + timeout;
    while (!condition()) {
      throw_if_failed(rank, pending);
      const auto left = deadline - RunningClock::now();
      if (left <= left.zero()) {
        fail_and_throw(fmt::format("rank {}: no progress for {} ms: {}", rank, timeout.count(), pending()));
      }
      changed_[rank].wait_until(lock,
                                std::min<LinkPacer::Time>(LinkPacer::Time::clock::now() + left, again()));
    }
  }
  void barrier(int rank) {
    std::unique_lock lock(mutex);
    const uint64_t mine = barriers_passed_;
    if (++at_barrier_ == world) {
      at_barrier_ = 0;
      ++barriers_passed_;
      wake_all();
    }
    wait(
        lock, rank, [&] { return barriers_passed_ != mine; },
        [&] { return fmt::format("at a barrier that {} of {} ranks have reached", at_barrier_, world); });
  }
  void wait_for_copy(std::unique_lock<std::mutex>& lock, int rank, const Offer& offer) {
    changed_[rank].wait(lock, [&] { return offer.state != Offer::State::copying; });
  }
  // Records that `rank` makes its call number `number`. The first rank to arrive defines the call.
  void begin_call(int rank, uint64_t number, const Call& call) {
    std::lock_guard lock(mutex);
    throw_if_failed(rank, [&] { return call.what; });
    const size_t index = number - first_open_;
    if (index == open_.size()) open_.push_back({call.hash, rank, 0, call.what});
    OpenCall& open = open_[index];
    if (open.hash != call.hash) {
      fail_and_throw(fmt::format("ranks disagree: call {} of rank {} is {}, of rank {} it is {}{}", number,
                                 open.rank, open.what, rank, call.what,
                                 open.what == call.what ? "; the calls differ in something else" : ""));
    }
    ++open.arrived;
    while (!open_.empty() && open_.front().arrived == world) {
      open_.pop_front();
      ++first_open_;
    }
  }
  // Throws CommError once the group has failed.
  void check(int rank) {
    std::lock_guard lock(mutex);
    if (!failure_.empty()) throw CommError("rank {}: {}", rank, failure_);
  }

  // The methods below require the lock.

  std::deque<Offer*>& offers(int from, int to) { return offers_[from * world + to]; }
  // Returns whether the whole message has passed the emulated links.
  bool arrived(Offer& offer) {
    return !links || links->arrived(offer.flow, LinkPacer::Time::clock::now()) == offer.bytes;
  }
  void fail(const std::string& reason) {
    if (failure_.empty()) failure_ = "the group failed: " + reason;
    wake_all();
  }
  [[noreturn]] void fail_and_throw(const std::string& text) {
    fail(text);
    throw CommError(text);
  }
  void wake(int rank) { changed_[rank].notify_all(); }
  void wake_all() {
    for (std::condition_variable& c : changed_) c.notify_all();
  }

  const int world;
  const std::chrono::milliseconds timeout;
  const std::vector<Device> devices;  // by rank
  std::mutex mutex;
  std::optional<LinkPacer> links;  // unless messages arrive at once
  // Transports that their ranks have not fetched yet, by number of the split and first member.
  std::map<std::pair<int, int>, std::vector<std::unique_ptr<Transport>>> splits;

 private:
  // A call that not all ranks have made yet.
  struct OpenCall {
    uint64_t hash;
    int rank;  // the first rank that made the call
    int arrived;
    std::string what;
  };
  template <typename Pending>
  void throw_if_failed(int rank, Pending pending) const {
    if (!failure_.empty()) throw CommError("rank {}: {}: {}", rank, pending(), failure_);
  }

  const RunningClock::Watch watch_;
  std::string failure_;
  int at_barrier_ = 0;
  uint64_t barriers_passed_ = 0;  // number of barriers that all ranks have passed
  // One condition variable per rank, so that a message wakes only its receiver.
  std::vector<std::condition_variable> changed_;
  std::deque<OpenCall> open_;
  uint64_t first_open_ = 1;  // the number of the call open_[0]
  std::vector<std::deque<Offer*>> offers_;
};

using Offer = LocalHub::Offer;

// One rank's part of an exchange between threads. Its offers point into this object, so the destructor
// withdraws the offers. After an exception the caller may free the data, so the destructor then also waits
// for the peers' enqueued copies.
class LocalExchange {
 public:
  // Prepares an exchange. `stream`: null on the host, where run() moves the data. On CUDA, run() only
  // enqueues events and copies. `doing`: for error texts. All arguments must outlive the object.
  LocalExchange(LocalHub& hub, int rank, const Stream* stream, const ExchangeLabel& label,
                const std::string& doing)
      : hub_(hub), rank_(rank), stream_(stream), label_(label), doing_(doing) {}
  LocalExchange(const LocalExchange&) = delete;
  ~LocalExchange() {
    if (!lock_.owns_lock()) lock_.lock();
    for (int to = 0; to < hub_.world; ++to) {
      for (Offer& offer : sends_) std::erase(hub_.offers(rank_, to), &offer);
    }
    for (Offer& offer : sends_) {
      if (hub_.links) hub_.links->withdraw(offer.flow);
    }
    for (Offer& offer : sends_) hub_.wait_for_copy(lock_, rank_, offer);
    if (done_ || stream_ == nullptr) return;
    lock_.unlock();
    for (Offer& offer : sends_) {
      if (offer.state == Offer::State::finished) wait_until_done(offer.taken);
    }
  }

  // Blocks until all data has been received and all peers have received this rank's data; on CUDA, until the
  // copies are enqueued. Adds the waiting time to `waits`.
  void run(const std::vector<Transfer>& transfers, Waits& waits) {
    offer_sends(transfers);
    receive_all(transfers, waits);
    hub_.wait(
        lock_, rank_,
        [&] {
          return std::all_of(sends_.begin(), sends_.end(),
                             [](const Offer& o) { return o.state == Offer::State::finished; });
        },
        [&] { return doing_ + ": waiting for a peer to receive what was sent"; });
    for (const Offer& offer : sends_) {
      if (stream_ != nullptr) stream_->wait(offer.taken);
    }
    done_ = true;
  }

  // Returns the number of bytes of all sends.
  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const Offer& offer : sends_) bytes += offer.bytes;
    return bytes;
  }

 private:
  Device device() const { return hub_.devices[static_cast<size_t>(rank_)]; }

  void offer_sends(const std::vector<Transfer>& transfers) {
    for (const Transfer& t : transfers) {
      if (t.kind != Transfer::Kind::send) continue;
      Offer& offer = sends_.emplace_back();
      offer.data = t.data;
      offer.bytes = t.bytes;
      offer.label = &label_;
      if (stream_ != nullptr) {
        offer.ready = Event::create(device());
        offer.ready.record(*stream_);
      }
    }
    lock_.lock();
    const auto now = hub_.links ? LinkPacer::Time::clock::now() : LinkPacer::Time();
    auto next = sends_.begin();
    for (const Transfer& t : transfers) {
      if (t.kind != Transfer::Kind::send) continue;
      Offer& offer = *next++;
      hub_.offers(rank_, t.peer).push_back(&offer);
      offer.flow.from = rank_, offer.flow.to = t.peer, offer.flow.bytes = t.bytes;
      if (hub_.links) hub_.links->post(offer.flow, now);
    }
    lock_.unlock();
    for (const Transfer& t : transfers) {
      if (t.kind == Transfer::Kind::send) hub_.wake(t.peer);
    }
    lock_.lock();
  }

  void receive_all(const std::vector<Transfer>& transfers, Waits& waits) {
    std::vector<const Transfer*> receives;
    for (const Transfer& t : transfers) {
      if (t.kind == Transfer::Kind::receive) receives.push_back(&t);
    }
    while (!receives.empty()) {
      auto offered = receives.end();
      waits.measure([&] {
        hub_.wait(
            lock_, rank_,
            [&] {
              offered = std::find_if(receives.begin(), receives.end(), [&](const Transfer* t) {
                Offer* oldest = oldest_from(t->peer);
                return oldest != nullptr && (oldest->state == Offer::State::waiting || hub_.arrived(*oldest));
              });
              return offered != receives.end();
            },
            [&] {
              return fmt::format("{}: waiting to receive {} bytes from rank {}{}", doing_,
                                 receives.front()->bytes, receives.front()->peer,
                                 hub_.links ? " over links of " + hub_.links->link().to_string() : "");
            },
            [&] {
              auto first = LinkPacer::Time::max();
              for (const Transfer* t : receives) {
                const Offer* oldest = oldest_from(t->peer);
                if (oldest == nullptr || !hub_.links) continue;
                first = std::min(first, hub_.links->earliest(oldest->flow, oldest->bytes));
              }
              return first;
            });
        return (*offered)->peer;
      });
      Offer& offer = *oldest_from((*offered)->peer);
      if (offer.state == Offer::State::waiting) receive(offer, **offered);
      if (!hub_.arrived(offer)) continue;
      const int peer = (*offered)->peer;
      receives.erase(offered);
      std::erase(hub_.offers(peer, rank_), &offer);  // the sender may have withdrawn the offer
      offer.state = Offer::State::finished;
      lock_.unlock();
      hub_.wake(peer);
      lock_.lock();
    }
  }

  Offer* oldest_from(int peer) {
    const std::deque<Offer*>& offers = hub_.offers(peer, rank_);
    return offers.empty() ? nullptr : offers.front();
  }

  // Copies an offer. Over emulated links, the copy takes place while the message is on its way. The lock is
  // held on entry and exit, but not during the copy.
  void receive(Offer& offer, const Transfer& t) {
    if (offer.bytes != t.bytes || offer.label->tag != label_.tag) {
      hub_.fail_and_throw(fmt::format(
          "ranks disagree: rank {} is in {} and expects {} bytes from rank {}, which is in {} and sends {}",
          rank_, label_.what, t.bytes, t.peer, offer.label->what, offer.bytes));
    }
    offer.state = Offer::State::copying;
    lock_.unlock();
    try {
      copy_from(offer, t);
    } catch (const std::exception& error) {
      // The sender waits without a deadline while a peer reads the sender's memory. The copy may already be
      // enqueued, without an event for its end.
      if (stream_ != nullptr) wait_until_done(*stream_);
      lock_.lock();
      offer.state = Offer::State::waiting;
      hub_.fail(fmt::format("rank {} in {}: {}", rank_, doing_, error.what()));
      throw;
    }
    lock_.lock();
    offer.state = Offer::State::copied;
    if (hub_.links) hub_.wake(t.peer);  // after a failure, the sender waits to withdraw the offer
  }

  void copy_from(Offer& offer, const Transfer& t) const {
    if (stream_ != nullptr) {
      stream_->wait(offer.ready);
      copy(*stream_, t.data, offer.data, t.bytes);
      offer.taken = Event::create(device());
      offer.taken.record(*stream_);
    } else if (t.bytes > 0) {
      std::memcpy(t.data, offer.data, t.bytes);
    }
  }

  // Waits for `event`, at most until the deadline. Runs while an exception is in flight, so it swallows
  // errors.
  void wait_until_done(const Event& event) const noexcept {
    try {
      event.synchronize_until(std::chrono::steady_clock::now() + hub_.timeout);
    } catch (...) {
    }
  }

  void wait_until_done(const Stream& stream) const noexcept {
    try {
      Event end = Event::create(device());
      end.record(stream);
      wait_until_done(end);
    } catch (...) {
    }
  }

  LocalHub& hub_;
  const int rank_;
  const Stream* const stream_;
  const ExchangeLabel& label_;
  const std::string& doing_;
  std::unique_lock<std::mutex> lock_{hub_.mutex, std::defer_lock};
  std::deque<Offer> sends_;
  bool done_ = false;
};

class LocalTransport final : public Transport {
 public:
  // Measures no waits on CUDA, because waits_ would measure the time to enqueue.
  LocalTransport(std::shared_ptr<LocalHub> hub, int rank, Device device)
      : Transport("local", {rank, hub->world, device, device.is_host(), hub->timeout}),
        hub_(std::move(hub)) {}

  void begin_call(const Stream& stream, const Call& call) override {
    auto begin = [this, &call] { hub_->begin_call(rank(), ++call_, call); };
    device().is_host() ? stream.submit(begin) : begin();
  }

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    if (device().is_host()) {
      stream.submit([this, &transfers, &label] { run_exchange(nullptr, transfers, label); });
    } else {
      run_exchange(&stream, transfers, label);
    }
  }

  std::string capture_obstacle() const override {
    if (device().is_host() || world() == 1) return "";
    return "ranks of one process on GPUs wait for each other on the host in each exchange; start one process "
           "per rank (torchrun, srun or mpirun)";
  }

  void barrier() override { hub_->barrier(rank()); }

  // Returns this rank's transport for `members`. The first member to arrive makes the transports of all
  // members.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override {
    const int number = splits_++;
    if (members.empty()) return nullptr;
    std::lock_guard lock(hub_->mutex);
    const auto group = hub_->splits.try_emplace({number, members.front()}).first;
    auto& transports = group->second;
    if (transports.empty()) {
      std::vector<Device> devices;
      for (int r : members) devices.push_back(hub_->devices[static_cast<size_t>(r)]);
      const EmulatedLink link = hub_->links ? hub_->links->link() : EmulatedLink{};
      transports = make_local_transports(devices, hub_->timeout, link);
    }
    const auto me = std::find(members.begin(), members.end(), rank()) - members.begin();
    std::unique_ptr<Transport> mine = std::move(transports[static_cast<size_t>(me)]);
    if (std::ranges::all_of(transports, std::logical_not<>())) {
      hub_->splits.erase(group);
    }
    return mine;
  }

  void abort(const std::string& reason) override {
    std::lock_guard lock(hub_->mutex);
    hub_->fail(fmt::format("rank {} gave up: {}", rank(), reason));
  }
  void check() override { hub_->check(rank()); }

 private:
  void run_exchange(const Stream* stream, const std::vector<Transfer>& transfers,
                    const ExchangeLabel& label) {
    const std::string doing = call_ == 0 ? label.what : fmt::format("call {}, {}", call_, label.what);
    LocalExchange exchange(*hub_, rank(), stream, label, doing);
    exchange.run(transfers, waits_);
    count_sent(exchange.bytes());
  }

  const std::shared_ptr<LocalHub> hub_;
  uint64_t call_ = 0;  // number of the current call; only the thread that runs exchanges uses it
  int splits_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_local_transports(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout,
                                                              const EmulatedLink& link) {
  if (devices.empty()) throw BadInput("a local group needs at least one rank");
  for (Device d : devices) {
    if (d.kind != devices[0].kind)
      throw BadInput("ranks of one process must all be on the host or all on CUDA devices");
  }
  if (link && devices[0].is_cuda()) throw BadInput("links between GPUs cannot be emulated; use the host");
  for (Device from : devices) {
    for (Device to : devices) enable_access(from, to);  // each rank copies from its peers' memory
  }
  auto hub = std::make_shared<LocalHub>(devices, timeout, link);
  std::vector<std::unique_ptr<Transport>> transports;
  for (size_t r = 0; r < devices.size(); ++r) {
    transports.push_back(std::make_unique<LocalTransport>(hub, static_cast<int>(r), devices[r]));
  }
  return transports;
}

}  // namespace gradwire
