#include "collectives/net/secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "collectives/net/socket.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {
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
  const auto refuse = [&](const std::string& why) { throw BadInput(fmt::format("{}: {}", source, why)); };
  if (text.size() > kMaxSecretBytes) refuse(fmt::format("the secret is longer than {} bytes", kMaxSecretBytes));
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
  auto refuse = [&](const std::string& why) { throw BadInput(fmt::format("{}: {}", source, why)); };
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
    throw Error(fmt::format("no random numbers from the kernel: {}", std::strerror(errno)));
  }
  std::string text;
  for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace gradwire
