// Files of named tensors in the safetensors format, which PyTorch and most other frameworks read.
//
//   8 bytes   length of the header, little-endian
//   header    JSON: {"__metadata__": {KEY: TEXT},
//                    NAME: {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}}
//   data      the tensors in order, without gaps
//
// Files written by this module have a CRC-32 (zlib's) in their metadata, so that no run continues from a
// damaged file. The CRC covers header and data, with the checksum's digits taken as zeros. Other readers
// ignore the CRC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {

// Writes a file. One writer creates the file. Writers in other threads or processes may open the file and
// write parts of its data. They must close the file before the creating writer finishes the file.
class SafetensorsWriter {
 public:
  struct Entry {
    std::string name;
    std::vector<int64_t> shape;
    DType dtype = DType::f32;
  };
  // The bytes that a writer has written, and its part of the checksum of the whole file.
  struct Written {
    uint64_t bytes = 0;
    uint32_t crc = 0;
    Written& operator+=(const Written& other);
  };
  // Creates `path`, which must not exist. All calls throw Error, not BadInput: a full disk is not bad input.
  SafetensorsWriter(std::string path, const std::map<std::string, std::string>& metadata,
                    const std::vector<Entry>& entries);
  // Opens a file that another writer has created.
  explicit SafetensorsWriter(std::string path);
  // Writes values after the previously written values. The first write() starts at the first value of the
  // first tensor.
  void write(std::span<const float> values) { write(std::as_bytes(values)); }
  void write(std::span<const std::byte> values) { put(values.data(), values.size_bytes()); }
  // Sets the position of write() to byte `first` of a tensor.
  void seek(const std::string& tensor, uint64_t first);
  const Written& written() const { return written_; }  // includes the header for the creating writer
  // Syncs and closes a file that another writer finishes.
  void close();
  // Writes the checksum, syncs and closes. Throws Error unless the writers together wrote as many bytes as
  // the header declares. Callable only for the writer that created the file.
  void finish(const Written& by_others);
  void finish() { finish(Written()); }

 private:
  void put(const void* data, size_t bytes);
  [[noreturn]] void fail() const;

  std::string path_;
  FileDescriptor file_;
  std::map<std::string, uint64_t> begins_;  // offset of each tensor in the file
  uint64_t at_ = 0, end_ = 0;
  Written written_;
  uint64_t crc_digits_at_ = 0;
};

class SafetensorsReader {
 public:
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0, bytes = 0;  // position and size in the file's data
    int64_t elements = 0;
  };

  // Reads only the header, and checks every size in the header against the file size before use. Throws
  // BadInput, which names the file and the problem.
  explicit SafetensorsReader(std::string path);

  const std::string& path() const { return path_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }  // tensors in file order
  uint64_t data_at() const { return data_at_; }                    // offset of the data in the file
  uint64_t file_bytes() const { return file_bytes_; }
  const Tensor* find(const std::string& name) const;  // null if the file has no such tensor

  // Verifies the checksum of the whole file. Throws BadInput if the checksum is wrong, or if `required` and
  // the file has no checksum.
  void verify(bool required) const;
  // Reads elements [first, first + out.size()) of a tensor, which must be F32.
  void read(const Tensor& tensor, int64_t first, std::span<float> out) const;
  // Reads bytes [first, first + out.size()) of a tensor of any type.
  void read_bytes(const Tensor& tensor, uint64_t first, std::span<std::byte> out) const;

 private:
  void read_header();
  void add_tensor(const std::string& name, const void* json);
  // Sorts the tensors, and checks that they cover the data without gaps or overlaps. This detects truncated
  // and shifted files.
  void index_tensors();
  void read_at(uint64_t at, void* out, size_t bytes) const;
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> why, Args&&... args) const {
    throw BadInput("{}: {}", path_, fmt::format(why, std::forward<Args>(args)...));
  }
  // Throws BadInput, which names the file's actual kind if foreign_kind() recognizes it, otherwise `why`.
  [[noreturn]] void refuse_kind(const std::string& why) const;

  std::string path_;
  FileDescriptor file_;
  uint64_t file_bytes_ = 0, data_at_ = 0;
  std::string header_;
  std::map<std::string, std::string> metadata_;
  std::vector<Tensor> tensors_;
  std::map<std::string, size_t> index_;
};

}  // namespace gradwire
