// Tags: the names of calls and reducers.
#include <fmt/format.h>

#include <cstdint>

#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/text.h"
#include "runtime/util/mix.h"

namespace gradwire::c_api {
namespace {

constexpr size_t kMostBytes = 1000, kShown = 72;

}  // namespace

std::string checked_tag(const char* tag) {
  std::string text = tag != nullptr ? tag : "";
  require(text.size() <= kMostBytes, "tag has {} bytes, at most {} are allowed", text.size(), kMostBytes);
  check_text(text, "tag");
  return text;
}

std::string quoted(const std::string& tag) {
  if (tag.empty()) return "";
  if (tag.size() <= kShown) return fmt::format(" '{}'", tag);
  // Do not cut UTF-8 characters.
  auto begins = [&](size_t at) { return (static_cast<uint8_t>(tag[at]) & 0xc0) != 0x80; };
  size_t front = kShown / 2, back = tag.size() - kShown / 2;
  while (!begins(front)) --front;
  while (back < tag.size() && !begins(back)) ++back;
  return fmt::format(" '{}...{}' #{:08x}", tag.substr(0, front), tag.substr(back), mix(0, tag) >> 32);
}

}  // namespace gradwire::c_api
