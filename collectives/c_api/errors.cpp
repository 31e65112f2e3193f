#include "collectives/c_api/errors.h"

#include <iterator>
#include <new>

#include "runtime/threads/resources.h"

namespace gradwire::c_api {
namespace {

// An array, because the C library ends the process if it cannot register a destructor for the thread.
thread_local char last_error[2048];

// Stores the text without allocating. Ends a longer text between two characters of UTF-8, with "...".
gw_status fail(gw_status status, const char* function, const char* text) noexcept {
  constexpr size_t kMost = sizeof last_error - sizeof "...";
  auto [end, bytes] = fmt::format_to_n(last_error, sizeof last_error - 1, "{}: {}", function, text);
  if (bytes > sizeof last_error - 1) {
    for (end = last_error + kMost; (*end & 0xc0) == 0x80;) --end;
    end = fmt::format_to(end, "...");
  }
  *end = 0;
  return status;
}

gw_status no_memory(const char* function) noexcept {
  try {
    return fail(GW_NO_MEMORY, function, no_memory_text().c_str());
  } catch (...) {
    return fail(GW_NO_MEMORY, function, "out of host memory");
  }
}

}  // namespace

gw_status status_of_current_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const BadInput& e) {
    return fail(GW_BAD_ARGUMENT, function, e.what());
  } catch (const BadHandle& e) {
    return fail(GW_BAD_HANDLE, function, e.what());
  } catch (const Unsupported& e) {
    return fail(GW_UNSUPPORTED, function, e.what());
  } catch (const NotDone& e) {
    return fail(GW_NOT_DONE, function, e.what());
  } catch (const CommError& e) {
    return fail(GW_COMM_FAILED, function, e.what());
  } catch (const DeviceError& e) {
    return fail(GW_DEVICE_FAILED, function, e.what());
  } catch (const OutOfResources& e) {
    return fail(GW_NO_MEMORY, function, e.what());
  } catch (const std::bad_alloc&) {
    return no_memory(function);
  } catch (const std::exception& e) {
    return fail(GW_INTERNAL, function, e.what());
  } catch (...) {
    return fail(GW_INTERNAL, function, "an exception of unknown type");
  }
}

}  // namespace gradwire::c_api

extern "C" {

const char* gw_last_error(void) {
  return gradwire::c_api::last_error;
}

const char* gw_status_string(gw_status status) {
  constexpr const char* kNames[] = {"GW_OK",          "GW_BAD_ARGUMENT",  "GW_BAD_HANDLE",
                                    "GW_COMM_FAILED", "GW_DEVICE_FAILED", "GW_UNSUPPORTED",
                                    "GW_NO_MEMORY",   "GW_INTERNAL",      "GW_NOT_DONE"};
  static_assert(std::size(kNames) == GW_NOT_DONE + 1);
  return status >= GW_OK && status <= GW_NOT_DONE ? kNames[status] : "not a gw_status";
}

int gw_version(void) {
  return GW_VERSION_MAJOR * 10000 + GW_VERSION_MINOR * 100 + GW_VERSION_PATCH;
}

}  // extern "C"
