// File descriptors, reading of regular files, and writing that raises no signal.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <utility>

namespace gradwire {

// Owns a file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    FileDescriptor moved(std::move(other));
    std::swap(fd_, moved.fd_);
    return *this;
  }
  ~FileDescriptor() { close(); }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  // Closes the descriptor. Returns false when close(2) reports an error, as file systems with delayed writes
  // may do.
  bool close();

 private:
  int fd_;
};

// Returns "a folder", "a FIFO", "a device", "a socket" or "a regular file".
const char* kind_of_file(mode_t mode);

// Returns whether `error` says that a file system does not offer the operation, rather than that it failed,
// as EIO and ENOSPC do. File systems of networks and of user space choose among these errors.
bool is_unsupported(int error);

// Opens a regular file for reading. Never blocks. Throws BadInput, which names `path` and its kind, for
// FIFOs, devices and folders, and when the file is missing or unreadable.
FileDescriptor open_regular_file(const std::string& path);

// Returns the contents of a regular file. Throws the same errors as open_regular_file().
std::string read_regular_file(const std::string& path);
// Returns the contents of an open file, from its first byte. Throws BadInput, which names `name`.
std::string read_from_start(int fd, const std::string& name);

// Writes all bytes. Returns 0 or an errno. Returns EPIPE for a pipe without a reader and EFBIG for a file
// beyond `ulimit -f`, without raising SIGPIPE or SIGXFSZ.
int write_fully(int fd, std::string_view bytes);

// Writes "gradwire: TEXT" as a line to standard error, after the contents of stdout's buffer. If the reader
// is gone, the line is lost and the process continues: a library's lines must not raise SIGPIPE.
void print_error_line(std::string_view text) noexcept;

}  // namespace gradwire
