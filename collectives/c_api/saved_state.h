// The bytes of a reducer's checkpoint: one self-describing block of memory. docs/checkpoints.md documents the
// layout for readers. A change of the layout must change docs/checkpoints.md and kVersion.
//
//   header    magic "GRADWIRE", version, CRC-32 of everything after the header, total bytes, steps, tensors
//   identity  length and text: what the loading reducer must match
//   tensors   each: name, rows, cols and its entries; each entry: kind, dtype, count and the elements
// Integers and floats are little-endian, and texts and elements are not padded. Values are stored by tensor
// rather than by bucket, so that a state can be loaded with another bucket size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device/dtype.h"

namespace gradwire::c_api {

// A piece of a tensor's state, in the bytes of a checkpoint.
struct SavedEntry {
  std::string kind;
  DType dtype = DType::f32;
  uint64_t count = 0;
  const char* data = nullptr;  // not aligned

  size_t bytes() const { return count * static_cast<size_t>(bytes_of(dtype)); }
  bool is_zero() const;
  // Returns a copy of the elements, which must be FP32.
  std::vector<float> floats() const;
};

struct SavedTensor {
  int64_t rows = 0, cols = 0;
  std::string name = {};
  std::vector<SavedEntry> entries = {};
};

// The run and the rank that a state belongs to.
struct SavedIdentity {
  std::string run;  // spec, mean or sum, seed
  int rank = 0, world = 0;

  // Parses "spec S; rank R of N; mean; seed 0".
  static SavedIdentity parse(const std::string& text);
  std::string place() const;
};

struct SavedState {
  std::string identity_text;
  SavedIdentity identity = {};
  int64_t steps = 0;
  std::vector<SavedTensor> tensors = {};

  // Parses untrusted bytes, which must outlive the result. Throws BadInput for an invalid state.
  static SavedState parse(const void* state, size_t size);
};

// Writes a state. The caller determines the state's size with size() and the static functions.
class StateWriter {
 public:
  static size_t header_bytes(const std::string& identity);
  static size_t tensor_bytes(const std::string& name);
  static size_t entry_bytes(const std::string& kind, size_t bytes);

  // Writes the identity to `state`. Later calls append entries.
  StateWriter(void* state, const std::string& identity);
  void add_tensor(int64_t rows, int64_t cols, const std::string& name, size_t entries);
  // Adds an entry. Returns the memory for the entry's elements, (count), which the caller fills.
  std::byte* add_entry(DType dtype, int64_t count, const std::string& kind);
  // Writes the header, after the caller has filled in all elements.
  void finish(int64_t steps);

 private:
  void put(const void* from, size_t bytes);

  char* const begin_;
  char* at_;
  const uint32_t identity_bytes_;
  uint32_t tensors_ = 0;
};

}  // namespace gradwire::c_api
