#include "collectives/net/joiner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/secret.h"

namespace gradwire {
namespace {

using Op = StoreMessage::Op;
using std::chrono::milliseconds;

// The silence after which a rank that keeps this process waiting is given up.
constexpr milliseconds kSilence{3000};
constexpr milliseconds kRequestAgain{50};
// How long a group may take to publish its new location if all its ranks are gone or have another secret.
constexpr milliseconds kNobody{3000};

struct Found {
  std::string secret;
  std::vector<std::string> contacts;
};

Found parse_invitation(const std::string& text) {
  Found invitation;
  std::istringstream lines(text);
  std::getline(lines, invitation.secret);
  if (invitation.secret == "-") invitation.secret.clear();
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) invitation.contacts.push_back(line);
  }
  return invitation;
}

class JoinAttempt {
 public:
  explicit JoinAttempt(const JoinRequest& request)
      : request_(request), secret_(request.secret.empty() ? secret_from_environment() : request.secret) {}

  Admitted admit() {
    const auto start = SteadyClock::now();
    give_up_at_ = start + request_.patience;
    until_ = request_.longest.count() > 0 ? start + request_.longest : SteadyClock::time_point::max();
    auto nobody_since = SteadyClock::now();
    while (true) {
      const Found invitation = parse_invitation(request_.invitation());
      // The list is removed when the run ends.
      bool somebody = invitation.contacts.empty() && !seen_;
      seen_ = seen_ || !invitation.contacts.empty();
      if (invitation.contacts.empty())
        why_ = seen_ ? "its ranks have gone" : "no rank has published its contact yet";
      for (const std::string& contact : invitation.contacts) {
        std::string next = contact;
        // A rank may redirect this process to a rank that is gone by now.
        for (int hops = 0; hops < 2 && !next.empty(); ++hops) {
          const std::string at = std::exchange(next, "");
          if (auto admitted = ask(at, secret_ + invitation.secret, next)) return std::move(*admitted);
          somebody = somebody || answered_;
        }
      }
      const auto now = SteadyClock::now();
      if (somebody) {
        nobody_since = now;
        other_secret_ = false;
      }
      if (now - nobody_since >= kNobody || now >= give_up_at_) {
        throw NoRankAnswers(fmt::format(
            "no rank admits this process: {}; {}", other_secret_ ? kOtherSecret : why_,
            other_secret_ ? "give it the run's GRADWIRE_SECRET"
                          : "has the run ended? If it goes on elsewhere, take the newest list of its ranks"));
      }
      std::this_thread::sleep_for(kRequestAgain);
    }
  }

 private:
  // Sends a join request to one rank and waits for as long as it says so. Returns nullopt if the rank cannot
  // admit this process; `next` is the contact that it redirects to, if any.
  std::optional<Admitted> ask(const std::string& contact, const std::string& key, std::string& next) {
    const Contact theirs = Contact::parse(contact).value_or(Contact());
    auto soon = [] { return SteadyClock::now() + Quorum::kPatience; };
    answered_ = false;
    Reach reached = reach(theirs, {key, Quorum::purpose_of(theirs.name)}, {.deadline = soon()});
    if (!reached.socket) {
      why_ = reached.why.empty() ? "its list of ranks cannot be read" : reached.why;
      other_secret_ = other_secret_ || reached.other_secret;
      // Both are final for this process, but another rank of the group may soon listen there.
      answered_ = !reached.gone;
      return std::nullopt;
    }
    Socket socket = std::move(*reached.socket);
    const std::string at = Endpoint{socket.peer_address(), theirs.port}.text();
    answered_ = true;
    // Listens like that rank: at one address, or at all addresses.
    std::string address = theirs.addresses.size() > 1 ? "" : socket.local_address();
    if (!request_.interface.empty()) address = address_of_interface(request_.interface);
    if (!quorum_ || quorum_->key() != key || address != address_) {
      quorum_ = nullptr;  // frees the port, which may be the only one
      quorum_ = std::make_shared<Quorum>(address, key, request_.ports);
      address_ = address;
    }
    const std::string hello = quorum_->contact() + "\n" + request_.about;
    if (!send_all(socket, StoreMessage{Op::hello, 0, Quorum::kRequest, hello}.encode(), soon())) {
      return std::nullopt;
    }
    std::string bytes;
    while (true) {
      const auto message = receive_message(socket, bytes, SteadyClock::now() + kSilence);
      why_ = fmt::format("{} does not answer any more", at);
      if (!message) return std::nullopt;
      give_up_at_ = SteadyClock::now() + request_.patience;
      if (message->key == Quorum::kWait && SteadyClock::now() >= until_) {
        throw NoRankAnswers(fmt::format("{} keeps this process waiting and has not admitted it after {} ms",
                                        at, request_.longest.count()));
      }
      if (message->op == Op::refuse && message->key == Quorum::kElsewhere) {
        why_ = fmt::format("{} leaves it to {}", at, message->value);
        next = message->value;
        return std::nullopt;
      }
      if (message->op == Op::refuse) {
        throw BadInput(fmt::format("{} does not let this process join: {}", at, message->value));
      }
      if (message->key == Quorum::kCome) {
        send_all(socket, StoreMessage{Op::hello, 0, Quorum::kCome, ""}.encode(), soon());
      }
      if (message->key == Quorum::kJoin) return understand(message->value, std::move(socket));
    }
  }

  Admitted understand(const std::string& text, Socket host) {
    std::istringstream lines(text);
    Admitted admitted{.quorum = quorum_, .host = std::move(host)};
    int number = 0;
    lines >> admitted.rank >> admitted.world >> number >> admitted.name;
    lines.ignore();  // skip the line's end
    admitted.location.assign(std::istreambuf_iterator<char>(lines), {});
    if (admitted.rank < 1 || admitted.rank >= admitted.world || admitted.name.empty()) {
      throw CommError("what this process was told of the group it joins cannot be read");
    }
    quorum_->begin(number, admitted.name);
    return admitted;
  }

  const RunningClock::Watch watch_;
  const JoinRequest& request_;
  const std::string secret_;
  std::shared_ptr<Quorum> quorum_;
  std::string address_, why_;
  bool seen_ = false;          // a list of ranks has been published
  bool other_secret_ = false;  // a rank has, and no rank has answered since
  bool answered_ = false;      // the rank asked last may admit this process, now or later
  SteadyClock::time_point give_up_at_, until_;
};

}  // namespace

std::string invitation_text(const std::string& secret, const std::string& contacts) {
  return (secret.empty() ? "-" : secret) + "\n" + contacts;
}

Admitted request_admission(const JoinRequest& request) {
  return JoinAttempt(request).admit();
}

void say_joined(const Admitted& admitted) {
  send_all(admitted.host, StoreMessage{Op::hello, 0, Quorum::kHere, ""}.encode(),
           SteadyClock::now() + Quorum::kPatience);
}

std::string admission_text(int rank, int world, int number, const std::string& name,
                           const std::string& location) {
  return fmt::format("{} {} {} {}\n{}", rank, world, number, name, location);
}

}  // namespace gradwire
