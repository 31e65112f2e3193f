#include "collectives/net/handshake.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "collectives/net/socket.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

const std::string kGreeting = "gw-rank1";
constexpr size_t kChallenge = 32, kProof = sizeof(Digest);

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  // getrandom() returns requests of up to 256 bytes whole, and without EINTR.
  const bool whole = getrandom(bytes.data(), count, 0) == static_cast<ssize_t>(count);
  require<Error>(whole, "no random numbers from the kernel: {}", std::strerror(errno));
  return bytes;
}

}  // namespace

Handshake::Handshake(const Credentials& credentials, Side side)
    : credentials_(credentials), side_(side), mine_(random_bytes(kChallenge)) {}

Handshake::State Handshake::advance(const Socket& socket) {
  const bool connects = side_ == Side::connector;
  const auto refuse = [&](const char* why) {
    why_ = why;
    return State::refused;
  };
  const auto hung_up = [&] { return refuse(connects ? "it hung up" : "hung up"); };
  // All bytes of the handshake fit into a new connection's buffer.
  const auto sent = [&](const std::string& bytes) {
    return send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  };
  const auto proof = [&](const char* side) {
    // Challenges have a fixed length and come last, so different inputs give different texts.
    const Digest digest =
        hmac_sha256(credentials_.key, fmt::format("{} {} {}{}", side, credentials_.purpose,
                                                  connects ? mine_ : theirs_, connects ? theirs_ : mine_));
    return std::string(digest.begin(), digest.end());
  };
  // Compares in constant time.
  const auto equal = [](const std::string& a, const std::string& b) {
    int difference = 0;
    for (size_t i = 0; i < kProof; ++i) difference |= a[i] ^ b[i];
    return difference == 0;
  };
  if (connects && !std::exchange(greeted_, true) && !sent(kGreeting + mine_)) return hung_up();
  while (true) {
    const size_t wanted =
        connects ? kChallenge + kProof : (theirs_.empty() ? kGreeting.size() + kChallenge : kProof);
    char bytes[kChallenge + kProof];
    const ssize_t n = recv(socket.fd(), bytes, wanted - received_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      return !connects && SteadyClock::now() >= until_ ? refuse(kSaidNothing) : State::waiting;
    }
    if (n <= 0) return hung_up();
    received_.append(bytes, static_cast<size_t>(n));
    const size_t greeted = std::min(received_.size(), kGreeting.size());
    if (!connects && theirs_.empty() && received_.compare(0, greeted, kGreeting, 0, greeted) != 0) {
      return refuse("not a rank of this version");
    }
    if (received_.size() < wanted) continue;
    if (connects) {
      theirs_ = received_.substr(0, kChallenge);
      const bool right = equal(received_.substr(kChallenge), proof("acceptor"));
      // Send the proof even if the acceptor's proof is wrong, so that the acceptor can distinguish a wrong
      // secret from a lost connection.
      const bool answered = sent(proof("connector"));
      if (!right) return refuse(kOtherSecret);
      return answered ? State::proved : hung_up();
    }
    if (!theirs_.empty()) {
      return equal(received_, proof("connector")) ? State::proved : refuse("wrong secret");
    }
    theirs_ = received_.substr(kGreeting.size());
    received_.clear();
    if (!sent(mine_ + proof("acceptor"))) return hung_up();
  }
}

std::string RejectedConnections::note(const std::string& from, const std::string& why) {
  const std::pair who(from, why);
  const bool named = counts_.contains(who) || counts_.size() < kMaxNamed;
  uint64_t& count = named ? counts_[who] : others_;
  if (!std::has_single_bit(++count)) return "";
  std::string text =
      fmt::format("rejected a connection from {}: {}", from.empty() ? "a peer that is gone" : from, why);
  if (!named) {
    text += fmt::format(" ({} so far from more addresses than are named)", count);
  } else if (count > 1) {
    text += fmt::format(" ({} so far)", count);
  }
  return text;
}

namespace {

// Returns whether other users cannot read the file. A file that root owns and that one of this process's
// groups can read is also accepted: Kubernetes mounts secrets in that way with fsGroup.
bool is_private(const struct stat& file) {
  if ((file.st_mode & 077) == 0) return true;
  std::vector<gid_t> groups(static_cast<size_t>(std::max(0, getgroups(0, nullptr))));
  groups.resize(static_cast<size_t>(std::max(0, getgroups(static_cast<int>(groups.size()), groups.data()))));
  groups.push_back(getegid());
  return file.st_uid == 0 && (file.st_mode & 077) == 040 &&
         std::find(groups.begin(), groups.end(), file.st_gid) != groups.end();
}

constexpr size_t kMaxSecretBytes = 4096;

}  // namespace

std::string checked_secret(const std::string& source, std::string text) {
  const auto refuse = [&](const std::string& why) { throw BadInput("{}: {}", source, why); };
  if (text.size() > kMaxSecretBytes)
    refuse(fmt::format("the secret is longer than {} bytes", kMaxSecretBytes));
  if (text.find('\0') != text.npos) refuse("the secret contains a NUL byte; use text, such as base64");
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);  // the byte order mark of some editors
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  if (text.empty()) refuse("the secret is empty or blank; give every rank the same text, or none at all");
  return text;
}

std::string secret_from_environment() {
  const char* direct = environment("GRADWIRE_SECRET");
  const char* path = path_in_environment("GRADWIRE_SECRET_FILE");
  if (direct != nullptr && path != nullptr) {
    throw BadInput("GRADWIRE_SECRET and GRADWIRE_SECRET_FILE are both set; unset one");
  }
  if (direct != nullptr) return checked_secret("GRADWIRE_SECRET", direct);
  if (path == nullptr) return "";
  const std::string source = fmt::format("GRADWIRE_SECRET_FILE {}", path);
  auto refuse = [&](const std::string& why) { throw BadInput("{}: {}", source, why); };
  // The flag O_NONBLOCK opens a FIFO without waiting for a writer. Socket closes any file descriptor.
  const Socket file(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) refuse(std::strerror(errno));
  struct stat status {};
  if (fstat(file.fd(), &status) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) refuse("not a regular file");
  if (!is_private(status)) {
    refuse(fmt::format(
        "other users may read or write it (mode {:03o}); chmod 600 it, have it owned by root with mode 440 "
        "and a group of this process, or give the secret in GRADWIRE_SECRET instead",
        status.st_mode & 0777));
  }
  std::string text(kMaxSecretBytes + 1, '\0');
  const ssize_t n = read(file.fd(), text.data(), text.size());
  if (n < 0) refuse(std::strerror(errno));
  text.resize(static_cast<size_t>(n));
  return checked_secret(source, text);
}

std::string random_secret() {
  std::string text;
  for (const char byte : random_bytes(16)) text += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  return text;
}

namespace {

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

Digest sha256(std::string text) {
  const uint64_t bits = 8 * text.size();
  text += '\x80';
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8);
  for (int i = 56; i >= 0; i -= 8) text += static_cast<char>(bits >> i);
  std::array<uint32_t, 8> state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  for (size_t at = 0; at < text.size(); at += 64) {
    uint32_t w[64] = {};
    for (size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<uint8_t>(text[at + i]);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t added[] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += added[i];
  }
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest hmac_sha256(std::string key, const std::string& message) {
  const auto text = [](const Digest& digest) { return std::string(digest.begin(), digest.end()); };
  if (key.size() > 64) key = text(sha256(key));
  key.resize(64);
  const auto padded = [&](char pad) {
    std::string bytes = key;
    for (char& byte : bytes) byte = static_cast<char>(byte ^ pad);
    return bytes;
  };
  return sha256(padded(0x5c) + text(sha256(padded(0x36) + message)));
}

}  // namespace gradwire
