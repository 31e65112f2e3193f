#include "collectives/c_api/errors.h"

#include <iterator>
#include <new>

#include "runtime/threads/thread.h"
#include "runtime/util/hash.h"

namespace gradwire::c_api {
namespace {

// An array, because the C library ends the process if it cannot register a destructor for the thread.
thread_local char last_error[2048];

// Stores the text without allocating. Ends a longer text between two characters of UTF-8, with "...".
gw_status fail(gw_status status, const char* function, const char* text) noexcept {
  constexpr size_t kMax = sizeof last_error - sizeof "...";
  auto [end, bytes] = fmt::format_to_n(last_error, sizeof last_error - 1, "{}: {}", function, text);
  if (bytes > sizeof last_error - 1) {
    for (end = last_error + kMax; (*end & 0xc0) == 0x80;) --end;
    end = fmt::format_to(end, "...");
  }
  *end = 0;
  return status;
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
    try {
      return fail(GW_NO_MEMORY, function, no_memory_text().c_str());
    } catch (...) {
      return fail(GW_NO_MEMORY, function, "out of host memory");
    }
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

namespace gradwire::c_api {

namespace {

constexpr size_t kMaxTagBytes = 1000, kShownTagBytes = 72;

// Returns the length in bytes of the UTF-8 character at `at`; 0 for an invalid character, such as an overlong
// form, a surrogate, or a character above U+10FFFF.
size_t character_length(const std::string& text, size_t at) {
  auto byte = [&](size_t i) {
    return at + i < text.size() ? static_cast<uint8_t>(text[at + i]) : uint8_t{0};
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool surrogate = first == 0xed && byte(1) > 0x9f;
  const bool too_large = first == 0xf4 && byte(1) > 0x8f;
  return overlong || surrogate || too_large ? 0 : length;
}

bool is_control(char c) {
  return static_cast<unsigned char>(c) < ' ' || c == '\x7f';
}

}  // namespace

void check_text(const std::string& text, const std::string& what) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text, at);
    require(length > 0, "{} is not UTF-8: byte {} is 0x{:02x}", what, at, static_cast<uint8_t>(text[at]));
    require(!is_control(text[at]), "{} has a control character: byte {} is 0x{:02x}", what, at,
            static_cast<uint8_t>(text[at]));
    at += length;
  }
}

std::string printable(std::string text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text, at);
    if (length == 0 || is_control(text[at])) text[at] = '?';
    at += length > 0 ? length : 1;
  }
  return text;
}

std::string checked_tag(const char* tag) {
  std::string text = tag != nullptr ? tag : "";
  require(text.size() <= kMaxTagBytes, "tag has {} bytes, at most {} are allowed", text.size(), kMaxTagBytes);
  check_text(text, "tag");
  return text;
}

std::string shown(const std::string& tag) {
  if (tag.empty()) return "";
  if (tag.size() <= kShownTagBytes) return fmt::format(" '{}'", tag);
  // Do not cut UTF-8 characters.
  auto begins = [&](size_t at) { return (static_cast<uint8_t>(tag[at]) & 0xc0) != 0x80; };
  size_t front = kShownTagBytes / 2, back = tag.size() - kShownTagBytes / 2;
  while (!begins(front)) --front;
  while (back < tag.size() && !begins(back)) ++back;
  return fmt::format(" '{}...{}' #{:08x}", tag.substr(0, front), tag.substr(back), mix(0, tag) >> 32);
}

}  // namespace gradwire::c_api
