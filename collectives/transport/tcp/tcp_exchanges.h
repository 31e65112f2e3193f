// The calls and exchanges of one rank of a group of processes: compares calls between ranks, and posts and
// awaits messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/transport/tcp/tcp.h"
#include "collectives/transport/tcp/tcp_links.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// One thread at a time may call the methods. Every method throws CommError if the group fails.
class TcpExchanges {
 public:
  // Prepares the exchanges of one rank. `waits` gets the waiting times of the exchanges. An exchange that
  // takes longer than `timeout` fails the group.
  TcpExchanges(int rank, int world, std::chrono::milliseconds timeout, TcpFailure& failure, Waits& waits)
      : rank_(rank), world_(world), timeout_(timeout), failure_(failure), waits_(waits) {}

  // Sets the links, before the first exchange. A failure of the group interrupts the links.
  TcpLinks& use(std::unique_ptr<TcpLinks> links);

  // Begins a call: see Transport::begin_call().
  void begin_call(const Call& call);
  // Posts an exchange. At most two may be in flight.
  void post(const std::vector<Transfer>& transfers, const ExchangeLabel& label);
  // Lets a helper thread progress the exchanges until the next call of a method.
  EmulatedLink emulated() const { return links_->emulated(); }
  void hand_over() { links_->hand_over(); }
  // Blocks until the oldest exchange is done. Returns the number of payload bytes that the exchange has sent.
  uint64_t await_oldest();

 private:
  using Message = TcpLinks::Message;

  // An exchange in flight. The object must not move, because the links hold pointers to its messages.
  struct InFlight {
    std::string doing;  // "call 17, allreduce of ..., round 3 of 6"
    tcp_messages::CallHeader mine, previous;
    std::vector<Message> posted;
    uint64_t bytes = 0;  // number of payload bytes to send
  };

  std::string in_this_call(const std::string& what) const;
  void post_all(InFlight& e, const std::vector<Transfer>& transfers, uint64_t tag);
  void post_payloads(InFlight& e, const std::vector<Transfer>& transfers, Transfer::Kind kind, uint64_t tag);
  void post_message(InFlight& e, Transfer::Kind kind, int peer, void* data, size_t bytes, uint64_t slot);
  void await(const InFlight& e, Message& message, SteadyClock::time_point deadline);
  static std::string pending(const std::vector<Message>& posted, const Message* at);
  [[noreturn]] void fail(const InFlight& e, const Message* at, const std::exception& error,
                         SteadyClock::time_point deadline);

  const int rank_, world_;
  const std::chrono::milliseconds timeout_;
  TcpFailure& failure_;
  Waits& waits_;
  Call call_;  // the current call
  uint64_t calls_ = 0, rolling_ = 0;
  bool unannounced_ = false;                         // no message of the current call has been sent
  std::deque<std::unique_ptr<InFlight>> in_flight_;  // in the order in which the exchanges were posted
  // Declared last, and so destroyed first: the links' thread may use the exchanges in flight.
  std::unique_ptr<TcpLinks> links_;
};

}  // namespace gradwire
