#include "collectives/net/membership.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/reach.h"
#include "collectives/net/socket.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// Throws BadInput for a rendezvous without a secret at an address that other machines can reach.
void check_secrecy(const GroupOptions& options, const Endpoint& endpoint) {
  if (!options.secret.empty() || !faces_network(endpoint.host)) return;
  if (options.insecure || environment_flag("GRADWIRE_INSECURE")) {
    print_error_line(fmt::format(
        "WARNING: {} has no secret: whoever can reach it may join this run, or end it", options.rendezvous));
    return;
  }
  throw BadInput(
      "rendezvous '{}' can be reached from other machines and this run has no secret; set "
      "GRADWIRE_SECRET, or GRADWIRE_SECRET_FILE, to the same secret on every rank (head -c 16 "
      "/dev/urandom | base64 makes one), or accept the risk with GRADWIRE_INSECURE=1",
      options.rendezvous);
}

// Returns the path in file:///path. Throws BadInput if `rendezvous` is invalid.
std::string path_of_rendezvous(const std::string& rendezvous) {
  const std::string path = rendezvous.substr(std::string("file://").size());
  if (path.starts_with("/")) return path;
  throw BadInput(
      "rendezvous '{}': '{}' is not an absolute path, which file:// needs; give file:///path, "
      "here file://{}",
      rendezvous, path, std::filesystem::absolute(path).string());
}

// Returns the endpoint in tcp://host:port. Throws BadInput if `rendezvous` is invalid.
Endpoint endpoint_of_rendezvous(const std::string& rendezvous) {
  const auto bad = [&](const std::string& why) {
    return BadInput("rendezvous '{}': {}; give tcp://host:port or file:///path", rendezvous, why);
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

}  // namespace

Membership::Membership(const GroupOptions& options) : options_(options) {
  const std::string& rendezvous = options.rendezvous;
  require(world() >= 1 && rank() >= 0 && rank() < world(), "there is no rank {} in a group of {}", rank(),
          world());
  if (options_.secret.empty()) options_.secret = secret_from_environment();
  if (options_.job.empty()) options_.job = job_from_environment();
  read_listening(options_);
  const auto deadline = SteadyClock::now() + options.join_timeout();
  std::string file;
  std::optional<RendezvousCallbacks> callbacks = options.callbacks;
  if (!callbacks && rendezvous.starts_with("file://") && rendezvous.size() > 7) {
    file = path_of_rendezvous(rendezvous);
    callbacks.emplace();
    callbacks->publish = [file](const std::string& text) { write_private_file(file, text); };
    callbacks->read = [file] { return read_rendezvous_file(file); };
  }
  StoreLocation location;
  if (callbacks) {
    location = serve_at_any_port(*callbacks);
    if (rank() == 0) published_file_ = file;
  } else if (rendezvous.starts_with("tcp://")) {
    const Endpoint endpoint = endpoint_of_rendezvous(rendezvous);
    check_secrecy(options_, endpoint);
    if (rank() == 0) {
      // Debian gives a machine's host name a loopback address, which other machines cannot reach.
      const bool own_name = !is_loopback(endpoint.host) && !faces_network(endpoint.host);
      const Endpoint here{own_name && !options_.secret.empty() ? "" : endpoint.host, endpoint.port};
      server_ = std::make_unique<StoreServer>(listen_on(here), world(), options_.secret, options_.job);
    }
    location.store = {.addresses = {endpoint.host}, .port = endpoint.port};
  } else {
    throw BadInput("rendezvous '{}': unknown kind; give tcp://host:port or file:///path", rendezvous);
  }
  find_store(location, callbacks ? &*callbacks : nullptr, file, deadline);
  key_ = options_.secret + location.secret;
}

// Connects this rank to rank 0's store as soon as rank 0 has published and started the store. `callbacks`:
// null with tcp://. `file`: the path of a file:// rendezvous, or empty. Reads `location` again before each
// attempt, except on rank 0 and with tcp://. Throws CommError if the store rejects this rank, or at the
// deadline.
void Membership::find_store(StoreLocation& location, const RendezvousCallbacks* callbacks,
                            const std::string& file, SteadyClock::time_point deadline) {
  constexpr milliseconds kRetry{20}, kLongestPause{1000}, kPreviousRun{3000};
  std::string why;      // why the latest attempt failed
  std::string refused;  // the reason given by a process of another run; "" if none
  if (callbacks != nullptr) {
    why = file.empty() ? "rank 0 has not published where it listens" : "no rendezvous file " + file;
  }
  auto patient_until = SteadyClock::time_point::max();
  milliseconds refused_pause{100};
  const auto failure = [&](const std::string& reason) {
    return CommError("rank {} cannot join through {}: {}", rank(), options_.rendezvous, reason);
  };
  for (bool other_run = false;; other_run = false) {
    if (callbacks != nullptr && rank() != 0) location = StoreLocation::parse(callbacks->read());
    auto now = SteadyClock::now();
    const auto patience = std::max(std::min(deadline, now + milliseconds(2000)), now + milliseconds(500));
    if (!location.store.addresses.empty()) {
      try {
        client_ = std::make_unique<StoreClient>(location.store, options_.secret + location.secret, rank(),
                                                world(), patience, options_.job);
        return;
      } catch (const StoreRefused& error) {
        throw failure(error.what());
      } catch (const CommError& error) {
        why = error.what();
        other_run = dynamic_cast<const OtherSecret*>(&error) != nullptr || why.find(kOtherJob) != why.npos;
      }
    }
    now = SteadyClock::now();
    if (file.empty() && other_run) {  // a file may be an earlier run's file
      refused = why;
      patient_until =
          std::min(patient_until, now + kPreviousRun);  // the previous run may still have the port
    }
    if (const std::string why_failed = server_ ? server_->failure() : ""; !why_failed.empty()) {
      throw failure(why_failed);
    }
    if (now >= patient_until) {
      throw failure(refused + (refused.ends_with(kOtherSecret)
                                   ? "; give all ranks the same GRADWIRE_SECRET"
                                   : "; give each run a port of its own, or all ranks of this one the same "
                                     "GRADWIRE_JOB"));
    }
    if (callbacks != nullptr && callbacks->given_up && callbacks->given_up()) {
      throw failure("one of the group's ranks is gone");
    }
    const std::string refusal = server_ && now >= deadline ? server_->refusal() : "";
    if (!refusal.empty()) throw failure("rank 0 " + refusal);
    require<CommError>(
        now < deadline,
        "rank {} did not reach rank 0 through {} within {} ms ({}); is rank 0 running, and {}?", rank(),
        options_.rendezvous, options_.join_timeout().count(), why,
        why.ends_with(kOtherSecret) ? "have all ranks the same GRADWIRE_SECRET"
                                    : "is the address right on every rank");
    std::this_thread::sleep_for(other_run ? refused_pause : kRetry);
    // Pause longer after each rejection, because each attempt can add a line to the other run's log.
    if (other_run) refused_pause = std::min(2 * refused_pause, kLongestPause);
  }
}

// Starts the store on rank 0 and publishes the store's location. Returns an empty location on the other
// ranks.
StoreLocation Membership::serve_at_any_port(RendezvousCallbacks& callbacks) {
  if (callbacks.address.empty() && !options_.interface.empty()) {
    callbacks.address = address_of_interface(options_.interface);
  }
  listen_at_ = callbacks.address;
  if (rank() != 0) return {};
  std::vector<Socket> invited;
  for (const int fd : callbacks.invited) {
    invited.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!invited.back()) throw_refused("cannot watch a process that joins", errno);
  }
  Socket listener = listen_within(options_.ports, callbacks.address);
  StoreLocation location{.store = contact_of(listener, callbacks.address, "-"), .secret = random_secret()};
  server_ = std::make_unique<StoreServer>(std::move(listener), world(), options_.secret + location.secret,
                                          options_.job, StoreLimits(world()), std::move(invited));
  callbacks.publish(location.text());
  return location;
}

Membership::~Membership() {
  client_.reset();
  server_.reset();
  if (published_file_.empty()) return;
  try {  // a later group may have reused the file's name
    const StoreLocation found = StoreLocation::parse(read_rendezvous_file(published_file_));
    if (options_.secret + found.secret == key_) remove_output(published_file_);
  } catch (const std::exception&) {
  }
}

void read_listening(GroupOptions& options) {
  if (options.interface.empty()) {
    if (const char* name = environment("GRADWIRE_INTERFACE")) {
      try {
        address_of_interface(name);
      } catch (const BadInput& error) {
        throw BadInput("GRADWIRE_INTERFACE: {}", error.what());
      }
      options.interface = name;
    }
  }
  if (options.ports.last == 0) {
    if (const char* range = environment("GRADWIRE_PORTS"))
      options.ports = parse_ports("GRADWIRE_PORTS", range);
  }
}

std::string Membership::address(SteadyClock::time_point deadline) {
  // Both ends of this rank's connection to rank 0, as seen from this rank. Every rank publishes these
  // addresses, because other ranks wait for them.
  const std::string mine = client_->local_address();
  Message ends;
  ends.add("local", mine).add("peer", client_->peer_address());
  client_->set(fmt::format("address/{}", rank()), ends.encode());
  if (!options_.interface.empty()) return address_of_interface(options_.interface);
  if (!is_loopback(mine)) return mine;
  // This is rank 0's machine, so the address by which ranks on other machines reach rank 0 is also valid for
  // this rank.
  for (int r = 0; r < world(); ++r) {
    const Message theirs =
        Message::decode(client_->get(fmt::format("address/{}", r), deadline,
                                     fmt::format("rank {}, waiting for rank {} to join", rank(), r)));
    if (!is_loopback(theirs.text("local"))) return theirs.text("peer");
  }
  return mine;
}

std::string Membership::take_message(int from) {
  if (!server_) throw Error("only rank 0 takes messages");
  auto message = server_->take_message(from, SteadyClock::now() + options_.timeout);
  if (!message) throw CommError("nothing after {} ms", options_.timeout.count());
  return std::move(*message);
}

void Membership::barrier() {
  std::string key = fmt::format("barrier/{}", barriers_);
  auto deadline = SteadyClock::now() + options_.timeout;
  if (client_->add(key) == world()) {
    // All ranks have left the previous barrier, so the store need not keep the previous barrier's key.
    if (barriers_ > 0) client_->drop(fmt::format("barrier/{}", barriers_ - 1));
    client_->set(key, "open");
  }
  ++barriers_;
  client_->get(key, deadline, "waiting for all ranks");
}

namespace {

using Op = Frame::Op;
using std::chrono::milliseconds;

// Maximal time without a message from the rank that keeps this process waiting.
constexpr milliseconds kSilence{3000};
constexpr milliseconds kRequestAgain{50};
// How long a group may take to publish its new location if all its published ranks are gone or have another
// secret.
constexpr milliseconds kUnpublished{3000};

// A process that asks the ranks of a group to admit it.
struct Joining {
  const GroupOptions& group;
  const JoinRequest& options;
  const std::string secret = group.secret.empty() ? secret_from_environment() : group.secret;
  const SteadyClock::time_point until = options.longest.count() > 0 ? SteadyClock::now() + options.longest
                                                                    : SteadyClock::time_point::max();
  SteadyClock::time_point give_up_at = SteadyClock::now() + group.join_timeout();
  std::shared_ptr<Quorum> quorum = nullptr;
  std::string why = {};       // why the latest asked rank does not admit this process
  bool other_secret = false;  // a rank has another secret, and no rank has answered since
  bool may_admit = false;     // the latest asked rank may admit this process, now or later

  static SteadyClock::time_point patience_end() { return SteadyClock::now() + Quorum::kPatience; }

  Admitted request_until_admitted() {
    auto answered_at = SteadyClock::now();
    for (bool seen = false;;) {  // seen: a rank's contact has been published
      std::istringstream lines(options.invitation());
      std::string drawn;
      std::getline(lines, drawn);
      const std::string key = drawn == "-" ? secret : secret + drawn;
      bool empty = true, any_may_admit = false;
      for (std::string contact; std::getline(lines, contact);) {
        empty = empty && contact.empty();
        // A rank may redirect this process to a rank that has ended meanwhile.
        for (int hops = 0; hops < 2 && !contact.empty(); ++hops) {
          const std::string at = std::exchange(contact, "");
          if (auto admitted = ask(at, key, contact)) return std::move(*admitted);
          any_may_admit = any_may_admit || may_admit;
        }
      }
      // The group removes the invitation when the run ends.
      any_may_admit = any_may_admit || (empty && !seen);
      seen = seen || !empty;
      if (empty) why = seen ? "its ranks have gone" : "no rank has published its contact yet";
      const auto now = SteadyClock::now();
      if (any_may_admit) answered_at = now;
      require<NoRankAnswers>(now - answered_at < kUnpublished && now < give_up_at,
                             "no rank admits this process: {}; {}", other_secret ? kOtherSecret : why,
                             other_secret ? "give it the run's GRADWIRE_SECRET"
                                          : "if the run continues elsewhere, use its newest list of ranks");
      std::this_thread::sleep_for(kRequestAgain);
    }
  }

  // Sends a join request to the rank at `contact` and waits as long as the rank sends wait messages. Returns
  // nullopt if the rank cannot admit this process; `next` is then the contact to which the rank redirects, if
  // any.
  std::optional<Admitted> ask(const std::string& contact, const std::string& key, std::string& next) {
    const Contact theirs = Contact::parse(contact).value_or(Contact());
    Reach reached = reach(theirs, {key, Quorum::purpose_of(theirs.name)}, patience_end());
    if (!reached.socket) {
      why = reached.why.empty() ? "its list of ranks cannot be read" : reached.why;
      other_secret = other_secret || reached.other_secret;
      // A rank that is gone or has another secret cannot admit this process, but another rank of the group
      // may soon listen there.
      may_admit = !reached.gone;
      return std::nullopt;
    }
    Socket socket = std::move(*reached.socket);
    may_admit = true;
    other_secret = false;
    // Listen like the rank at the other end of `socket`: at one address, or at all addresses.
    std::string address = theirs.addresses.size() > 1 ? "" : socket.local_address();
    if (!group.interface.empty()) address = address_of_interface(group.interface);
    if (!quorum || quorum->key() != key || quorum->address() != address) {
      quorum = nullptr;  // frees the port, which may be the only free port
      quorum = std::make_shared<Quorum>(address, key, group.ports);
    }
    Message hello;
    hello.add("contact", quorum->contact()).add("about", options.about);
    if (!send_frame(socket, {Op::request, 0, "", hello.encode()}, patience_end())) return std::nullopt;
    return wait_at(Endpoint{socket.peer_address(), theirs.port}.text(), std::move(socket), next);
  }

  // Waits for the answer to the request that was sent to the rank `at`.
  std::optional<Admitted> wait_at(const std::string& at, Socket socket, std::string& next) {
    std::string bytes;
    while (true) {
      const auto frame = receive_frame(socket, bytes, SteadyClock::now() + kSilence);
      why = fmt::format("{} has stopped answering", at);
      if (!frame) return std::nullopt;
      give_up_at = SteadyClock::now() + group.join_timeout();
      switch (frame->op) {
        case Op::wait:
          require<NoRankAnswers>(SteadyClock::now() < until,
                                 "{} keeps this process waiting and has not admitted it after {} ms", at,
                                 options.longest.count());
          break;
        case Op::redirect:
          why = fmt::format("{} redirects to {}", at, frame->value);
          next = frame->value;
          return std::nullopt;
        case Op::rejected:
          throw BadInput("{} does not let this process join: {}", at, frame->value);
        case Op::check:
          send_frame(socket, {Op::present, 0, "", ""}, patience_end());
          break;
        case Op::admitted: {
          Admitted admitted = Admitted::decode(frame->value);
          quorum->begin(admitted.number, admitted.name);
          admitted.quorum = quorum;
          admitted.host = std::move(socket);
          return admitted;
        }
        default:
          break;
      }
    }
  }
};

}  // namespace

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

Admitted request_admission(const GroupOptions& group, const JoinRequest& join) {
  const RunningClock::Watch watch;
  return Joining{.group = group, .options = join}.request_until_admitted();
}

std::string job_from_environment(const std::function<const char*(const char*)>& lookup) {
  constexpr size_t kMaxBytes = 200;
  const auto value = [&](const char* variable) {
    const char* text = lookup(variable);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string own = value("GRADWIRE_JOB"); !own.empty()) {
    const bool printable = std::all_of(own.begin(), own.end(), [](unsigned char c) { return c >= ' '; });
    if (own.size() > kMaxBytes || !printable) {
      throw BadInput("GRADWIRE_JOB: at most {} bytes, without control characters", kMaxBytes);
    }
    return fmt::format("'{}'", own);
  }
  const auto named = [](const char* kind, const std::string& id) {
    return fmt::format("{} {}", kind, id.substr(0, kMaxBytes));
  };
  // torchrun names a run "none" unless --rdzv-id or --standalone names it.
  if (const std::string id = value("TORCHELASTIC_RUN_ID"); !id.empty() && id != "none") {
    return named("torchrun's", id);
  }
  // If each launch starts one process, a run's ranks are separate launches, and a launch's id does not
  // identify the run.
  const auto several = [&](const char* processes) {
    const std::string count = value(processes);
    return !count.empty() && count != "1";
  };
  if (several("OMPI_COMM_WORLD_SIZE")) {
    for (const char* variable : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
      if (const std::string id = value(variable); !id.empty()) return named("mpirun's", id);
    }
  }
  if (const std::string id = value("PMI_JOBID"); !id.empty() && several("PMI_SIZE"))
    return named("mpirun's", id);
  // The parts of a heterogeneous job have separate ids, and all have the id of the first part in this
  // variable.
  std::string job = value("SLURM_HET_JOB_ID");
  if (job.empty()) job = value("SLURM_JOB_ID");
  if (job.empty()) return "";
  const std::string step = value("SLURM_STEP_ID");
  // Hydra's ranks inherit the steps of Hydra's daemons, and some daemons may not be steps.
  const bool by_hydra = several("PMI_SIZE") && !value("MPI_LOCALNRANKS").empty();
  const bool a_step = several("SLURM_STEP_NUM_TASKS") && !step.empty() && !by_hydra;
  return named("Slurm job", a_step ? fmt::format("{}, step {}", job, step) : job);
}

}  // namespace gradwire
