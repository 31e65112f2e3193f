#include "trainer/checkpoint/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "runtime/util/parse.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

const std::string kPrefix = "step-", kUnfinished = ".tmp", kNotFinite = "/not-finite";

// Returns the number of steps in a checkpoint's name: 30 for "step-000000030", -1 for any other name.
int64_t steps_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return -1;
  return parse_number<int64_t>(name.substr(kPrefix.size()), 0).value_or(-1);
}

bool is_finite(const std::string& checkpoint) {
  std::error_code ignored;
  return !fs::exists(checkpoint + kNotFinite, ignored);
}

struct Listing {
  std::vector<std::pair<int64_t, std::string>> checkpoints;  // number of steps and path, newest first
  std::vector<std::string> unfinished;                       // paths of unfinished checkpoints
};

Listing list(const std::string& directory) {
  Listing listing;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (!it->is_directory(ignored)) continue;
    const std::string name = it->path().filename().string();
    if (const int64_t steps = steps_of(name); steps >= 0) {
      listing.checkpoints.emplace_back(steps, it->path().string());
    } else if (name.ends_with(kUnfinished) &&
               steps_of(name.substr(0, name.size() - kUnfinished.size())) >= 0) {
      listing.unfinished.push_back(it->path().string());
    }
  }
  require(!error, "{}: its files cannot be listed: {}", directory, error.message());
  std::sort(listing.checkpoints.rbegin(), listing.checkpoints.rend());
  std::sort(listing.unfinished.begin(), listing.unfinished.end());
  return listing;
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error("{}: {}", what, std::strerror(error));
}

// Makes the entries of a folder durable.
void sync_folder(const std::string& path) {
  const FileDescriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if ((!folder || fsync(folder.fd()) != 0) && !is_unsupported(errno)) fail(path + ": fsync failed", errno);
}

// Removes an obsolete checkpoint. Only warns on failure, because a failure must not end the run. A partly
// removed checkpoint must not look complete, so the folder is renamed first. If renaming fails, as with
// overlayfs for folders of a lower layer, the weights are removed first; a checkpoint without weights is not
// complete.
void remove_or_warn(const std::string& path) {
  std::error_code error;
  std::string doomed = path;
  if (!doomed.ends_with(kUnfinished)) {
    fs::remove_all(doomed + kUnfinished, error);
    error.clear();
    if (std::rename(path.c_str(), (doomed + kUnfinished).c_str()) == 0) {
      doomed += kUnfinished;
    } else {
      fs::remove(weights_path(path), error);
    }
  }
  if (!error) fs::remove_all(doomed, error);
  if (!error) return;
  warn_once(
      fmt::format("{}: an old checkpoint cannot be removed: {}; remove it by hand", path, error.message()));
}

}  // namespace

std::string weights_path(const std::string& checkpoint) {
  return checkpoint + "/model.safetensors";
}

std::string state_path(const std::string& checkpoint, int rank, int world) {
  return fmt::format("{}/state-{}-of-{}.safetensors", checkpoint, rank, world);
}

int checkpoint_world(const std::string& checkpoint) {
  std::error_code error;
  if (!fs::is_regular_file(weights_path(checkpoint), error)) return 0;
  const std::string before = "state-0-of-", after = ".safetensors";
  int world = 0;
  for (fs::directory_iterator it(checkpoint, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(before) || !name.ends_with(after)) continue;
    world =
        parse_number(name.substr(before.size(), name.size() - before.size() - after.size()), 1).value_or(0);
    break;
  }
  for (int rank = 0; rank < world; ++rank) {
    if (!fs::is_regular_file(state_path(checkpoint, rank, world), error)) return 0;
  }
  return world;
}

FoundCheckpoint find_checkpoint(const std::string& directory) {
  FoundCheckpoint found;
  std::error_code error;
  require(fs::is_directory(directory, error), "{}: {}", directory,
          fs::exists(directory, error) ? "not a folder" : "no such folder");
  if (checkpoint_world(directory) > 0) {
    found.path = directory;
    return found;
  }
  const Listing listing = list(directory);
  for (const std::string& path : listing.unfinished) {
    found.ignored.push_back(fmt::format("Ignoring {}: it was not finished", path));
  }
  for (const auto& [steps, path] : listing.checkpoints) {
    const bool complete = checkpoint_world(path) > 0;
    if (complete && is_finite(path)) {
      found.path = path;
      break;
    }
    found.ignored.push_back(fmt::format("Ignoring {}: {}", path,
                                        complete ? "its values are not finite; name it to resume from it"
                                                 : "incomplete, some of its files are missing"));
  }
  return found;
}

bool holds_checkpoints(const std::string& directory) {
  std::error_code ignored;
  return fs::is_directory(directory, ignored) && !list(directory).checkpoints.empty();
}

void check_output_directory(const std::string& flag, const std::string& directory) {
  fs::path existing = fs::absolute(directory);
  std::error_code ignored;
  while (!fs::exists(existing, ignored) && existing.has_relative_path()) existing = existing.parent_path();
  require(fs::is_directory(existing, ignored), "{} {}: {} is not a folder", flag, directory,
          existing.string());
  const bool lists = flag == "--checkpoint" && fs::exists(directory, ignored);
  for (const auto& [mode, what] : {std::pair{W_OK | X_OK, "written to"}, {lists ? R_OK : F_OK, "listed"}}) {
    const bool can = access(existing.c_str(), mode) == 0;
    require(can, "{} {}: {} cannot be {}: {}", flag, directory, existing.string(), what,
            std::strerror(errno));
  }
}

FolderLock::FolderLock(const std::string& directory, bool displaces) {
  std::error_code error;
  fs::create_directories(directory, error);
  require<Error>(!error, "{}: cannot be created: {}", directory, error.message());
  // The run ends before its first step, not at its first checkpoint, if the file system lacks an operation.
  const std::string probe = temporary_name_beside(directory + "/probe"), renamed = probe + kUnfinished;
  const bool created = !displaces && mkdir(probe.c_str(), 0777) == 0;
  FileDescriptor file(created ? open((probe + "/file").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666) : -1);
  const bool sized = file && ftruncate(file.fd(), 1) == 0 && file.close();
  const bool done = sized && std::rename(probe.c_str(), renamed.c_str()) == 0;
  const std::string why = std::strerror(errno);
  for (const std::string& left : {probe, renamed}) fs::remove_all(left, error);
  const char* const cannot = sized ? "rename folders" : created ? "set the size of a file" : "create folders";
  require(done || displaces, "--checkpoint {}: its file system cannot {}: {}; name a folder elsewhere",
          directory, cannot, why);
  const std::string path = directory + "/lock";
  if (displaces) fs::remove(path, error);  // the holder keeps an unlinked file
  // Open with O_NOFOLLOW, so that the run does not overwrite the target of a link.
  file_ = FileDescriptor(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
  const int fd = file_.fd();
  if (fd < 0) fail(path + ": cannot be created", errno);
  char text[300] = {};
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {  // the file system has no locks
      file_ = FileDescriptor();
      return;
    }
    [[maybe_unused]] const ssize_t read = pread(fd, text, sizeof text - 1, 0);
    throw BadInput("--checkpoint {}: another run writes there{}{}; stop it, or give this run another folder",
                   directory, text[0] == 0 ? "" : ": ", text);
  }
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  // Used only in the message above, so a full disk does no harm.
  if (ftruncate(fd, 0) == 0) write_fully(fd, fmt::format("process {} on {}", getpid(), host));
}

std::string NewCheckpoint::final_path(const std::string& directory, int64_t step) {
  return fmt::format("{}/{}{:09}", directory, kPrefix, step);
}

std::string NewCheckpoint::temporary_path(const std::string& directory, int64_t step) {
  return final_path(directory, step) + kUnfinished;
}

NewCheckpoint::NewCheckpoint(const std::string& directory, int64_t step)
    : directory_(directory), step_(step) {
  std::error_code error;
  fs::create_directories(directory_, error);
  require<Error>(!error, "{}: cannot be created: {}", directory_, error.message());
  for (const std::string& path : list(directory_).unfinished) remove_or_warn(path);
  const std::string path = temporary_path(directory_, step_);
  const bool created = fs::create_directory(path, error);
  require<Error>(created && !error, "{}: cannot be created: {}", path,
                 error ? error.message() : "it exists already; remove it, or name another folder");
}

void NewCheckpoint::commit(int keep, bool finite) {
  const std::string from = temporary_path(directory_, step_), to = final_path(directory_, step_);
  if (!finite && !FileDescriptor(open((from + kNotFinite).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666))) {
    fail(from + kNotFinite + ": cannot be created", errno);
  }
  sync_folder(from);
  std::error_code ignored;
  // A folder with this name is incomplete or not finite; otherwise the run would have resumed from it.
  fs::remove_all(to, ignored);
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    fail(fmt::format("{}: renaming to {} failed", from, to), errno);
  }
  sync_folder(directory_);
  int kept = 0;
  bool keeps_finite = false;
  for (const auto& [steps, path] : list(directory_).checkpoints) {
    if (steps > step_) continue;
    const bool last_finite = !keeps_finite && is_finite(path);
    if (++kept > std::max(keep, 1) && !last_finite) remove_or_warn(path);
    keeps_finite = keeps_finite || last_finite;
  }
}

}  // namespace gradwire
