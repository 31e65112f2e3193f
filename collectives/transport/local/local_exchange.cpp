#include "collectives/transport/local/local_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/util/error.h"

namespace gradwire {

using Offer = LocalHub::Offer;

LocalExchange::~LocalExchange() {
  if (!lock_.owns_lock()) lock_.lock();
  for (int to = 0; to < hub_.world; ++to) {
    for (Offer& offer : sends_) std::erase(hub_.offers(rank_, to), &offer);
  }
  for (Offer& offer : sends_) hub_.wait_for_copy(lock_, rank_, offer);
  if (done_ || stream_ == nullptr) return;
  lock_.unlock();
  for (Offer& offer : sends_) {
    if (offer.state == Offer::State::finished) wait_until_done(offer.taken);
  }
}

void LocalExchange::run(const std::vector<Transfer>& transfers, Waits& waits) {
  offer_sends(transfers);
  receive_all(transfers, waits);
  await_receivers();
  done_ = true;
}

uint64_t LocalExchange::bytes() const {
  uint64_t bytes = 0;
  for (const Offer& offer : sends_) bytes += offer.bytes;
  return bytes;
}

void LocalExchange::offer_sends(const std::vector<Transfer>& transfers) {
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
  auto next = sends_.begin();
  for (const Transfer& t : transfers) {
    if (t.kind == Transfer::Kind::send) hub_.offers(rank_, t.peer).push_back(&*next++);
  }
  lock_.unlock();
  for (const Transfer& t : transfers) {
    if (t.kind == Transfer::Kind::send) hub_.wake(t.peer);
  }
  lock_.lock();
}

void LocalExchange::receive_all(const std::vector<Transfer>& transfers, Waits& waits) {
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
            offered = std::find_if(receives.begin(), receives.end(),
                                   [&](const Transfer* t) { return !hub_.offers(t->peer, rank_).empty(); });
            return offered != receives.end();
          },
          [&] {
            return fmt::format("{}: waiting to receive {} bytes from rank {}", doing_,
                               receives.front()->bytes, receives.front()->peer);
          });
      return (*offered)->peer;
    });
    receive(**offered);
    receives.erase(offered);
  }
}

void LocalExchange::receive(const Transfer& t) {
  std::deque<Offer*>& offers = hub_.offers(t.peer, rank_);
  Offer& offer = *offers.front();
  if (offer.bytes != t.bytes || offer.label->tag != label_.tag) {
    hub_.fail_and_throw(fmt::format(
        "ranks disagree: rank {} is in {} and expects {} bytes from rank {}, which is in {} and sends {}",
        rank_, label_.what, t.bytes, t.peer, offer.label->what, offer.bytes));
  }
  offers.pop_front();
  offer.state = Offer::State::copying;
  lock_.unlock();
  try {
    copy_from(offer, t);
  } catch (const std::exception& error) {
    // The sender waits without a deadline while its memory is being read. The copy may already be enqueued,
    // without an event for its end.
    if (stream_ != nullptr) wait_until_done(*stream_);
    lock_.lock();
    offer.state = Offer::State::waiting;
    hub_.fail(fmt::format("rank {} in {}: {}", rank_, doing_, error.what()));
    throw;
  }
  lock_.lock();
  offer.state = Offer::State::finished;
  lock_.unlock();
  hub_.wake(t.peer);
  lock_.lock();
}

void LocalExchange::copy_from(Offer& offer, const Transfer& t) const {
  if (stream_ != nullptr) {
    stream_->wait(offer.ready);
    copy(*stream_, t.data, offer.data, t.bytes);
    offer.taken = Event::create(device());
    offer.taken.record(*stream_);
  } else if (t.bytes > 0) {
    std::memcpy(t.data, offer.data, t.bytes);
  }
}

void LocalExchange::await_receivers() {
  hub_.wait(
      lock_, rank_,
      [&] {
        return std::all_of(sends_.begin(), sends_.end(),
                           [](const Offer& o) { return o.state == Offer::State::finished; });
      },
      [&] { return doing_ + ": waiting for a peer to receive what was sent"; });
  if (stream_ == nullptr) return;
  for (const Offer& offer : sends_) stream_->wait(offer.taken);
}

// Runs while an exception is in flight, so errors are swallowed. Waits at most until the deadline.
void LocalExchange::wait_until_done(const Event& event) const noexcept {
  try {
    event.synchronize_until(std::chrono::steady_clock::now() + hub_.timeout);
  } catch (...) {
  }
}

void LocalExchange::wait_until_done(const Stream& stream) const noexcept {
  try {
    Event end = Event::create(device());
    end.record(stream);
    wait_until_done(end);
  } catch (...) {
  }
}

}  // namespace gradwire
