#include "collectives/transport/tcp/tcp_exchanges.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>
#include <set>

#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {

using namespace tcp_messages;

TcpLinks& TcpExchanges::use(std::unique_ptr<TcpLinks> links) {
  links_ = std::move(links);
  failure_.on_failure([links = links_.get()] { links->interrupt(); });
  return *links_;
}

void TcpExchanges::begin_call(const Call& call) {
  if (unannounced_) {  // the previous call moved no data; compare the previous call's header now
    post({}, {0, call_.what});
    await_oldest();
  }
  call_ = call;
  ++calls_;
  rolling_ = mix(rolling_, call.hash);
  unannounced_ = true;
}

std::string TcpExchanges::in_this_call(const std::string& what) const {
  return calls_ == 0 ? what : fmt::format("call {}, {}", calls_, what);
}

void TcpExchanges::post(const std::vector<Transfer>& transfers, const ExchangeLabel& label) {
  const uint64_t tag = mix(rolling_, label.tag);
  InFlight& e = *in_flight_.emplace_back(std::make_unique<InFlight>());
  e.doing = in_this_call(label.what);
  for (const Transfer& t : transfers) {
    if (t.peer < 0 || t.peer >= world_ || t.peer == rank_) {
      in_flight_.pop_back();
      throw BadInput("{}: rank {} cannot exchange with rank {}", label.what, rank_, t.peer);
    }
    if (t.kind == Transfer::Kind::send) e.bytes += t.bytes;
  }
  e.posted.reserve(transfers.size() + 2);
  if (in_flight_.size() == 1) failure_.set_activity("in " + e.doing);
  try {
    post_all(e, transfers, tag);
  } catch (const std::exception& error) {
    fail(e, nullptr, error, SteadyClock::time_point::max());
  }
}

void TcpExchanges::post_all(InFlight& e, const std::vector<Transfer>& transfers, uint64_t tag) {
  using Kind = Transfer::Kind;
  const int next = (rank_ + 1) % world_, previous = (rank_ + world_ - 1) % world_;
  if (unannounced_) {
    unannounced_ = false;
    e.mine = CallHeader(calls_, rolling_, call_.what);
    post_message(e, Kind::receive, previous, &e.previous, sizeof e.previous, kCallSlot);
    post_message(e, Kind::send, next, &e.mine, sizeof e.mine, kCallSlot);
  }
  post_payloads(e, transfers, Kind::receive, tag);
  post_payloads(e, transfers, Kind::send, tag);
}

void TcpExchanges::post_payloads(InFlight& e, const std::vector<Transfer>& transfers, Transfer::Kind kind,
                                 uint64_t tag) {
  for (const Transfer& t : transfers) {
    if (t.kind != kind || t.bytes == 0) continue;
    post_message(e, t.kind, t.peer, t.data, t.bytes, payload_slot(tag, t.bytes));
  }
}

void TcpExchanges::post_message(InFlight& e, Transfer::Kind kind, int peer, void* data, size_t bytes,
                                uint64_t slot) {
  Message& message = e.posted.emplace_back();
  message.sent = kind == Transfer::Kind::send;
  message.peer = peer;
  message.data = data;
  message.bytes = bytes;
  message.tag = slot;
  links_->post(message);
}

uint64_t TcpExchanges::await_oldest() {
  if (in_flight_.empty()) throw CommError("the group has failed: " + failure_.recorded());
  InFlight& e = *in_flight_.front();
  const auto deadline = SteadyClock::now() + timeout_;
  const Message* at = nullptr;
  try {
    for (Message& message : e.posted) {
      at = &message;
      failure_.set_waiting_for(message.peer);
      await(e, message, deadline);
    }
  } catch (const std::exception& error) {
    fail(e, at, error, deadline);
  }
  failure_.set_waiting_for(-1);
  failure_.set_activity(in_flight_.size() > 1 ? "in " + in_flight_[1]->doing
                                              : "not in a collective; its last was " + e.doing);
  const uint64_t sent = e.bytes;
  in_flight_.pop_front();
  if (!in_flight_.empty()) links_->hand_over();
  return sent;
}

void TcpExchanges::await(const InFlight& e, Message& message, SteadyClock::time_point deadline) {
  const auto wait = [&] {
    if (!links_->wait(message, deadline)) throw CommError("not done in time");
    return message.peer;
  };
  if (message.sent) {
    wait();
    return;
  }
  waits_.measure(wait);
  if (message.tag == kCallSlot) compare(e.mine, e.previous, rank_, message.peer);
}

// Returns "waiting to receive 4096 bytes from rank 0 (3 receives and 2 sends pending, with ranks 0, 2)".
// `at`: the message for which the exchange waits; null while posting.
std::string TcpExchanges::pending(const std::vector<Message>& posted, const Message* at) {
  std::string text;
  if (at == nullptr) {
    if (posted.empty()) return "before the first transfer";
    const Message& last = posted.back();
    text = fmt::format("starting to {} rank {}", last.sent ? "send to" : "receive from", last.peer);
  } else if (at->tag == kCallSlot && !at->sent) {
    text = fmt::format("waiting for rank {} to begin it", at->peer);
  } else {
    text = fmt::format("waiting to {} {}{} rank {}", at->sent ? "send" : "receive",
                       at->tag == kCallSlot ? "" : fmt::format("{} bytes ", at->bytes),
                       at->sent ? "to" : "from", at->peer);
  }
  int receives = 0, sends = 0;
  std::set<int> peers;
  for (const Message& message : posted) {
    if (message.done) continue;
    ++(message.sent ? sends : receives);
    peers.insert(message.peer);
  }
  return fmt::format("{} ({} receives and {} sends pending, with ranks {})", text, receives, sends,
                     fmt::join(peers, ", "));
}

// Throws the error of exchange `e`, which failed while waiting for the message `at`, or while posting if `at`
// is null.
void TcpExchanges::fail(const InFlight& e, const Message* at, const std::exception& error,
                        SteadyClock::time_point deadline) {
  struct Cleared {
    TcpExchanges* self;
    std::string activity = {};
    ~Cleared() {  // must not allocate
      self->failure_.set_waiting_for(-1);
      self->links_->drop();
      if (!activity.empty()) self->failure_.set_activity(std::move(activity));
      self->in_flight_.clear();
    }
  } cleared{this};
  cleared.activity = "not in a collective; its last was " + e.doing;
  if (const auto* mismatch = dynamic_cast<const Mismatch*>(&error)) {
    failure_.give_up(e.doing, mismatch->what());
  }
  std::string cause = failure_.recorded();
  if (cause.empty() && SteadyClock::now() >= deadline) {
    cause = fmt::format("not done after {} ms{}", timeout_.count(), links_->over_links());
  } else if (cause.empty()) {
    cause = fmt::format("connection lost ({})", error.what());
  }
  failure_.give_up(fmt::format("{}: {}", e.doing, pending(e.posted, at)), cause);
}

}  // namespace gradwire
