// gw_call_tag(): what the next call of a thread is about.
#include <cstdio>

#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "runtime/mix.h"

namespace gradwire::c_api {
namespace {

constexpr size_t kMostCharacters = 1000, kShown = 72;

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
  require(text.size() <= kMostCharacters, "tag has " + std::to_string(text.size()) + " bytes, at most " +
                                              std::to_string(kMostCharacters) + " are allowed");
  for (char c : text) require(static_cast<unsigned char>(c) >= ' ', "tag has a control character");
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
  if (tag.size() <= kShown) return " '" + tag + "'";
  char digest[12];
  std::snprintf(digest, sizeof digest, "%08x", static_cast<unsigned>(mix(0, tag) >> 32));
  return " '" + tag.substr(0, kShown / 2) + "..." + tag.substr(tag.size() - kShown / 2) + "' #" + digest;
}

}  // namespace gradwire::c_api
