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
#include <vector>

#include "collectives/net/socket.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

const std::string kGreeting = "gw-rank1";
constexpr size_t kChallenge = 32;
constexpr size_t kProof = sizeof(Digest);
constexpr const char* kHungUp = "it hung up";

std::string fresh_challenge() {
  std::string bytes(kChallenge, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error("no random numbers from the kernel");
  }
  return bytes;
}

Digest proof(const Credentials& credentials, const char* side, const std::string& connectors,
             const std::string& acceptors) {
  // Challenges have a fixed length and come last, so different inputs give different texts.
  return hmac_sha256(credentials.key,
                     std::string(side) + " " + credentials.purpose + " " + connectors + acceptors);
}

std::string text_of(const Digest& digest) {
  return {digest.begin(), digest.end()};
}

Digest digest_at(const std::string& bytes, size_t at) {
  Digest digest;
  std::memcpy(digest.data(), bytes.data() + at, digest.size());
  return digest;
}

}  // namespace

Challenge::Challenge(const Credentials& credentials) : credentials_(credentials), mine_(fresh_challenge()) {}

Challenge::State Challenge::refuse(const char* why) {
  why_ = why;
  return State::refused;
}

Challenge::State Challenge::advance(const Socket& socket) {
  while (true) {
    const size_t wanted = theirs_.empty() ? kGreeting.size() + kChallenge : kProof;
    char bytes[std::max(size_t{8} + kChallenge, kProof)];
    const ssize_t n = recv(socket.fd(), bytes, wanted - received_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return expired() ? refuse(kSaidNothing) : State::waiting;
    if (n <= 0) return refuse("hung up");
    received_.append(bytes, static_cast<size_t>(n));
    const size_t greeted = std::min(received_.size(), kGreeting.size());
    if (theirs_.empty() && received_.compare(0, greeted, kGreeting, 0, greeted) != 0) {
      return refuse("not a rank of this version");
    }
    if (received_.size() < wanted) continue;
    if (!theirs_.empty()) {
      const bool right = equal(digest_at(received_, 0), proof(credentials_, "connector", theirs_, mine_));
      return right ? State::proved : refuse("wrong secret");
    }
    theirs_ = received_.substr(kGreeting.size());
    received_.clear();
    const std::string answer = mine_ + text_of(proof(credentials_, "acceptor", theirs_, mine_));
    // The answer fits into a new connection's buffer.
    if (send(socket.fd(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT) !=
        static_cast<ssize_t>(answer.size())) {
      return refuse("hung up");
    }
  }
}

std::string RejectedConnections::note(const std::string& from, const std::string& why) {
  const std::pair who(from, why);
  const bool named = counts_.contains(who) || counts_.size() < kMostNamed;
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

Introduction::Introduction(const Credentials& credentials)
    : credentials_(credentials), mine_(fresh_challenge()) {}

Introduction::State Introduction::refuse(const char* why) {
  why_ = why;
  return State::refused;
}

Introduction::State Introduction::advance(const Socket& socket) {
  // All bytes of the handshake fit into a new connection's buffer.
  const auto sent = [&](const std::string& bytes) {
    return send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  };
  if (!greeted_) {
    greeted_ = true;
    if (!sent(kGreeting + mine_)) return refuse(kHungUp);
  }
  while (received_.size() < kChallenge + kProof) {
    char bytes[kChallenge + kProof];
    const ssize_t n = recv(socket.fd(), bytes, sizeof bytes - received_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return State::waiting;
    if (n <= 0) return refuse(kHungUp);
    received_.append(bytes, static_cast<size_t>(n));
  }
  const std::string theirs = received_.substr(0, kChallenge);
  const bool right = equal(digest_at(received_, kChallenge), proof(credentials_, "acceptor", mine_, theirs));
  // Send the proof even if the acceptor's proof is wrong, so that the acceptor can distinguish a wrong secret
  // from a lost connection.
  const bool answered = sent(text_of(proof(credentials_, "connector", mine_, theirs)));
  if (!right) return refuse(kOtherSecret);
  return answered ? State::proved : refuse(kHungUp);
}

namespace {

bool in_own_groups(gid_t group) {
  std::vector<gid_t> groups(static_cast<size_t>(std::max(0, getgroups(0, nullptr))));
  groups.resize(static_cast<size_t>(std::max(0, getgroups(static_cast<int>(groups.size()), groups.data()))));
  return group == getegid() || std::find(groups.begin(), groups.end(), group) != groups.end();
}

// Returns whether other users cannot read the file. A file that root owns and that one of this process's
// groups can read is also accepted: Kubernetes mounts secrets in that way with fsGroup.
bool is_private(const struct stat& file) {
  if ((file.st_mode & 077) == 0) return true;
  return file.st_uid == 0 && (file.st_mode & 077) == 040 && in_own_groups(file.st_gid);
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
  std::array<uint8_t, 16> bytes;
  // getrandom() returns requests of up to 256 bytes whole, and without EINTR.
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error("no random numbers from the kernel: {}", std::strerror(errno));
  }
  std::string text;
  for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
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

uint32_t big_endian(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
}

}  // namespace

void Sha256::block(const uint8_t* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(data + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t added[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

void Sha256::update(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  bytes_ += bytes;
  while (bytes > 0) {
    const size_t part = std::min(bytes, pending_.size() - filled_);
    std::memcpy(pending_.data() + filled_, at, part);
    at += part, bytes -= part, filled_ += part;
    if (filled_ < pending_.size()) return;
    block(pending_.data());
    filled_ = 0;
  }
}

Digest Sha256::finish() {
  const uint64_t bits = 8 * bytes_;
  const uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (filled_ != 56) update(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length, sizeof length);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view message) {
  std::array<uint8_t, 64> block{};
  if (key.size() > block.size()) {
    Sha256 hash;
    hash.update(key.data(), key.size());
    const Digest digest = hash.finish();
    std::copy(digest.begin(), digest.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  auto hashed = [&block](uint8_t pad, const void* data, size_t bytes) {
    std::array<uint8_t, 64> padded;
    for (size_t i = 0; i < block.size(); ++i) padded[i] = block[i] ^ pad;
    Sha256 hash;
    hash.update(padded.data(), padded.size());
    hash.update(data, bytes);
    return hash.finish();
  };
  const Digest inner = hashed(0x36, message.data(), message.size());
  return hashed(0x5c, inner.data(), inner.size());
}

bool equal(const Digest& a, const Digest& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace gradwire
