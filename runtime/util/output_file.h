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
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/util/file.h"

namespace gradwire {

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
    take,  // throws BadInput if another process holds the lock
    steal  // takes the lock from a process that must stop writing, or continues without a lock
  };
  // Locks the file while the result is open, empties it, and returns it open for appending. Only regular
  // files are locked.
  FileDescriptor begin(Lock lock);
  // Does the same as begin(), but replaces the contents with `contents`, as write() does.
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

  std::string path_;    // the path as given
  std::string target_;  // the path without links
  Kind kind_ = Kind::result;
  How how_ = How::replace;
  int descriptor_ = -1;  // the descriptor that the path names, not owned
  mode_t mode_ = 0;      // mode of the existing file; 0: there is no file
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

// Throws BadInput if a file cannot be written at `path`. Does not create or open files.
inline void check_writable(const std::string& path, OutputFile::Kind kind = OutputFile::Kind::result) {
  OutputFile::would_be_regular(path, kind);
}

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

}  // namespace gradwire
