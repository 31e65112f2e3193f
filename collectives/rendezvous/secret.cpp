#include "collectives/rendezvous/secret.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "collectives/rendezvous/socket.h"
#include "runtime/environment.h"
#include "runtime/error.h"

namespace gradwire {

std::string secret_from_environment() {
  const char* direct = environment("GRADWIRE_SECRET");
  const char* path = environment("GRADWIRE_SECRET_FILE");
  if (direct != nullptr && path != nullptr) {
    throw BadInput("GRADWIRE_SECRET and GRADWIRE_SECRET_FILE are both set; unset one");
  }
  if (direct != nullptr) return direct;
  if (path == nullptr) return "";
  auto refuse = [&](const std::string& why) {
    throw BadInput(fmt::format("GRADWIRE_SECRET_FILE {}: {}", path, why));
  };
  const Socket file(open(path, O_RDONLY | O_CLOEXEC));  // closes any file descriptor
  if (!file) refuse(std::strerror(errno));
  struct stat status {};
  if (fstat(file.fd(), &status) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) refuse("not a regular file");
  if ((status.st_mode & 077) != 0) {
    refuse(fmt::format("other users may read or write it (mode {:03o}); chmod 600 {}", status.st_mode & 0777,
                       path));
  }
  std::string text(4096, '\0');
  const ssize_t n = read(file.fd(), text.data(), text.size());
  if (n < 0) refuse(std::strerror(errno));
  text.resize(static_cast<size_t>(n));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.empty()) refuse("it is empty");
  return text;
}

bool insecure_by_environment() {
  const char* value = environment("GRADWIRE_INSECURE");
  if (value == nullptr || std::strcmp(value, "0") == 0) return false;
  if (std::strcmp(value, "1") == 0) return true;
  throw BadInput(fmt::format("GRADWIRE_INSECURE is '{}'; 1 or 0", value));
}

std::string random_secret() {
  std::array<uint8_t, 16> bytes;
  // Up to 256 bytes come whole, without EINTR.
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error(fmt::format("no random numbers from the kernel: {}", std::strerror(errno)));
  }
  std::string text;
  for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace gradwire
