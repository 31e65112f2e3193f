#include "collectives/net/admission_queue.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <utility>

#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {
namespace {

using Op = Frame::Op;

constexpr std::chrono::milliseconds kNotifyEvery{1000}, kInvitation{1000};
constexpr const char* kEnded = "the run has ended or no longer admits ranks";

// Sends a frame to a joiner without waiting. The connection's buffer has room unless the joiner has not read
// from the connection for hours.
bool notify(const Socket& socket, Op op, const std::string& value = "") {
  const std::string bytes = Frame{op, 0, "", value}.encode();
  return send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

void AdmissionQueue::open(int most, std::function<std::string(const std::string&)> validate) {
  std::lock_guard lock(mutex_);
  most_ = most;
  validate_ = std::move(validate);
}

void AdmissionQueue::close() {
  std::lock_guard lock(mutex_);
  validate_ = [](const std::string&) { return kEnded; };
  for (const Joiner& joiner : waiting_) notify(joiner.socket, Op::rejected, kEnded);
  waiting_.clear();
  count_ = 0;
}

void AdmissionQueue::request(Socket socket, const Message& request, int ranks) {
  const std::string &contact = request.text("contact"), &about = request.text("about");
  std::lock_guard lock(mutex_);
  const size_t waiting = waiting_.size();
  std::string why;
  if (!validate_) {
    why = "this group takes no new ranks";
  } else if (ranks + static_cast<int>(waiting) >= most_) {
    why = fmt::format("there are {} ranks{}, and at most {} are allowed", ranks,
                      waiting == 0 ? "" : fmt::format(" and {} more that wait to join", waiting), most_);
  } else {
    why = validate_(about);
  }
  if (why.empty()) {
    waiting_.push_back({contact, std::move(socket)});
    ++count_;
    return;
  }
  const std::string from = socket.peer_address();
  print_error_line(
      fmt::format("a process at {} cannot join: {}", from.empty() ? "an unknown address" : from, why));
  notify(socket, Op::rejected, why);
}

void AdmissionQueue::redirect(const Socket& socket, const std::string& contact) {
  notify(socket, Op::redirect, contact);
}

void AdmissionQueue::add_entries(std::vector<pollfd>& entries) const {
  std::lock_guard lock(mutex_);
  for (const Joiner& joiner : waiting_) entries.push_back({joiner.socket.fd(), POLLRDHUP, 0});
}

void AdmissionQueue::update() {
  std::lock_guard lock(mutex_);
  const auto now = SteadyClock::now();
  const bool notifies = now - notified_at_ >= kNotifyEvery;
  if (notifies) notified_at_ = now;
  std::erase_if(waiting_, [&](const Joiner& joiner) {
    return joiner.socket.hung_up() || (notifies && !notify(joiner.socket, Op::wait));
  });
  count_ = static_cast<int>(waiting_.size());
}

std::vector<AdmissionQueue::Joiner> AdmissionQueue::invite() {
  std::vector<Joiner> asked, present;
  {
    std::lock_guard lock(mutex_);
    asked = std::exchange(waiting_, {});
    count_ = 0;
  }
  std::erase_if(asked, [](const Joiner& joiner) { return !notify(joiner.socket, Op::check); });
  const auto deadline = SteadyClock::now() + kInvitation;
  for (Joiner& joiner : asked) {
    std::string bytes;
    try {
      const auto reply = receive_frame(joiner.socket, bytes, deadline);
      if (reply && reply->op == Op::present) present.push_back(std::move(joiner));
    } catch (const CommError&) {  // the peer is not a joiner
    }
  }
  return present;
}

}  // namespace gradwire
