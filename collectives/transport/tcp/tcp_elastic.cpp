#include "collectives/transport/tcp/tcp_elastic.h"

#include <algorithm>

#include "collectives/net/handshake.h"
#include "collectives/net/membership.h"
#include "collectives/transport/tcp/tcp_transport.h"
#include "collectives/transport/transport.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// How long survivors wait for each other to form a group before they start a new quorum, and how long ranks
// wait for joiners, which have just answered.
constexpr milliseconds kFormAgain{5000}, kFormWithJoiners{3000};

constexpr const char* kAdmitting = "admitting new ranks";

}  // namespace

void TcpElastic::listen(const std::string& address) {
  address_ = address;
  if (options_.shrinkable && !quorum_) {
    quorum_ = std::make_shared<Quorum>(address_, group_.key(), group_.options().ports);
  }
}

void TcpElastic::add_contact(const std::string& contact) {
  contacts_.push_back(contact);
  if (quorum_) require_contact(group_.rank(), static_cast<int>(contacts_.size()) - 1, contact);
}

void TcpElastic::reached_by(const TcpLinks& links) {
  for (int r = 0; quorum_ && r < group_.world(); ++r) {
    if (r != group_.rank()) quorum_->reached_at(contacts_[static_cast<size_t>(r)], links.address_of(r));
  }
}

void TcpElastic::enter() {
  if (!quorum_) return;
  entered_ = true;
  quorum_->enter(
      group_.rank(), std::move(contacts_), [this](const std::string& why) { failure_.record(why); },
      [this](const std::string& line) { return failure_.recorded().empty() && group_.store().note(line); });
}

void TcpElastic::leave() {
  if (quorum_ && entered_) quorum_->leave();
}

std::unique_ptr<Transport> TcpElastic::regroup(milliseconds timeout, std::vector<int>& survivors) {
  require_regroupable(options_.shrinkable, quorum_ != nullptr);
  if (failure_.recorded().empty()) failure_.abort("the group continues with the ranks that are left");
  auto made = regroup_survivors(*quorum_, options_.group, address_, timeout, survivors,
                                [this](const GroupOptions& group, const std::vector<int>&) {
                                  TcpOptions options = options_;
                                  options.group = group;
                                  auto next = std::make_unique<TcpTransport>(options, quorum_);
                                  next->set_joining(options_.group.joining);
                                  return next;
                                });
  quorum_ = nullptr;
  return made;
}

void TcpElastic::require_quorum() const {
  if (!quorum_) {
    throw BadInput("the group was not created to admit new ranks; set gw_comm_options.shrinkable");
  }
}

void TcpElastic::open_admission(int most, std::function<std::string(const std::string&)> validate) {
  require_quorum();
  quorum_->admission().open(most, std::move(validate));
}

void TcpElastic::close_admission() {
  if (quorum_) quorum_->admission().close();
}

std::string TcpElastic::invitation() const {
  if (!quorum_) return "";
  const std::string& given = options_.group.secret;
  const size_t known = given.empty() ? secret_from_environment().size() : given.size();
  return invitation_text(quorum_->key().substr(known), quorum_->contacts());
}

// Returns the grown group, or null if it has not formed. Rank 0 invites the joiners and notifies the other
// ranks through this group's store. All ranks form the new group while the old group exists. The new group
// replaces the old group if every rank has formed the new group.
std::unique_ptr<Transport> TcpElastic::grow() {
  require_quorum();
  const std::string key = fmt::format("grow/{}", growths_++);
  failure_.set_activity(kAdmitting);
  try {
    Joiners joiners;
    Quorum::NextGroup next = begin_growth(key, joiners);
    std::unique_ptr<TcpTransport> made;
    if (!next.name.empty()) made = form(next, joiners, key);
    failure_.set_activity("not in a collective; the last admitted new ranks");
    return made;
  } catch (const CommError& error) {
    failure_.give_up(kAdmitting, error.what());
  }
}

// Returns the group to form; the group has no name if there are no joiners. `joiners` gets rank 0's
// connections to the joiners.
Quorum::NextGroup TcpElastic::begin_growth(const std::string& key, Joiners& joiners) {
  if (group_.rank() != 0) {
    const std::string text = group_.store().get(key, SteadyClock::now() + group_.timeout(),
                                                "waiting for rank 0 to admit new ranks");
    return text.empty() ? Quorum::NextGroup()
                        : Quorum::NextGroup::decode(text, group_.rank(), group_.world());
  }
  joiners = quorum_->admission().invite();
  if (!joiners.empty()) return quorum_->grown_by(joiners);
  group_.store().set(key, "");
  return {};
}

// Runs this rank's part of forming the grown group. Returns null if some rank has not formed the grown group.
std::unique_ptr<TcpTransport> TcpElastic::form(Quorum::NextGroup& next, const Joiners& joiners,
                                               const std::string& key) {
  std::unique_ptr<TcpTransport> made;
  try {
    made = std::make_unique<TcpTransport>(grown_options(next, joiners, key), quorum_, false);
    made->set_joining(options_.group.joining);
  } catch (const std::exception& error) {
    // A joiner died, or the system refused a resource. formed_everywhere() detects a dead rank of this group.
    if (group_.rank() == 0) {
      print_error_line(fmt::format("no new rank has joined; the group continues: {}", text_of(error)));
    }
    if (group_.rank() == 0 && next.location.empty()) {  // rank 0 has not published the group yet
      group_.store().set(key, "");
      return nullptr;
    }
  }
  if (!formed_everywhere(key, made != nullptr)) return nullptr;
  quorum_->grow(next);
  made->enter_quorum();
  quorum_ = nullptr;
  return made;
}

TcpOptions TcpElastic::grown_options(Quorum::NextGroup& next, const Joiners& joiners,
                                     const std::string& key) {
  TcpOptions options = options_;
  options.group.rendezvous = "a group that takes new ranks";
  options.group.world = group_.world() + static_cast<int>(next.joined.size());
  options.group.job = next.name;  // joiners may come from another job of the launcher
  options.group.joining = std::min(options_.group.join_timeout(), kFormWithJoiners);
  const auto publish = [this, &next, &joiners, key](const std::string& location) {
    next.location = location;
    group_.store().set(key, next.encode());
    admit(joiners, next, group_.world(), quorum_->number() + 1);
  };
  options.group.callbacks =
      RendezvousCallbacks{.address = address_, .publish = publish, .read = [&next] { return next.location; }};
  for (const auto& joiner : joiners) options.group.callbacks->invited.push_back(joiner.socket.fd());
  return options;
}

// Returns whether all ranks of this group have formed the new group. Collective.
bool TcpElastic::formed_everywhere(const std::string& key, bool here) {
  group_.store().set(fmt::format("{}/{}", key, group_.rank()), here ? "yes" : "no");
  const auto deadline = SteadyClock::now() + 2 * kFormAgain;
  bool all = true;
  for (int r = 0; r < group_.world(); ++r) {
    const std::string formed =
        group_.store().get(fmt::format("{}/{}", key, r), deadline,
                           fmt::format("waiting for rank {} to form a group with new ranks", r));
    all = all && formed == "yes";
  }
  return all;
}

}  // namespace gradwire
