// Files that a command leaves behind for its user. How a file is written is decided before the work begins, from what
// its name stands for:
//
//   nothing yet, or a plain file of this user    a private temporary file beside it, then a rename: a reader sees the
//                                                old contents or the new; the mode is kept
//   a symbolic link                              its target, as above; the link stays
//   a file with hard links, an ACL or another    written in place, so that links, owner and mode stay
//   owner, or in a folder that is not writable
//   a character device or a FIFO                 opened before the work, and written into
//   /dev/stdout, /dev/fd/N, >(command)           written to that descriptor, after what it has got so far
//
// Where the rename is refused, as for a bind mount, the file is written in place.
#pragma once

#include <string>
#include <string_view>

#include "runtime/file.h"

namespace gradwire {

class OutputFile {
 public:
  // private_file: mode 600, always a regular file, and a fresh one where that is possible.
  enum class Kind { result, private_file };

  // Writes nothing. An empty path stands for no file: write() does nothing.
  OutputFile() = default;
  // Opens devices, FIFOs and descriptors; creates nothing. A FIFO needs a reader within 10 s. Throws BadInput, which says
  // why the file cannot be written.
  explicit OutputFile(std::string path, Kind kind = Kind::result);

  const std::string& path() const { return path_; }
  // False for devices, FIFOs and descriptors. True if the file does not exist yet.
  bool is_regular() const { return how_ == How::replace || how_ == How::in_place; }

  // The same without opening anything. Throws BadInput if no file can be written there.
  static bool would_be_regular(const std::string& path, Kind kind = Kind::result);

  // Replaces the contents. Throws Error when that fails; a plain file then has its old contents.
  void write(std::string_view contents);

  enum class Lock {
    take,  // throws BadInput if another process holds it
    steal  // takes it from a holder that must not write any more, or continues without a lock
  };
  // Locks the file for as long as the result is open, empties it, and returns it open for appending. Only regular files
  // are locked.
  FileDescriptor begin(Lock lock);
  // The same, with new contents, which replace the old ones as write() does.
  FileDescriptor begin_with(std::string_view contents, Lock lock);

 private:
  enum class How { replace, in_place, stream };
  void plan();
  void plan_new();
  void open_stream();
  FileDescriptor replace(std::string_view contents, const Lock* lock);
  FileDescriptor write_in_place(std::string_view contents, const Lock* lock);
  FileDescriptor put(std::string_view contents, const Lock* lock);
  [[noreturn]] void refuse(const std::string& why) const;
  [[noreturn]] void fail(int error) const;

  std::string path_;    // as given
  std::string target_;  // without links
  Kind kind_ = Kind::result;
  How how_ = How::replace;
  int descriptor_ = -1;  // that the path names, not owned
  mode_t mode_ = 0;      // of the existing file; 0: a new one
  gid_t group_ = 0;
  FileDescriptor stream_;
};

// Throws BadInput if no file can be written at `path`. Creates and opens nothing.
inline void check_writable(const std::string& path, OutputFile::Kind kind = OutputFile::Kind::result) {
  OutputFile::would_be_regular(path, kind);
}

// Removes a regular file, not a link to it. Where that is refused, as for a bind mount, empties it.
void remove_output(const std::string& path) noexcept;

// Returns a name in the folder of `path` that nobody can foresee, for a temporary file.
std::string temporary_name_beside(const std::string& path);

// Side work never ends a run: report what is lost, and continue. Each path or text is reported once, on stderr.
// A command that has lost an output ends with exit code 1.
void lose_output(const std::string& path, const std::string& why);
bool output_lost(const std::string& path);
bool any_output_lost();
void warn_once(const std::string& text);

}  // namespace gradwire
