#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_call_sequence.h"

#include <sstream>

#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {

std::string NcclCallSequence::begin(const Call& call) {
  ++number_;
  hash_ = mix(hash_, call.hash);
  current_ = call.what;
  if (group_ == nullptr) return "";
  return known_.insert(call.hash).second ? compare(call.what) : "";
}

std::string NcclCallSequence::in_this_call(const std::string& what) const {
  return number_ == 0 ? what : fmt::format("call {}, {}", number_, what);
}

std::string NcclCallSequence::compare(const std::string& what) {
  struct Comparing {
    explicit Comparing(std::atomic<bool>& flag) : flag(flag) { flag = true; }
    ~Comparing() { flag = false; }
    std::atomic<bool>& flag;
  } comparing(comparing_);
  const std::string mine = fmt::format("{} {}", hash_, what);
  StoreClient& store = group_->store();
  const int previous = (rank_ + world_ - 1) % world_;
  std::string theirs;
  try {
    store.set(fmt::format("call/{}", number_), fmt::format("{} {} {}", hash_, rank_, what));
    store.set(fmt::format("call/{}/{}", number_, rank_), mine);
    theirs = store.get(fmt::format("call/{}/{}", number_, previous), SteadyClock::now() + timeout_,
                       fmt::format("waiting for rank {} to make this call", previous));
  } catch (const CommError& error) {
    return error.what();
  }
  if (theirs == mine) return "";
  const std::string their_call = theirs.substr(theirs.find(' ') + 1);
  return fmt::format("ranks disagree: rank {} makes call {}, {}{}", previous, number_, their_call,
                     their_call == what ? "; this call or an earlier one differs in something else" : "");
}

std::string NcclCallSequence::other_call(const WatchedExchange& stalled) const {
  if (comparing_ || group_ == nullptr) return "";
  try {
    std::istringstream found(group_->store().look(fmt::format("call/{}", stalled.call)));
    uint64_t hash = 0;
    int rank = 0;
    std::string what;
    if (!(found >> hash >> rank >> std::ws && std::getline(found, what)) || hash == stalled.calls_hash)
      return "";
    return fmt::format("{}: ranks disagree: rank {} makes call {}, {}", stalled.what, rank, stalled.call,
                       what);
  } catch (const CommError&) {
    return "";
  }
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
