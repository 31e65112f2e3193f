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
constexpr milliseconds kKnockAgain{50};
// How long a group may take to publish its new location if all its ranks are gone or have another secret.
constexpr milliseconds kNobody{3000};

struct Found {
  std::string secret;
  std::vector<std::string> contacts;
};

Found parse_doors(const std::string& text) {
  Found doors;
  std::istringstream lines(text);
  std::getline(lines, doors.secret);
  if (doors.secret == "-") doors.secret.clear();
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) doors.contacts.push_back(line);
  }
  return doors;
}

class Newcomer {
 public:
  explicit Newcomer(const Knock& request)
      : request_(request), secret_(request.secret.empty() ? secret_from_environment() : request.secret) {}

  Invitation let_in() {
    const auto start = SteadyClock::now();
    give_up_at_ = start + request_.patience;
    until_ = request_.longest.count() > 0 ? start + request_.longest : SteadyClock::time_point::max();
    auto nobody_since = SteadyClock::now();
    while (true) {
      const Found doors = parse_doors(request_.doors());
      // The list is removed when the run ends.
      bool somebody = doors.contacts.empty() && !seen_;
      seen_ = seen_ || !doors.contacts.empty();
      if (doors.contacts.empty())
        why_ = seen_ ? "its ranks have gone" : "nobody has said yet where its ranks are";
      for (const std::string& contact : doors.contacts) {
        std::string next = contact;
        // A rank may redirect this process to a rank that is gone by now.
        for (int hops = 0; hops < 2 && !next.empty(); ++hops) {
          const std::string at = std::exchange(next, "");
          if (auto invitation = ask(at, secret_ + doors.secret, next)) return std::move(*invitation);
          somebody = somebody || answered_;
        }
      }
      const auto now = SteadyClock::now();
      if (somebody) {
        nobody_since = now;
        other_secret_ = false;
      }
      if (now - nobody_since >= kNobody || now >= give_up_at_) {
        throw NobodyAnswers(fmt::format(
            "no rank lets this process in: {}; {}", other_secret_ ? kOtherSecret : why_,
            other_secret_ ? "give it the run's GRADWIRE_SECRET"
                          : "has the run ended? If it goes on elsewhere, take the newest list of its ranks"));
      }
      std::this_thread::sleep_for(kKnockAgain);
    }
  }

 private:
  // Sends a join request to one rank and waits for as long as it says so. Returns nullopt if the rank cannot
  // admit this process; `next` is the contact that it redirects to, if any.
  std::optional<Invitation> ask(const std::string& contact, const std::string& key, std::string& next) {
    const Contact theirs = Contact::parse(contact).value_or(Contact());
    auto soon = [] { return SteadyClock::now() + Reunion::kPatience; };
    answered_ = false;
    Reach reached = reach(theirs, {key, Reunion::purpose_of(theirs.name)}, {.deadline = soon()});
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
    if (!reunion_ || reunion_->key() != key || address != address_) {
      reunion_ = nullptr;  // frees the port, which may be the only one
      reunion_ = std::make_shared<Reunion>(address, key, request_.ports);
      address_ = address;
    }
    const std::string hello = reunion_->contact() + "\n" + request_.about;
    if (!send_all(socket, StoreMessage{Op::hello, 0, Reunion::kKnock, hello}.encode(), soon())) {
      return std::nullopt;
    }
    std::string bytes;
    while (true) {
      const auto message = receive_message(socket, bytes, SteadyClock::now() + kSilence);
      why_ = fmt::format("{} does not answer any more", at);
      if (!message) return std::nullopt;
      give_up_at_ = SteadyClock::now() + request_.patience;
      if (message->key == Reunion::kWait && SteadyClock::now() >= until_) {
        throw NobodyAnswers(fmt::format("{} has this process wait, and has not let it in after {} ms", at,
                                        request_.longest.count()));
      }
      if (message->op == Op::refuse && message->key == Reunion::kElsewhere) {
        why_ = fmt::format("{} leaves it to {}", at, message->value);
        next = message->value;
        return std::nullopt;
      }
      if (message->op == Op::refuse) {
        throw BadInput(fmt::format("{} does not let this process join: {}", at, message->value));
      }
      if (message->key == Reunion::kCome) {
        send_all(socket, StoreMessage{Op::hello, 0, Reunion::kCome, ""}.encode(), soon());
      }
      if (message->key == Reunion::kJoin) return understand(message->value, std::move(socket));
    }
  }

  Invitation understand(const std::string& text, Socket host) {
    std::istringstream lines(text);
    Invitation invitation{.reunion = reunion_, .host = std::move(host)};
    int number = 0;
    lines >> invitation.rank >> invitation.world >> number >> invitation.name;
    lines.ignore();  // skip the line's end
    invitation.meeting.assign(std::istreambuf_iterator<char>(lines), {});
    if (invitation.rank < 1 || invitation.rank >= invitation.world || invitation.name.empty()) {
      throw CommError("what this process was told of the group it joins cannot be read");
    }
    reunion_->begin(number, invitation.name);
    return invitation;
  }

  const RunningClock::Watch watch_;
  const Knock& request_;
  const std::string secret_;
  std::shared_ptr<Reunion> reunion_;
  std::string address_, why_;
  bool seen_ = false;          // a list of ranks has been published
  bool other_secret_ = false;  // a rank has, and no rank has answered since
  bool answered_ = false;      // the rank asked last may admit this process, now or later
  SteadyClock::time_point give_up_at_, until_;
};

}  // namespace

std::string doors_text(const std::string& secret, const std::string& contacts) {
  return (secret.empty() ? "-" : secret) + "\n" + contacts;
}

Invitation knock(const Knock& request) {
  return Newcomer(request).let_in();
}

void say_joined(const Invitation& invitation) {
  send_all(invitation.host, StoreMessage{Op::hello, 0, Reunion::kHere, ""}.encode(),
           SteadyClock::now() + Reunion::kPatience);
}

std::string invitation_text(int rank, int world, int number, const std::string& name,
                            const std::string& meeting) {
  return fmt::format("{} {} {} {}\n{}", rank, world, number, name, meeting);
}

}  // namespace gradwire
