#include "collectives/transport/exchange_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>

#include "runtime/threads/thread.h"

namespace gradwire {
namespace {

std::string name_of(const WatchedExchange& e) {
  return fmt::format("exchange {} ({})", e.number, e.what);
}

std::string one_way(const std::vector<Transfer>& transfers, Transfer::Kind kind) {
  int messages = 0;
  size_t bytes = 0;
  std::set<int> peers;
  for (const Transfer& t : transfers) {
    if (t.kind != kind) continue;
    ++messages;
    bytes += t.bytes;
    peers.insert(t.peer);
  }
  if (messages == 0) return "";
  const bool send = kind == Transfer::Kind::send;
  return fmt::format("{} {}{} ({} bytes) {} rank{} {}", messages, send ? "send" : "receive",
                     messages == 1 ? "" : "s", bytes, send ? "to" : "from", peers.size() == 1 ? "" : "s",
                     fmt::join(peers, ", "));
}

}  // namespace

std::string pending_text(const std::vector<Transfer>& transfers) {
  const std::string in = one_way(transfers, Transfer::Kind::receive);
  const std::string out = one_way(transfers, Transfer::Kind::send);
  return fmt::format("{}{}{} pending", in, in.empty() || out.empty() ? "" : " and ", out);
}

std::optional<std::string> ExchangesInFlight::overdue(Time now) {
  std::optional<std::string> text;
  for (auto at = entries_.begin(); at != entries_.end();) {
    Entry& e = *at;
    const Progress before = e.progress;
    const uint64_t runs = e.mark->runs();
    e.progress = e.mark->poll();
    if (e.progress == Progress::done) {
      last_ = e.exchange;
      if (e.mark->repeats()) {
        ++at;
      } else {
        spare_.push_back(std::move(e.mark));
        at = entries_.erase(at);
      }
      continue;
    }
    if (e.progress == Progress::running) {
      if (before != Progress::running || runs != e.runs) e.since = now;
      e.runs = runs;
      if (!text && timeout_.count() > 0 && now - e.since > timeout_) {
        text = fmt::format("{}: no progress for {} ms: {}", name_of(e.exchange), timeout_.count(),
                           pending_text(e.exchange.transfers));
      }
    }
    ++at;
  }
  return text;
}

const WatchedExchange* ExchangesInFlight::stalled(Time now, std::chrono::milliseconds longer_than) const {
  for (const Entry& e : entries_) {
    if (e.progress == Progress::running && !e.mark->repeats() && now - e.since > longer_than)
      return &e.exchange;
  }
  return nullptr;
}

std::string ExchangesInFlight::standing() const {
  for (Progress wanted : {Progress::running, Progress::queued}) {
    for (const Entry& e : entries_) {
      if (e.progress == wanted && !(e.mark->repeats() && wanted == Progress::queued)) {
        return (wanted == Progress::running ? "in " : "still computing before ") + name_of(e.exchange);
      }
    }
  }
  if (last_.number == 0) return "not in an exchange yet";
  return "not in an exchange; its last was " + name_of(last_);
}

bool run_with_deadline(std::function<void()> call, RunningClock::time_point deadline,
                       const std::function<bool()>& stop) {
  constexpr std::chrono::milliseconds kLookEvery{5};
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto state = std::make_shared<State>();
  Thread thread("a thread for a call with a deadline", [state, call = std::move(call)]() mutable {
    call();
    call = {};  // release captured state before the caller continues
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  });
  std::unique_lock lock(state->mutex);
  while (!state->done) {
    const auto now = RunningClock::now();
    lock.unlock();
    const bool enough = now >= deadline || (stop && stop());
    lock.lock();
    if (state->done) break;
    if (enough) {
      thread.detach();
      return false;
    }
    state->changed.wait_until(lock,
                              stop ? std::min(deadline, now + kLookEvery) : RunningClock::slice_end(deadline),
                              [&] { return state->done; });
  }
  lock.unlock();
  thread.join();
  return true;
}

}  // namespace gradwire
