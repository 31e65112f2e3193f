#include "collectives/transport/tcp/tcp.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "collectives/net/membership.h"
#include "collectives/net/socket.h"
#include "collectives/transport/tcp/tcp_transport.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {

TcpTransport::TcpTransport(const TcpOptions& options, std::shared_ptr<Quorum> quorum, bool enters)
    : Transport("tcp",
                {options.group.rank, options.group.world, Device::host(), true, options.group.timeout}),
      options_(options),
      exchanges_(rank(), world(), options.group.timeout, failure_, waits_),
      elastic_(options_, std::move(quorum), group_, failure_),
      group_(options.group) {
  options_.group.callbacks.reset();  // the group of the callbacks may end before this group
  const auto deadline = SteadyClock::now() + options.group.join_timeout();
  group_.store().watch([this](const std::string& cause) { failure_.record(cause); },
                       [this] { return failure_.activity(); });
  try {
    connect(deadline);
    group_.barrier();
  } catch (const Error& error) {
    failure_.give_up("joining", error.what());
  } catch (const std::bad_alloc&) {  // the other ranks must not wait for this rank
    failure_.abort("out of host memory");
    throw;
  }
  if (enters) elastic_.enter();
  failure_.set_activity("not in a collective yet");
}

// Announces an orderly departure before closing the connections.
TcpTransport::~TcpTransport() {
  elastic_.leave();
  group_.leave();
}

void TcpTransport::connect(SteadyClock::time_point deadline) {
  address_ = group_.listening_address(deadline);
  const bool verified = environment_flag("GRADWIRE_VERIFY_PAYLOAD");
  TcpLinks& links = exchanges_.use(std::make_unique<TcpLinks>(
      rank(), world(), address_, group_.key(), verified, group_.options().ports, options_.link));
  elastic_.listen(address_);
  std::vector<std::string> contacts = exchange_contacts(links, deadline);
  if (rank() > 0) contacts.front() = with_address(contacts.front(), group_.store().peer_address());
  links.connect(contacts, deadline, [this](const std::string& line) { group_.store().note(line); });
  elastic_.reached_by(links);
}

// Publishes the contacts of this rank's links and quorum. Returns the contacts of all ranks' links.
std::vector<std::string> TcpTransport::exchange_contacts(const TcpLinks& links,
                                                         SteadyClock::time_point deadline) {
  Message mine;
  mine.add("links", links.contact()).add("quorum", elastic_.contact());
  group_.store().set(fmt::format("link/{}", rank()), mine.encode());
  std::vector<std::string> contacts;
  for (int r = 0; r < world(); ++r) {
    const auto theirs = Message::decode(group_.store().get(fmt::format("link/{}", r), deadline,
                                                           fmt::format("waiting for rank {} to join", r)));
    contacts.push_back(theirs.text("links"));
    elastic_.add_contact(theirs.text("quorum"));
  }
  return contacts;
}

void TcpTransport::begin_call(const Stream& stream, const Call& call) {
  if (world() == 1) return;
  stream.submit([this, &call] { exchanges_.begin_call(call); });
}

void TcpTransport::exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                            const ExchangeLabel& label) {
  if (transfers.empty()) return;
  stream.submit([this, &transfers, &label] {
    exchanges_.post(transfers, label);
    count_sent(exchanges_.await_oldest());
  });
}

void TcpTransport::begin_exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                                  const ExchangeLabel& label) {
  stream.submit([this, &transfers, &label] {
    exchanges_.post(transfers, label);
    exchanges_.hand_over();
  });
}

void TcpTransport::end_exchange(const Stream& stream) {
  stream.submit([this] { count_sent(exchanges_.await_oldest()); });
}

void TcpTransport::barrier() {
  failure_.set_activity("at a barrier");
  try {
    group_.barrier();
  } catch (const CommError& error) {
    failure_.give_up("at a barrier", error.what());
  }
  failure_.set_activity("not in a collective; its last was a barrier");
}

// Returns the group of `members`. The first member notifies the other members through this group's store,
// which has authenticated them.
std::unique_ptr<Transport> TcpTransport::split(const std::vector<int>& members) {
  const int number = splits_++;
  if (members.empty()) return nullptr;
  const std::string key = fmt::format("split/{}/{}", number, members.front());
  const auto me = std::find(members.begin(), members.end(), rank());
  const auto publish = [this, key](const std::string& location) { group_.store().set(key, location); };
  const auto read = [this, key, leader = members.front()] {
    return group_.store().get(key, SteadyClock::now() + options_.group.join_timeout(),
                              fmt::format("rank {}, waiting for rank {} to split the group", rank(), leader));
  };
  TcpOptions options = options_;
  options.link = exchanges_.emulated();  // so that all groups change their rate at one time
  options.group.rendezvous = fmt::format("a split of {}", options_.group.rendezvous);
  options.group.callbacks = RendezvousCallbacks{.address = address_, .publish = publish, .read = read};
  options.group.rank = static_cast<int>(me - members.begin());
  options.group.world = static_cast<int>(members.size());
  return make_tcp_transport(options);
}

void TcpTransport::send_message(const std::string& message) {
  try {
    group_.send_message(message);
  } catch (const CommError& error) {
    failure_.give_up("reporting to rank 0", error.what());
  }
}

std::string TcpTransport::take_message(int from) {
  try {
    return group_.take_message(from);
  } catch (const CommError& error) {
    failure_.give_up(fmt::format("waiting for rank {}'s report", from), error.what());
  }
}

std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options) {
  return std::make_unique<TcpTransport>(options);
}

std::unique_ptr<Transport> join_tcp_transport(const TcpOptions& asked, const TcpJoinOptions& join) {
  TcpOptions options = asked;
  read_listening(options.group);
  const Admitted admitted = request_admission({.invitation = join.invitation,
                                               .secret = options.group.secret,
                                               .about = join.about,
                                               .interface = options.group.interface,
                                               .ports = options.group.ports,
                                               .patience = options.group.join_timeout(),
                                               .longest = join.longest});
  options.shrinkable = true;
  options.group.rendezvous = "a group that takes new ranks";
  options.group.rank = admitted.rank;
  options.group.world = admitted.world;
  options.group.job = admitted.name;
  options.group.callbacks = RendezvousCallbacks{.address = admitted.quorum->address(),
                                                .publish = nullptr,
                                                .read = [&] { return admitted.location; },
                                                .invited = {},
                                                .given_up = [&] { return admitted.host.hung_up(); }};
  auto joined = std::make_unique<TcpTransport>(options, admitted.quorum);
  say_joined(admitted);
  return joined;
}

}  // namespace gradwire

namespace gradwire::tcp_messages {

void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer) {
  if (mine.agrees_with(theirs)) return;
  if (theirs.magic != CallHeader::kMagic) {
    throw Mismatch("the message from rank {} is not a Gradwire header: it is corrupted", peer);
  }
  auto call = [](int r, const CallHeader& h) {
    return fmt::format("rank {} makes call {}, {}", r, h.sequence, h.text());
  };
  bool alike = mine.sequence == theirs.sequence && mine.text() == theirs.text();
  throw Mismatch("ranks disagree: {}; {}{}", call(rank, mine), call(peer, theirs),
                 alike ? "; this call or an earlier one differs in something else" : "");
}

}  // namespace gradwire::tcp_messages

namespace gradwire {

namespace {

constexpr const char* kWaiting = ", waiting for rank ";

}  // namespace

void TcpFailure::set_activity(std::string activity) {
  std::lock_guard lock(mutex_);
  activity_ = std::move(activity);
}

std::string TcpFailure::activity() {
  const int peer = waiting_for_.load();
  std::lock_guard lock(mutex_);
  return peer < 0 ? activity_ : fmt::format("{}{}{}", activity_, kWaiting, peer);
}

void TcpFailure::on_failure(std::function<void()> interrupt) {
  std::lock_guard lock(mutex_);
  interrupt_ = std::move(interrupt);
  if (!failure_.empty()) throw CommError(failure_);
}

void TcpFailure::record(const std::string& cause) {
  std::lock_guard lock(mutex_);
  if (interrupt_) interrupt_();  // first, because the copy may be refused memory
  if (failure_.empty()) failure_ = cause;
}

std::string TcpFailure::recorded() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void TcpFailure::throw_if_failed() {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw CommError("rank {}: {}", group_.rank(), failure_);
}

void TcpFailure::abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!final_error_.empty()) return;  // the group has been notified
  }
  const std::string cause = fmt::format("rank {} gave up: {}", group_.rank(), reason);
  group_.store().report(cause);
  record(cause);
}

void TcpFailure::give_up(const std::string& doing, const std::string& cause) {
  std::string text = fmt::format("rank {}: {}: ", group_.rank(), doing);
  const int waited_for = waiting_for_.load();
  {
    std::lock_guard lock(mutex_);
    if (!final_error_.empty()) throw CommError(text + "the group has failed: " + final_error_);
  }
  text += cause;
  const std::optional<std::string> first = group_.store().report(text);
  record(first.value_or(text));
  if (!first) {
    text += "; no answer from rank 0, which runs the store";
  } else {
    if (*first != text && cause.find(*first) == std::string::npos) text += "; the first to fail: " + *first;
    text += activities_of_others(waited_for);
  }
  std::lock_guard lock(mutex_);
  final_error_ = text;
  throw CommError(text);
}

// Returns "; gone: rank 2; rank 3 is in call 17, ..., waiting for rank 1; ...": first the ranks that do not
// answer, then the chain of waits from this rank to the rank that caused the failure, then other ranks.
std::string TcpFailure::activities_of_others(int waited_for) {
  const RollCall roll = group_.store().roll_call();
  std::string text = roll.absent();
  if (!text.empty()) text = "; " + text;
  const int world = static_cast<int>(roll.ranks.size());
  std::set<int> listed = {group_.rank()};
  auto list = [&](int r) {
    const std::string& state = roll.ranks[r].state;
    if (roll.ranks[r].presence != RollCall::Presence::here || state.empty() || !listed.insert(r).second) {
      return false;
    }
    text += fmt::format("; rank {} is {}", r, state);
    return true;
  };
  for (int r = waited_for; r >= 0 && r < world && listed.size() < 6 && list(r);) {
    const std::string& state = roll.ranks[r].state;
    const size_t at = state.rfind(kWaiting);
    if (at == std::string::npos) break;
    r = parse_number<int>(state.substr(at + std::strlen(kWaiting))).value_or(-1);
  }
  for (int r = 0; r < world && listed.size() < 5; ++r) list(r);
  return text;
}

}  // namespace gradwire
