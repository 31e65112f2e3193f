// The calls that one rank makes over NCCL, and their comparison with the other ranks' calls through the
// store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>

#include "collectives/net/membership.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// For the thread that makes calls. Other threads may only call other_call().
class NcclCallSequence {
 public:
  // Creates an empty sequence. `group`: if null, calls are not compared.
  NcclCallSequence(int rank, int world, Membership* group, std::chrono::milliseconds timeout)
      : rank_(rank), world_(world), group_(group), timeout_(timeout) {}

  // Begins the next call. Compares the call with the predecessor rank's call if the call's hash is new. As
  // every rank compares with its predecessor, all ranks are compared. Returns why the group has failed; "" if
  // the calls agree. If the predecessor had already compared its call, the mismatch is found when this rank's
  // exchange makes no progress.
  std::string begin(const Call& call);
  // Describes another rank's call that differs from the call of the exchange `stalled`; "" if no such call is
  // known. Any thread may call it.
  std::string other_call(const WatchedExchange& stalled) const;

  // Returns "call 3, " followed by `what`; before the first call, returns only `what`.
  std::string in_this_call(const std::string& what) const;
  const std::string& current() const { return current_; }  // "" before the first call
  uint64_t number() const { return number_; }
  uint64_t hash() const { return hash_; }  // hash of all calls so far

 private:
  std::string compare(const std::string& what);

  const int rank_, world_;
  Membership* const group_;
  const std::chrono::milliseconds timeout_;
  uint64_t number_ = 0, hash_ = 0;
  std::string current_;
  std::set<uint64_t> known_;
  std::atomic<bool> comparing_ = false;  // the thread that makes calls waits for the store
};

}  // namespace gradwire
