// gw_call_tag(): a label for a thread's next call.
#include <fmt/format.h>

#include <cstdint>

#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/text.h"
#include "runtime/mix.h"

namespace gradwire::c_api {
namespace {

constexpr size_t kMostBytes = 1000, kShown = 72;

struct Pending {
  gw_comm comm = nullptr;
  std::string tag;
};
Pending& pending() {
  thread_local Pending of_this_thread;
  return of_this_thread;
}

}  // namespace

void set_tag(gw_comm comm, const char* tag) {
  const std::string text = tag != nullptr ? tag : "";
  require(text.size() <= kMostBytes, "tag has {} bytes, at most {} are allowed", text.size(), kMostBytes);
  check_text(text, "tag");
  pending() = {comm, text};
}

std::string take_tag(gw_comm comm) {
  Pending& p = pending();
  if (p.comm != comm) return "";
  p.comm = nullptr;
  return std::move(p.tag);
}

std::string quoted(const std::string& tag) {
  if (tag.empty()) return "";
  if (tag.size() <= kShown) return fmt::format(" '{}'", tag);
  // No character of UTF-8 is cut.
  auto begins = [&](size_t at) { return (static_cast<uint8_t>(tag[at]) & 0xc0) != 0x80; };
  size_t front = kShown / 2, back = tag.size() - kShown / 2;
  while (!begins(front)) --front;
  while (back < tag.size() && !begins(back)) ++back;
  return fmt::format(" '{}...{}' #{:08x}", tag.substr(0, front), tag.substr(back), mix(0, tag) >> 32);
}

}  // namespace gradwire::c_api
