// Maps exceptions to statuses.
#pragma once

#include <gradwire/gradwire.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/util/error.h"

namespace gradwire::c_api {

// The exceptions for statuses that only the C ABI has.
struct BadHandle : Error {
  using Error::Error;
};
struct Unsupported : Error {
  using Error::Error;
};
struct NotDone : Error {
  using Error::Error;
};

// Returns the status for the current exception, and stores "FUNCTION: text" for gw_last_error(). Must be
// called in a catch block.
gw_status status_of_current_exception(const char* function) noexcept;

// Runs `body`; never throws. Maps exceptions to a status, and restores the caller's current CUDA device.
template <typename Body>
gw_status guarded(const char* function, Body&& body) noexcept {
  const detail::CallersDevice callers_device;
  try {
    body();
    return GW_OK;
  } catch (...) {
    return status_of_current_exception(function);
  }
}

// Checks the caller's texts, which are sent to other ranks, saved or printed.

// Throws BadInput, with a message that begins with `what`, unless the text is UTF-8 without control
// characters.
void check_text(const std::string& text, const std::string& what);
// Returns the text with '?' for each byte that check_text() rejects.
std::string printable(std::string text);

// Returns a caller's tag; "" if the tag is null. Throws BadInput for an invalid tag.
std::string checked_tag(const char* tag);
// Returns " 'TAG'" for error texts; "" without a tag. A long tag is shortened in the middle and gets a
// digest, so that different tags have different texts.
std::string shown(const std::string& tag);

// Converts between gw_dtype and DType.

// Returns the DType of a gw_dtype. Throws BadInput for an invalid type. `whose` begins the error text: "" or
// "tensor 3 ('bias'): ".
inline DType checked_dtype(gw_dtype dtype, const std::string& whose = {}) {
  constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
  require(dtype >= 0 && dtype <= GW_FLOAT16, "{}dtype {} is none of GW_FLOAT32, GW_BFLOAT16, GW_FLOAT16",
          whose, dtype);
  return kTypes[dtype];
}

// Returns the name that frameworks use for the type.
constexpr const char* long_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
}

// Copies structs from and to callers, which may have been compiled with another version of the header.

// Returns a copy of a caller's struct. A longer struct must have zeros after the fields that this version
// knows. A shorter struct, of at least `least` bytes, is extended with zeros.
template <typename Struct>
Struct read_struct(const void* from, const char* what, size_t least = sizeof(Struct)) {
  constexpr size_t kMaxBytes = 4096;  // a larger size means that the caller did not initialize the struct
  size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  require(size >= least && size <= kMaxBytes, "{0}.size is {1}; set it to sizeof({0}), which is {2}", what,
          size, sizeof(Struct));
  const auto* bytes = static_cast<const unsigned char*>(from);
  require<Unsupported>(std::all_of(bytes + std::min(sizeof(Struct), size), bytes + size,
                                   [](unsigned char b) { return b == 0; }),
                       "{} uses fields that this version of the library does not know", what);
  Struct result{};
  std::memcpy(&result, from, std::min(sizeof result, size));
  return result;
}

// Fills a caller's struct. The caller has set the struct's field `size`.
template <typename Struct>
void write_struct(const Struct& from, Struct* to, const char* what) {
  size_t size = 0;
  std::memcpy(&size, to, sizeof size);
  require(size >= sizeof(Struct), "{0}.size is {1}; set it to sizeof({0}), which is {2}", what, size,
          sizeof(Struct));
  std::memcpy(to, &from, sizeof from);
  to->size = size;
}

// Handles are numbers that are never reused, looked up in a table of live objects. So a destroyed handle is
// always recognized, and an invalid handle is never dereferenced.

// The handles of one type of object. `kind` (1..7) is part of the number and distinguishes the types.
template <typename Object>
class Handles {
 public:
  Handles(uintptr_t kind, const char* type_name) : kind_(kind), type_name_(type_name) {}

  void* add(std::shared_ptr<Object> object) {
    std::lock_guard lock(mutex_);
    uintptr_t number = (++last_ << 3) | kind_;
    live_.emplace(number, std::move(object));
    return reinterpret_cast<void*>(number);
  }

  // Returns the object, which lives as long as the caller holds the pointer, even if the handle is destroyed.
  std::shared_ptr<Object> get(const void* handle) {
    std::lock_guard lock(mutex_);
    return find(handle)->second;
  }

  // Removes the handle. Returns the object, so that the caller destroys the object outside of the lock:
  // destructors wait for work in flight.
  std::shared_ptr<Object> remove(const void* handle) {
    std::lock_guard lock(mutex_);
    auto at = find(handle);
    auto object = std::move(at->second);
    live_.erase(at);
    return object;
  }

 private:
  auto find(const void* handle) {
    const auto number = reinterpret_cast<uintptr_t>(handle);
    auto at = live_.find(number);
    if (at != live_.end()) return at;
    const char* problem = "is not a handle";
    if (number == 0) {
      problem = "is null";
    } else if ((number & 7) == kind_ && (number >> 3) <= last_) {
      problem = "was destroyed";
    }
    throw BadHandle("the {} handle {}", type_name_, problem);
  }

  const uintptr_t kind_;
  const char* const type_name_;
  std::mutex mutex_;
  uintptr_t last_ = 0;
  std::unordered_map<uintptr_t, std::shared_ptr<Object>> live_;
};

struct ApiComm;
struct ApiReducer;
struct ApiRequest;

// Returns the table of communicators. The table is never destroyed, because threads may still be inside calls
// while static destructors run.
Handles<ApiComm>& comms();
Handles<ApiReducer>& reducers();
Handles<ApiRequest>& requests();

}  // namespace gradwire::c_api
