#include "collectives/net/joiner.h"

#include <fmt/format.h>

#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/interfaces.h"
#include "collectives/net/secret.h"

namespace gradwire {
namespace {

using Op = Frame::Op;
using std::chrono::milliseconds;

// Maximal time without a message from the rank that keeps this process waiting.
constexpr milliseconds kSilence{3000};
constexpr milliseconds kRequestAgain{50};
// How long a group may take to publish its new location if all its published ranks are gone or have another
// secret.
constexpr milliseconds kUnpublished{3000};

struct ParsedInvitation {
  std::string secret;
  std::vector<std::string> contacts;
};

ParsedInvitation parse_invitation(const std::string& text) {
  ParsedInvitation invitation;
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

  Admitted request_until_admitted() {
    const auto start = SteadyClock::now();
    give_up_at_ = start + request_.patience;
    until_ = request_.longest.count() > 0 ? start + request_.longest : SteadyClock::time_point::max();
    auto answered_at = start;
    while (true) {
      const ParsedInvitation invitation = parse_invitation(request_.invitation());
      // The group removes the invitation when the run ends.
      bool may_admit = invitation.contacts.empty() && !seen_;
      seen_ = seen_ || !invitation.contacts.empty();
      if (invitation.contacts.empty())
        why_ = seen_ ? "its ranks have gone" : "no rank has published its contact yet";
      for (const std::string& contact : invitation.contacts) {
        std::string next = contact;
        // A rank may redirect this process to a rank that has ended meanwhile.
        for (int hops = 0; hops < 2 && !next.empty(); ++hops) {
          const std::string at = std::exchange(next, "");
          if (auto admitted = ask(at, secret_ + invitation.secret, next)) return std::move(*admitted);
          may_admit = may_admit || may_admit_;
        }
      }
      const auto now = SteadyClock::now();
      if (may_admit) answered_at = now;
      if (now - answered_at >= kUnpublished || now >= give_up_at_) {
        throw NoRankAnswers(
            fmt::format("no rank admits this process: {}; {}", other_secret_ ? kOtherSecret : why_,
                        other_secret_ ? "give it the run's GRADWIRE_SECRET"
                                      : "if the run continues elsewhere, use its newest list of ranks"));
      }
      std::this_thread::sleep_for(kRequestAgain);
    }
  }

 private:
  static SteadyClock::time_point patience_end() { return SteadyClock::now() + Quorum::kPatience; }

  // Sends a join request to the rank at `contact` and waits as long as the rank sends wait messages. Returns
  // nullopt if the rank cannot admit this process; `next` is then the contact to which the rank redirects, if
  // any.
  std::optional<Admitted> ask(const std::string& contact, const std::string& key, std::string& next) {
    const Contact theirs = Contact::parse(contact).value_or(Contact());
    Reach reached = reach(theirs, {key, Quorum::purpose_of(theirs.name)}, {.deadline = patience_end()});
    if (!reached.socket) {
      why_ = reached.why.empty() ? "its list of ranks cannot be read" : reached.why;
      other_secret_ = other_secret_ || reached.other_secret;
      // A rank that is gone or has another secret cannot admit this process, but another rank of the group
      // may soon listen there.
      may_admit_ = !reached.gone;
      return std::nullopt;
    }
    Socket socket = std::move(*reached.socket);
    may_admit_ = true;
    other_secret_ = false;
    listen_like(theirs, socket, key);
    Message hello;
    hello.add("contact", quorum_->contact()).add("about", request_.about);
    if (!send_frame(socket, {Op::request, 0, "", hello.encode()}, patience_end())) return std::nullopt;
    const std::string at = Endpoint{socket.peer_address(), theirs.port}.text();
    return wait_at(at, std::move(socket), next);
  }

  // Starts a quorum that listens like the rank at the other end of `socket`: at one address, or at all
  // addresses.
  void listen_like(const Contact& theirs, const Socket& socket, const std::string& key) {
    std::string address = theirs.addresses.size() > 1 ? "" : socket.local_address();
    if (!request_.interface.empty()) address = address_of_interface(request_.interface);
    if (quorum_ && quorum_->key() == key && quorum_->address() == address) return;
    quorum_ = nullptr;  // frees the port, which may be the only free port
    quorum_ = std::make_shared<Quorum>(address, key, request_.ports);
  }

  // Waits for the answer to the request that was sent to the rank `at`.
  std::optional<Admitted> wait_at(const std::string& at, Socket socket, std::string& next) {
    std::string bytes;
    while (true) {
      const auto frame = receive_frame(socket, bytes, SteadyClock::now() + kSilence);
      why_ = fmt::format("{} has stopped answering", at);
      if (!frame) return std::nullopt;
      give_up_at_ = SteadyClock::now() + request_.patience;
      switch (frame->op) {
        case Op::wait:
          if (SteadyClock::now() < until_) break;
          throw NoRankAnswers(fmt::format("{} keeps this process waiting and has not admitted it after {} ms",
                                          at, request_.longest.count()));
        case Op::redirect:
          why_ = fmt::format("{} redirects to {}", at, frame->value);
          next = frame->value;
          return std::nullopt;
        case Op::rejected:
          throw BadInput(fmt::format("{} does not let this process join: {}", at, frame->value));
        case Op::check:
          send_frame(socket, {Op::present, 0, "", ""}, patience_end());
          break;
        case Op::admitted: {
          Admitted admitted = Admitted::decode(frame->value);
          quorum_->begin(admitted.number, admitted.name);
          admitted.quorum = quorum_;
          admitted.host = std::move(socket);
          return admitted;
        }
        default:
          break;
      }
    }
  }

  const RunningClock::Watch watch_;
  const JoinRequest& request_;
  const std::string secret_;
  std::shared_ptr<Quorum> quorum_;
  std::string why_;
  bool seen_ = false;          // a rank's contact has been published
  bool other_secret_ = false;  // a rank has another secret, and no rank has answered since
  bool may_admit_ = false;     // the latest asked rank may admit this process, now or later
  SteadyClock::time_point give_up_at_, until_;
};

}  // namespace

std::string invitation_text(const std::string& secret, const std::string& contacts) {
  return (secret.empty() ? "-" : secret) + "\n" + contacts;
}

std::string Admitted::encode() const {
  Message message;
  message.add("rank", rank).add("world", world).add("number", number).add("name", name);
  return message.add("location", location).encode();
}

Admitted Admitted::decode(const std::string& text) {
  const Message message = Message::decode(text);
  const int world = message.number("world", 2);
  return {.rank = message.number("rank", 1, world - 1),
          .world = world,
          .number = message.number("number", 0),
          .name = message.text("name"),
          .location = message.text("location")};
}

void admit(const std::vector<AdmissionQueue::Joiner>& joiners, const Quorum::NextGroup& next, int world,
           int number) {
  Admitted admitted{.rank = world,
                    .world = world + static_cast<int>(joiners.size()),
                    .number = number,
                    .name = next.name,
                    .location = next.location};
  for (const AdmissionQueue::Joiner& joiner : joiners) {
    send_frame(joiner.socket, {Op::admitted, 0, "", admitted.encode()},
               SteadyClock::now() + Quorum::kPatience);
    ++admitted.rank;
  }
}

Admitted request_admission(const JoinRequest& request) {
  return JoinAttempt(request).request_until_admitted();
}

void say_joined(const Admitted& admitted) {
  send_frame(admitted.host, {Op::joined, 0, "", ""}, SteadyClock::now() + Quorum::kPatience);
}

}  // namespace gradwire
