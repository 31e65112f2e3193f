#include "collectives/net/membership.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>
#include <thread>

#include "collectives/net/handshake.h"
#include "collectives/net/job.h"
#include "collectives/net/secret.h"
#include "runtime/threads/resources.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/output_file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// The location of rank 0's store.
struct StoreLocation {
  Contact store;       // without addresses: not known yet
  std::string secret;  // of a file:/// rendezvous
};

constexpr const char* kFileMagic = "gradwire-rendezvous-1";

Endpoint parse_tcp(const std::string& rendezvous) {
  auto bad = [&](const std::string& why) {
    return BadInput(
        fmt::format("rendezvous '{}': {}; give tcp://host:port or file:///path", rendezvous, why));
  };
  std::string rest = rendezvous.substr(6);
  size_t colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0) throw bad("no host and port");
  Endpoint endpoint{rest.substr(0, colon), 0};
  if (endpoint.host.starts_with("[") && endpoint.host.ends_with("]")) {
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  }
  const auto port = parse_number(rest.substr(colon + 1), 1, 65535);
  if (!port) throw bad(fmt::format("'{}' is not a port", rest.substr(colon + 1)));
  endpoint.port = *port;
  return endpoint;
}

constexpr const char kHost = '@';

// Returns the text that rank 0 publishes: a secret, and its store's location.
std::string location_text(const std::string& secret, const Contact& store) {
  std::string text =
      fmt::format("{}\n{} {} {}", kFileMagic, secret, store.port, fmt::join(store.addresses, " "));
  if (!store.host.empty()) text += fmt::format(" {}{}", kHost, store.host);
  return text + "\n";
}

StoreLocation parse_location(const std::string& text) {
  std::istringstream words(text);
  std::string magic;
  StoreLocation location;
  if (!(words >> magic >> location.secret >> location.store.port) || magic != kFileMagic) return {};
  for (std::string word; words >> word;) {
    if (word[0] == kHost) {
      location.store.host = word.substr(1);
    } else {
      location.store.addresses.push_back(word);
    }
  }
  return location;
}

// Returns "" until the file is readable.
std::string read_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  if (!S_ISREG(status.st_mode)) {
    throw BadInput(fmt::format("rendezvous file://{0}: {0} is {1}; name a regular file, or a new one", path,
                               kind_of_file(status.st_mode)));
  }
  try {
    return read_regular_file(path);
  } catch (const BadInput&) {  // removed or replaced meanwhile
    return "";
  }
}

// Removes the file unless a later group has reused the name.
void remove_own(const std::string& path, const std::string& secret, const std::string& key) noexcept try {
  if (secret + parse_location(read_file(path)).secret == key) remove_output(path);
} catch (const std::exception&) {
}

RendezvousCallbacks file_callbacks(const std::string& path) {
  return {.publish = [path](const std::string& text) { write_private_file(path, text); },
          .read = [path] { return read_file(path); }};
}

// Rejects a rendezvous without a secret at an address that other machines can reach.
void check_secrecy(const GroupOptions& options, const Endpoint& endpoint) {
  if (!options.secret.empty() || !faces_network(endpoint.host)) return;
  if (options.insecure || environment_flag("GRADWIRE_INSECURE")) {
    print_error_line(fmt::format(
        "WARNING: {} has no secret: whoever can reach it may join this run, or end it", options.rendezvous));
    return;
  }
  throw BadInput(
      fmt::format("rendezvous '{}' can be reached from other machines and this run has no secret; set "
                  "GRADWIRE_SECRET, or GRADWIRE_SECRET_FILE, to the same secret on every rank (head -c 16 "
                  "/dev/urandom | base64 makes one), or accept the risk with GRADWIRE_INSECURE=1",
                  options.rendezvous));
}

}  // namespace

bool is_store_location(const std::string& text) {
  return !parse_location(text).store.addresses.empty();
}

void write_private_file(const std::string& path, const std::string& text) {
  OutputFile(path, OutputFile::Kind::private_file).write(text);
}

Membership::Membership(const GroupOptions& options) : options_(options) {
  const std::string& rendezvous = options.rendezvous;
  const int rank = options.rank, world = options.world;
  if (world < 1 || rank < 0 || rank >= world) {
    throw BadInput(fmt::format("there is no rank {} in a group of {}", rank, world));
  }
  if (options_.secret.empty()) options_.secret = secret_from_environment();
  if (options_.job.empty()) options_.job = job_from_environment();
  read_listening(options_);
  const auto deadline = SteadyClock::now() + options.join_timeout();
  std::string path;
  std::optional<RendezvousCallbacks> callbacks = options.callbacks;
  if (!callbacks && rendezvous.starts_with("file://") && rendezvous.size() > 7) {
    path = rendezvous.substr(7);
    if (!path.starts_with("/")) {
      throw BadInput(
          fmt::format("rendezvous '{}': '{}' is not an absolute path, which file:// needs; give "
                      "file:///path, here file://{}",
                      rendezvous, path, std::filesystem::absolute(path).string()));
    }
    callbacks = file_callbacks(path);
  }
  StoreLocation location;
  if (callbacks) {
    if (callbacks->address.empty() && !options_.interface.empty()) {
      callbacks->address = address_of_interface(options_.interface);
    }
    listen_at_ = callbacks->address;
    if (rank == 0) {
      location.secret = random_secret();
      key_ = options_.secret + location.secret;
      std::vector<Socket> invited;
      for (const int fd : callbacks->invited) {
        invited.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
        if (!invited.back()) throw_refused("cannot watch a process that joins", errno);
      }
      Socket listener = listen_within(options_.ports, callbacks->address);
      location.store = contact_of(listener, callbacks->address, "-");
      server_ = std::make_unique<StoreServer>(std::move(listener), world, key_, options_.job,
                                              StoreLimits(world), std::move(invited));
      callbacks->publish(location_text(location.secret, location.store));
      published_file_ = path;
    }
  } else if (rendezvous.starts_with("tcp://")) {
    const Endpoint named = parse_tcp(rendezvous);
    check_secrecy(options_, named);
    location.store = {.addresses = {named.host}, .port = named.port};
    key_ = options_.secret;
    if (rank == 0) {
      // Debian gives a machine's own name a loopback address, which other machines cannot reach.
      const bool own_name = !is_loopback(named.host) && !faces_network(named.host);
      const Endpoint here{own_name && !key_.empty() ? "" : named.host, named.port};
      server_ = std::make_unique<StoreServer>(listen_on(here), world, key_, options_.job);
    }
  } else {
    throw BadInput(
        fmt::format("rendezvous '{}': unknown kind; give tcp://host:port or file:///path", rendezvous));
  }
  std::string why =
      path.empty() ? callbacks ? "rank 0 has not said where it listens" : "" : "no rendezvous file " + path;
  // The previous run may still have the port.
  constexpr milliseconds kPatience{3000};
  auto patient_until = SteadyClock::time_point::max();
  std::string refused;  // by a process of another run: its reason
  // Delays between attempts. After a rejection the delay grows, because each attempt can add a line to the
  // other run's log.
  constexpr milliseconds kRetry{20}, kAskAgain{100}, kAskAgainAtMost{1000};
  milliseconds pause = kRetry, refused_pause = kAskAgain;
  while (!client_) {
    if (callbacks && rank != 0) {
      location = parse_location(callbacks->read());
      key_ = options_.secret + location.secret;
    }
    pause = kRetry;
    if (!location.store.addresses.empty()) {
      const auto now = SteadyClock::now();
      const auto patience = std::max(std::min(deadline, now + milliseconds(2000)), now + milliseconds(500));
      bool others = false;  // another run's store answered
      try {
        client_ = std::make_unique<StoreClient>(location.store, key_, rank, world, patience, options_.job);
        break;
      } catch (const StoreRefused& error) {
        throw CommError(fmt::format("rank {} cannot join through {}: {}", rank, rendezvous, error.what()));
      } catch (const OtherSecret& error) {
        why = error.what();
        others = true;
      } catch (const CommError& error) {
        why = error.what();
        others = why.find(kOtherJob) != std::string::npos;
      }
      if (others) pause = refused_pause;
      if (path.empty() && others) {  // a file may be an earlier run's
        refused = why;
        patient_until = std::min(patient_until, SteadyClock::now() + kPatience);
      }
    }
    if (const std::string failure = server_ ? server_->failure() : ""; !failure.empty()) {
      throw CommError(fmt::format("rank {} cannot join through {}: {}", rank, rendezvous, failure));
    }
    if (SteadyClock::now() >= patient_until) {
      throw CommError(fmt::format(
          "rank {} cannot join through {}: {}; {}", rank, rendezvous, refused,
          refused.ends_with(kOtherSecret)
              ? "give all ranks the same GRADWIRE_SECRET"
              : "give each run a port of its own, or all ranks of this one the same GRADWIRE_JOB"));
    }
    if (callbacks && callbacks->given_up && callbacks->given_up()) {
      throw CommError(fmt::format("rank {} cannot join through {}: a rank that was to be there is gone", rank,
                                  rendezvous));
    }
    if (SteadyClock::now() >= deadline) {
      throw CommError(
          fmt::format("rank {} did not reach rank 0 through {} within {} ms ({}); is rank 0 running, and {}?",
                      rank, rendezvous, options.join_timeout().count(), why,
                      why.ends_with(kOtherSecret) ? "have all ranks the same GRADWIRE_SECRET"
                                                  : "is the address right on every rank"));
    }
    if (pause == refused_pause) refused_pause = std::min(2 * refused_pause, kAskAgainAtMost);
    std::this_thread::sleep_for(pause);
  }
}

Membership::~Membership() {
  client_.reset();
  server_.reset();
  if (!published_file_.empty()) remove_own(published_file_, options_.secret, key_);
}

void read_listening(GroupOptions& options) {
  if (options.interface.empty()) {
    if (const char* name = environment("GRADWIRE_INTERFACE")) {
      check_interface("GRADWIRE_INTERFACE", name);
      options.interface = name;
    }
  }
  if (options.ports.last == 0) {
    if (const char* range = environment("GRADWIRE_PORTS"))
      options.ports = parse_ports("GRADWIRE_PORTS", range);
  }
}

std::string Membership::listening_address(SteadyClock::time_point deadline) {
  return listen_at_ ? *listen_at_ : address(deadline);
}

std::string Membership::address(SteadyClock::time_point deadline) {
  // Both ends of this rank's connection to rank 0, as seen from this rank. All ranks publish them, because
  // other ranks wait for them.
  std::string mine = client_->local_address();
  client_->set(fmt::format("address/{}", rank()), fmt::format("{} {}", mine, client_->peer_address()));
  if (!options_.interface.empty()) return address_of_interface(options_.interface);
  if (!is_loopback(mine)) return mine;
  // This is rank 0's machine, so the address by which ranks on other machines reach rank 0 is also valid
  // here.
  for (int r = 0; r < world(); ++r) {
    std::istringstream seen(client_->get(fmt::format("address/{}", r), deadline,
                                         fmt::format("rank {}, waiting for rank {} to join", rank(), r)));
    std::string local, peer;
    seen >> local >> peer;
    if (!is_loopback(local)) return peer;
  }
  return mine;
}

std::string Membership::take_message(int from) {
  if (!server_) throw Error("only rank 0 takes messages");
  auto message = server_->take_message(from, SteadyClock::now() + options_.timeout);
  if (!message) throw CommError(fmt::format("nothing after {} ms", options_.timeout.count()));
  return std::move(*message);
}

void Membership::barrier() {
  std::string key = fmt::format("barrier/{}", barriers_);
  auto deadline = SteadyClock::now() + options_.timeout;
  if (client_->add(key) == world()) {
    // All ranks have left the previous barrier: the store need not keep it.
    if (barriers_ > 0) client_->drop(fmt::format("barrier/{}", barriers_ - 1));
    client_->set(key, "open");
  }
  ++barriers_;
  client_->get(key, deadline, "waiting for all ranks");
}

}  // namespace gradwire
