#include "runtime/util/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <new>
#include <set>
#include <thread>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {

bool FileDescriptor::close() {
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0;
}

const char* kind_of_file(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return S_ISREG(mode) ? "a regular file" : "a device";
}

bool is_unsupported(int error) {
  return error == ENOSYS || error == EOPNOTSUPP || error == EPERM || error == EINVAL || error == EACCES ||
         error == EBADF || error == EISDIR;
}

FileDescriptor open_regular_file(const std::string& path) {
  struct stat status {};
  auto fail = [&](const std::string& why) { throw BadInput("{}: {}", path, why); };
  auto check_kind = [&] {
    if (!S_ISREG(status.st_mode))
      fail(fmt::format("not a regular file but {}", kind_of_file(status.st_mode)));
  };
  if (stat(path.c_str(), &status) != 0) fail(errno == ENOENT ? "no such file" : std::strerror(errno));
  check_kind();  // checked before open(), because opening a device may have side effects
  // O_NONBLOCK: a FIFO that has replaced the file since the check must not block.
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file || fstat(file.fd(), &status) != 0) fail(std::strerror(errno));
  check_kind();
  return file;
}

bool holds_data(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0;
}

std::string read_regular_file(const std::string& path) {
  return read_from_start(open_regular_file(path).fd(), path);
}

std::string read_from_start(int fd, const std::string& name) {
  std::string text;
  char chunk[1 << 16];
  lseek(fd, 0, SEEK_SET);
  while (true) {
    const ssize_t got = read(fd, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw BadInput("{}: {}", name, std::strerror(errno));
    if (got == 0) return text;
    text.append(chunk, static_cast<size_t>(got));
  }
}

void read_at(int fd, const std::string& name, uint64_t at, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t done = pread(fd, out.data(), out.size(), static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw BadInput("{}: {}", name, std::strerror(errno));
    if (done == 0) throw BadInput("{}: truncated while being read", name);
    at += static_cast<uint64_t>(done), out = out.subspan(static_cast<size_t>(done));
  }
}

int write_fully(int fd, std::string_view bytes) {
  // SIGPIPE and SIGXFSZ are sent to the writing thread: block these signals, and consume the signals that
  // arrived.
  sigset_t signals, before, pending;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, &before);
  sigpending(&pending);
  int error = 0;
  while (!bytes.empty()) {
    const ssize_t done = write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EAGAIN) {  // another process made the pipe non-blocking
      pollfd room{.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&room, 1, -1);
      continue;
    }
    if (done <= 0) {
      error = done < 0 ? errno : EIO;
      break;
    }
    bytes.remove_prefix(static_cast<size_t>(done));
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    if (sigismember(&pending, signal) == 1) sigdelset(&signals, signal);  // not raised by this write
  }
  const timespec now{};
  while (error != 0 && sigtimedwait(&signals, nullptr, &now) > 0) continue;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

void print_error_line(std::string_view text) noexcept {
  try {
    fmt::memory_buffer line;
    fmt::format_to(std::back_inserter(line), "gradwire: {}\n", text);
    std::fflush(stdout);
    write_fully(STDERR_FILENO, {line.data(), line.size()});
  } catch (const std::bad_alloc&) {
    for (const std::string_view part : {std::string_view("gradwire: "), text, std::string_view("\n")})
      write_fully(STDERR_FILENO, part);
  }
}

namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kReaderWithin{10};

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Returns N for the path of this process's descriptor N below /proc/self/fd, or -1.
int descriptor_named(const std::string& path) {
  std::error_code error;
  const std::string folder = fs::canonical(folder_of(path), error).string();
  if (error || !folder.ends_with("/fd")) return -1;
  const std::string own = fs::canonical("/proc/self", error).string();
  if (error || !folder.starts_with(own + "/")) return -1;
  const std::string name = fs::path(path).filename().string();
  return parse_number(name, 0).value_or(-1);
}

// Follows symbolic links. Stops at a path that names a descriptor of this process, and stores the descriptor
// in `descriptor`.
std::string without_links(std::string path, int& descriptor) {
  constexpr int kMaxLinks = 40;  // the kernel's limit
  for (int i = 0; i < kMaxLinks; ++i) {
    if ((descriptor = descriptor_named(path)) >= 0) return path;
    std::error_code error;
    const fs::path next = fs::read_symlink(path, error);
    if (error) return path;
    path = next.is_absolute() ? next.string() : (fs::path(folder_of(path)) / next).string();
  }
  return path;
}

bool same(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Returns a descriptor of standard output for the result that '-' names, or -1. From the first call on, the
// text that the command prints goes to standard error.
int standard_output_for_result() {
  static const int result = [] {
    std::fflush(stdout);
    const int descriptor = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    if (descriptor >= 0) dup2(STDERR_FILENO, STDOUT_FILENO);
    return descriptor;
  }();
  return result;
}

}  // namespace

void OutputFile::refuse(const std::string& why) const {
  throw BadInput("{}: cannot be written: {}; name a file in a folder that exists and is writable",
                 path_.empty() ? "''" : path_, why);
}

void OutputFile::fail(int error) const {
  throw Error("{}: writing failed: {}", path_, std::strerror(error));
}

OutputFile::OutputFile(std::string path, Kind kind) : path_(std::move(path)), kind_(kind) {
  if (path_.empty()) return;
  plan();
  if (how_ == How::stream) open_stream();
}

bool OutputFile::would_be_regular(const std::string& path, Kind kind) {
  OutputFile file;
  file.path_ = path;
  file.kind_ = kind;
  if (path.empty()) file.refuse("the name is empty");
  file.plan();
  return file.is_regular();
}

void OutputFile::plan() {
  const bool dash = path_ == "-" && kind_ == Kind::result;
  if (dash) {
    descriptor_ = standard_output_for_result();
  } else {
    target_ = without_links(path_, descriptor_);
  }
  struct stat status {};
  if (dash || descriptor_ >= 0) {
    if (fstat(descriptor_, &status) != 0) refuse(fmt::format("descriptor {} is not open", descriptor_));
    if ((fcntl(descriptor_, F_GETFL) & O_ACCMODE) == O_RDONLY) {
      refuse(fmt::format("descriptor {} is open for reading only", descriptor_));
    }
    if (kind_ == Kind::private_file) refuse("a regular file is needed");
    how_ = How::stream;
    return;
  }
  if (stat(path_.c_str(), &status) != 0) {
    if (errno != ENOENT) refuse(std::strerror(errno));
    const std::string folder = folder_of(target_);
    auto bad_folder = [&] { refuse(fmt::format("folder {}: {}", folder, std::strerror(errno))); };
    if (stat(folder.c_str(), &status) != 0) bad_folder();
    if (!S_ISDIR(status.st_mode)) refuse(folder + " is not a folder");
    if (access(folder.c_str(), W_OK | X_OK) != 0) bad_folder();
    return;
  }
  const mode_t type = status.st_mode;
  const bool streams = (S_ISCHR(type) || S_ISFIFO(type)) && kind_ == Kind::result;
  if (!S_ISREG(type) && !streams) {
    refuse(S_ISBLK(type) ? "it is a disk" : fmt::format("it is {}", kind_of_file(type)));
  }
  if (streams) {
    if (access(path_.c_str(), W_OK) != 0) refuse(std::strerror(errno));
    how_ = How::stream;
    return;
  }
  // Opens and closes the file: this also detects immutable files and running programs.
  if (!FileDescriptor(open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY))) {
    refuse(std::strerror(errno));
  }
  for (const int standard : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat there {};
    if (kind_ != Kind::result || fstat(standard, &there) != 0 || !same(status, there)) continue;
    descriptor_ = standard;  // the descriptor may already have text that must not be overwritten
    how_ = How::stream;
    return;
  }
  struct stat resolved {};
  const bool found = lstat(target_.c_str(), &resolved) == 0 && same(status, resolved);
  if (!found) target_ = path_;  // the text of the link does not lead to its target
  const bool plain = status.st_nlink == 1 && status.st_uid == geteuid() &&
                     getxattr(target_.c_str(), "system.posix_acl_access", nullptr, 0) <= 0;
  const bool replaceable =
      found && (plain || kind_ == Kind::private_file) && access(folder_of(target_).c_str(), W_OK | X_OK) == 0;
  how_ = replaceable ? How::replace : How::in_place;
  mode_ = status.st_mode & 07777;
  group_ = status.st_gid;
}

void OutputFile::open_stream() {
  if (descriptor_ >= 0) {
    stream_ = FileDescriptor(fcntl(descriptor_, F_DUPFD_CLOEXEC, 3));
    if (!stream_) refuse(std::strerror(errno));
    return;
  }
  // Without O_NONBLOCK, opening a FIFO without a reader would hang.
  const auto deadline = std::chrono::steady_clock::now() + kReaderWithin;
  while (true) {
    stream_ = FileDescriptor(open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (stream_) break;
    if (errno != ENXIO) refuse(std::strerror(errno));
    if (std::chrono::steady_clock::now() >= deadline) {
      refuse(fmt::format("no process has opened this FIFO for reading within {} s", kReaderWithin.count()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  fcntl(stream_.fd(), F_SETFL, fcntl(stream_.fd(), F_GETFL) & ~O_NONBLOCK);
}

void OutputFile::write(std::string_view contents) {
  if (path_.empty()) return;
  if (!begin(contents, Lock::none).close()) fail(errno);
}

FileDescriptor OutputFile::begin(std::string_view contents, Lock lock) {
  if (how_ != How::stream) {
    const bool empties = lock != Lock::none && contents.empty();
    return how_ == How::replace && !empties ? replace(contents, lock) : write_in_place(contents, lock);
  }
  if (!stream_) open_stream();  // an earlier write has closed the stream
  std::fflush(stdout);          // writes earlier output first, where the descriptor is stdout's
  if (const int error = write_fully(stream_.fd(), contents); error != 0) fail(error);
  return std::move(stream_);
}

FileDescriptor OutputFile::open_and_lock(int flags, Lock lock) const {
  constexpr int kTries = 100;  // another process may replace the file between opening and locking
  FileDescriptor file;
  for (int i = 0; i < kTries; ++i) {
    file = FileDescriptor(open(target_.c_str(), flags, 0666));
    if (!file || lock == Lock::none) break;
    if (flock(file.fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK && lock == Lock::take) {
      throw BadInput("{}: another run is writing to it; stop that run, or name another file", path_);
    }
    struct stat locked {
    }, named{};
    if (fstat(file.fd(), &locked) == 0 && lstat(target_.c_str(), &named) == 0 && same(locked, named)) break;
  }
  return file;
}

FileDescriptor OutputFile::replace(std::string_view contents, Lock lock) {
  // Holds the old file's lock until the new file, which is locked from the start, is in place.
  FileDescriptor old;
  if (lock == Lock::take) old = open_and_lock(O_WRONLY | O_CLOEXEC, lock);
  const bool is_private = kind_ == Kind::private_file;
  const std::string temporary = temporary_name_beside(target_);
  FileDescriptor file(open(temporary.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                           is_private ? 0600 : 0666));
  int error = file ? 0 : errno;
  if (file) {
    if (lock != Lock::none) flock(file.fd(), LOCK_EX | LOCK_NB);
    struct stat status {};
    // In a group that this user may not set, write in place, which keeps the group.
    if (mode_ != 0 && !is_private &&
        (fstat(file.fd(), &status) != 0 ||
         (status.st_gid != group_ && fchown(file.fd(), static_cast<uid_t>(-1), group_) != 0) ||
         fchmod(file.fd(), mode_) != 0)) {
      error = EPERM;
    }
    if (error == 0) error = write_fully(file.fd(), contents);
    if (error == 0 && std::rename(temporary.c_str(), target_.c_str()) == 0) return file;
    if (error == 0) error = errno;
    unlink(temporary.c_str());
  }
  const bool in_place =
      is_unsupported(error) || error == EBUSY || error == EXDEV || error == EROFS || error == ENAMETOOLONG;
  if (!in_place) fail(error);
  old.close();
  return write_in_place(contents, lock);
}

FileDescriptor OutputFile::write_in_place(std::string_view contents, Lock lock) {
  // O_CREAT creates a missing file, in a folder that allows new files but not renaming.
  FileDescriptor file =
      open_and_lock(O_WRONLY | O_CREAT | O_NOCTTY | O_CLOEXEC | O_NONBLOCK |
                        (lock != Lock::none ? O_APPEND : 0) | (how_ == How::replace ? O_NOFOLLOW : 0),
                    lock);
  struct stat status {};
  if (!file || fstat(file.fd(), &status) != 0) fail(errno);
  if (!S_ISREG(status.st_mode)) fail(EINVAL);  // another kind of file has replaced it
  if (kind_ == Kind::private_file && fchmod(file.fd(), 0600) != 0) fail(errno);
  // Empty the file first only if lines will be appended. Otherwise the existing blocks of the file are reused
  // on a full disk. Some file systems cannot change the size, so ask only for a change.
  if (lock != Lock::none && status.st_size > 0 && ftruncate(file.fd(), 0) != 0) fail(errno);
  const int error = write_fully(file.fd(), contents);
  const off_t end = lseek(file.fd(), 0, SEEK_CUR);
  const bool cut =
      fstat(file.fd(), &status) == 0 && (status.st_size == end || ftruncate(file.fd(), end) == 0);
  if (!cut || error != 0) fail(error != 0 ? error : errno);
  return file;
}

void check_all_different(const std::vector<NamedFile>& files) {
  const auto resolved = [](const std::string& path) {
    int descriptor = -1;
    return fs::weakly_canonical(fs::absolute(without_links(path, descriptor)));
  };
  for (auto b = files.begin(); b != files.end(); ++b) {
    for (auto a = files.begin(); a != b; ++a) {
      if (a->path.empty() || b->path.empty() || (!a->written && !b->written)) continue;
      std::error_code error;  // of a file that does not exist yet
      // Several outputs may go to one device. Standard libraries differ in whether a device equals itself.
      if (fs::is_other(a->path, error)) continue;
      const bool both = fs::equivalent(a->path, b->path, error) ||
                        (!fs::exists(a->path, error) && resolved(a->path) == resolved(b->path));
      if (!both) continue;
      throw BadInput("{} {} and {} {} are the same file; name another for one of them", a->flag, a->path,
                     b->flag, b->path);
    }
  }
}

void remove_output(const std::string& path) noexcept try {
  int descriptor = -1;
  const std::string target = without_links(path, descriptor);
  struct stat status {};
  if (descriptor >= 0 || lstat(target.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return;
  if (unlink(target.c_str()) == 0) return;
  [[maybe_unused]] const int ignored = truncate(target.c_str(), 0);
} catch (const std::exception&) {
}

std::string temporary_name_beside(const std::string& path) {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) {
    throw Error("no random numbers from the kernel: {}", std::strerror(errno));
  }
  // The name is independent of the file's name, which may have the maximum length.
  return (fs::path(folder_of(path)) / fmt::format(".gradwire-{:016x}.tmp", number)).string();
}

namespace {

std::mutex mutex;
std::set<std::string> lost, warned;

}  // namespace

void lose_output(const std::string& path, const std::string& why) {
  {
    std::lock_guard lock(mutex);
    if (!lost.insert(path).second) return;
  }
  warn_once(fmt::format("{}; the run continues without this file", why));
}

bool output_lost(const std::string& path) {
  std::lock_guard lock(mutex);
  return lost.contains(path);
}

bool any_output_lost() {
  std::lock_guard lock(mutex);
  return !lost.empty();
}

void warn_once(const std::string& text) {
  {
    std::lock_guard lock(mutex);
    if (!warned.insert(text).second) return;
  }
  print_error_line("warning: " + text);
}

void prepare_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() returns the lowest free descriptor, which is `fd`. Without /dev, use a descriptor that refuses
    // writes.
    if (open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) < 0) open("/", O_PATH);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

int above_standard_descriptors(int fd) {
  if (fd < STDIN_FILENO || fd > STDERR_FILENO) return fd;
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(fd);
  errno = error;
  return copy;
}

}  // namespace gradwire
