#include "collectives/net/rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <filesystem>
#include <sstream>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/output_file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

constexpr const char* kFileMagic = "gradwire-rendezvous-1";
constexpr char kHostMark = '@';

// Returns the content of the rendezvous file; "" until the file is readable.
std::string read_rendezvous_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  if (!S_ISREG(status.st_mode)) {
    throw BadInput(fmt::format("rendezvous file://{0}: {0} is {1}; name a regular file, or a new one", path,
                               kind_of_file(status.st_mode)));
  }
  try {
    return read_regular_file(path);
  } catch (const BadInput&) {  // the file was removed or replaced concurrently
    return "";
  }
}

}  // namespace

// Returns the text to publish: the magic word on the first line. The second line contains the secret, the
// port, the addresses, and, after a mark, the host's id.
std::string StoreLocation::text() const {
  std::string text =
      fmt::format("{}\n{} {} {}", kFileMagic, secret, store.port, fmt::join(store.addresses, " "));
  if (!store.host.empty()) text += fmt::format(" {}{}", kHostMark, store.host);
  return text + "\n";
}

StoreLocation StoreLocation::parse(const std::string& text) {
  std::istringstream words(text);
  std::string magic, port;
  StoreLocation location;
  const bool complete = text.ends_with('\n');  // a file system without rename shows the text as it grows
  if (!complete || !(words >> magic >> location.secret >> port) || magic != kFileMagic) return {};
  const auto number = parse_number(port, 1, 65535);
  if (!number) return {};
  location.store.port = *number;
  for (std::string word; words >> word;) {
    if (word[0] == kHostMark) {
      location.store.host = word.substr(1);
    } else {
      location.store.addresses.push_back(word);
    }
  }
  return location;
}

bool is_store_location(const std::string& text) {
  return !StoreLocation::parse(text).store.addresses.empty();
}

RendezvousCallbacks file_callbacks(const std::string& path) {
  return {.publish = [path](const std::string& text) { write_private_file(path, text); },
          .read = [path] { return read_rendezvous_file(path); }};
}

void remove_rendezvous_file(const std::string& path, const std::string& secret,
                            const std::string& key) noexcept try {
  if (secret + StoreLocation::parse(read_rendezvous_file(path)).secret == key) remove_output(path);
} catch (const std::exception&) {
}

std::string path_of_rendezvous(const std::string& rendezvous) {
  const std::string path = rendezvous.substr(std::string("file://").size());
  if (path.starts_with("/")) return path;
  throw BadInput(
      fmt::format("rendezvous '{}': '{}' is not an absolute path, which file:// needs; give file:///path, "
                  "here file://{}",
                  rendezvous, path, std::filesystem::absolute(path).string()));
}

Endpoint endpoint_of_rendezvous(const std::string& rendezvous) {
  const auto bad = [&](const std::string& why) {
    return BadInput(
        fmt::format("rendezvous '{}': {}; give tcp://host:port or file:///path", rendezvous, why));
  };
  const std::string rest = rendezvous.substr(std::string("tcp://").size());
  const size_t colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0) throw bad("no host and port");
  const auto port = parse_number(rest.substr(colon + 1), 1, 65535);
  if (!port) throw bad(fmt::format("'{}' is not a port", rest.substr(colon + 1)));
  std::string host = rest.substr(0, colon);
  if (host.starts_with("[") && host.ends_with("]")) host = host.substr(1, host.size() - 2);
  return {host, *port};
}

void write_private_file(const std::string& path, const std::string& text) {
  OutputFile(path, OutputFile::Kind::private_file).write(text);
}

}  // namespace gradwire
