// File descriptors, reading of regular files, and writing that raises no signal.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// Returns whether `path` is a regular file that is not empty.
bool holds_data(const std::string& path);

// Returns the contents of a regular file. Throws the same errors as open_regular_file().
std::string read_regular_file(const std::string& path);
// Returns the contents of an open file, from its first byte. Throws BadInput, which names `name`.
std::string read_from_start(int fd, const std::string& name);

// Reads the bytes at offset `at`. Throws BadInput, which names `name`, also if the file ends before.
void read_at(int fd, const std::string& name, uint64_t at, std::span<std::byte> out);

// Writes all bytes. Returns 0 or an errno. Returns EPIPE for a pipe without a reader and EFBIG for a file
// beyond `ulimit -f`, without raising SIGPIPE or SIGXFSZ.
int write_fully(int fd, std::string_view bytes);

// Writes "gradwire: TEXT" as a line to standard error, after the contents of stdout's buffer. If the reader
// is gone, the line is lost and the process continues: a library's lines must not raise SIGPIPE.
void print_error_line(std::string_view text) noexcept;

// Files that a command writes for its user. The kind of file that the path names determines how the file is
// written, before the work begins:
//
//   no file yet, or a plain file of this user    a private temporary file next to it, then a rename: a reader
//                                                sees the old contents or the new; the mode is kept
//   a symbolic link                              its target is written, as above; the link stays
//   a file with hard links, an ACL or another    written in place, so that links, owner and mode stay
//   owner, or in a folder that is not writable
//   a character device or a FIFO                 opened before the work, and written into
//   /dev/stdout, /dev/fd/N, >(command)           written to that descriptor, after its earlier output
//   -                                            standard output; all other text goes to standard error
//
// Where the rename is refused, as on a bind mount, or not supported, the file is written in place.

class OutputFile {
 public:
  // The kind of contents. private_file: mode 600, always a regular file, and a new file if possible.
  enum class Kind { result, private_file };

  // Creates an object without a file, as an empty path does; write() then does nothing.
  OutputFile() = default;
  // Opens devices, FIFOs and descriptors; creates nothing. A FIFO needs a reader within 10 s. Throws BadInput
  // with the reason if the file cannot be written.
  explicit OutputFile(std::string path, Kind kind = Kind::result);

  const std::string& path() const { return path_; }
  // Returns false for devices, FIFOs and descriptors, true if the file does not exist yet.
  bool is_regular() const { return how_ == How::replace || how_ == How::in_place; }

  // Returns is_regular() for `path` without opening files. Throws BadInput if a file cannot be written at
  // `path`.
  static bool would_be_regular(const std::string& path, Kind kind = Kind::result);

  // Replaces the contents. Throws Error on failure; a plain file then has its old contents.
  void write(std::string_view contents);

  enum class Lock {
    none,
    take,  // throws BadInput if another process holds the lock
    steal  // takes the lock from a process that must stop writing, or continues without a lock
  };
  // Replaces the contents like write(), locks the file while the result is open, and returns it open for
  // appending. Only regular files are locked. Empties a file in place, so that its readers follow it.
  FileDescriptor begin(std::string_view contents, Lock lock);

 private:
  enum class How { replace, in_place, stream };
  void plan();
  void open_stream();
  FileDescriptor replace(std::string_view contents, Lock lock);
  FileDescriptor write_in_place(std::string_view contents, Lock lock);
  FileDescriptor open_and_lock(int flags, Lock lock) const;
  [[noreturn]] void refuse(const std::string& why) const;
  [[noreturn]] void fail(int error) const;

  std::string path_;    // the path as given
  std::string target_;  // the path without links
  Kind kind_ = Kind::result;
  How how_ = How::replace;
  int descriptor_ = -1;  // the descriptor that the path names, not owned
  mode_t mode_ = 0;      // mode of the existing file; 0: no file exists
  gid_t group_ = 0;
  FileDescriptor stream_;
};

struct NamedFile {
  std::string flag;
  std::string path;  // empty if the flag is not given
  bool written = true;
};
// Throws BadInput if a written file is another of `files`, also by a link, because it would be overwritten.
void check_all_different(const std::vector<NamedFile>& files);

// Removes a regular file, not a link to it. If the system refuses, as for a bind mount, empties the file.
void remove_output(const std::string& path) noexcept;

// Returns an unpredictable name in the folder of `path`, for a temporary file.
std::string temporary_name_beside(const std::string& path);

// Reports a lost output; the run continues, because side work never ends a run. Each path or text is reported
// once, on stderr. A command that has lost an output ends with exit code 1.
void lose_output(const std::string& path, const std::string& why);
bool output_lost(const std::string& path);
bool any_output_lost();
void warn_once(const std::string& text);

// Handling of the descriptors 0 to 2, and of the signal of a pipe without a reader.

// Opens /dev/null on each closed descriptor of 0 to 2, so that files and connections never become standard
// input, output or error. Called by programs before they open files. Ignores SIGPIPE: writing to a closed
// pipe or terminal fails with an error instead of ending the process in the middle of a checkpoint. Also
// ignores SIGXFSZ: a file that would exceed `ulimit -f` gives an error.
void prepare_standard_descriptors();

// Returns `fd` or, if `fd` is at most 2, a copy above 2, and closes `fd`. Used by libraries, whose caller may
// have closed some of these descriptors. -1 stays -1. Returns -1, with errno set, when no descriptor is left.
int above_standard_descriptors(int fd);

// Paths that users write.

// Returns the problem with a path that would name an unintended file, or "":
//   ~...        only a shell expands ~, and only at the beginning of a word: not in --log=~/run.jsonl
//   -           standard input or output, where a file is needed
//   s3://...    a URL, which open(2) takes for a folder "s3:"
inline std::string path_problem(const std::string& path) {
  const auto problem = [&](const std::string& why, const std::string& write) {
    return "'" + path + "' " + why + "; write " + write + ", or './" + path + "' for a file of that name";
  };
  if (path.starts_with("~")) {
    const bool own = path == "~" || path.starts_with("~/");
    return problem("begins with ~, which the shell did not expand",
                   own ? "\"$HOME" + path.substr(1) + "\"" : "the whole path");
  }
  if (path == "-") return problem("means standard input or output, but a file is needed", "its name");
  const size_t scheme = path.find("://");
  if (scheme == std::string::npos || scheme == 0 || path.find('/') != scheme + 1) return "";
  const std::string rest = path.substr(scheme + 3);
  return problem("is a URL, but only files can be read and written",
                 path.starts_with("file:///") ? rest : "the path at which that storage is mounted");
}

}  // namespace gradwire
