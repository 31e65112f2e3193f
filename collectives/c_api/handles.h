// Handles are numbers that are never reused, looked up in a table of live objects. So a destroyed handle is
// always recognized, and an invalid handle is never dereferenced.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "collectives/c_api/errors.h"

namespace gradwire::c_api {

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
    throw BadHandle(fmt::format("the {} handle {}", type_name_, problem));
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
