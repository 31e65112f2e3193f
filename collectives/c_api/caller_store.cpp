#include "collectives/c_api/caller_store.h"

#include <fmt/format.h>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/structs.h"
#include "runtime/util/error.h"

namespace gradwire::c_api {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMostBytes = size_t{64}
                              << 10;  // limit for the published text; an address takes up to 16 bytes

class CallerStore {
 public:
  CallerStore(const gw_store& store, milliseconds timeout)
      : store_(store),
        key_(std::string(store.prefix == nullptr ? "" : store.prefix) + "gradwire/rendezvous"),
        timeout_(timeout),
        deadline_(SteadyClock::now() + timeout) {}

  void publish(const std::string& text) const {
    check("set", store_.set(store_.user, key_.c_str(), text.data(), text.size(), left_ms()));
  }

  std::string read() const {
    std::string value(kMostBytes, '\0');
    size_t bytes = 0;
    check("get", store_.get(store_.user, key_.c_str(), left_ms(), value.data(), value.size(), &bytes));
    if (bytes == 0) {
      throw CommError(
          fmt::format("rank 0 has not set '{}' in the store within {} ms; is it running, and does every rank "
                      "use the same store and prefix?",
                      key_, timeout_.count()));
    }
    value.resize(std::min(bytes, kMostBytes));
    if (bytes > kMostBytes || !is_store_location(value)) {
      throw CommError(
          fmt::format("the store's '{}' ({} bytes) is not what rank 0 has set; does something else "
                      "use this key, or another version of the library?",
                      key_, bytes));
    }
    return value;
  }

 private:
  int64_t left_ms() const {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - SteadyClock::now());
    return std::max<int64_t>(left.count(), 1);
  }

  void check(const char* function, const char* error) const {
    if (error != nullptr)
      throw CommError(fmt::format("the store's {}('{}') failed: {}", function, key_, error));
    // A get() that correctly times out returns slightly late; allow for it.
    constexpr milliseconds kLate{500};
    if (SteadyClock::now() > deadline_ + kLate) {
      throw CommError(fmt::format("the store's {}('{}') returned too late: all ranks must join within {} ms",
                                  function, key_, timeout_.count()));
    }
  }

  gw_store store_;
  std::string key_;
  milliseconds timeout_;
  SteadyClock::time_point deadline_;
};

}  // namespace

gw_store checked_store(const gw_store* store) {
  const auto read = read_struct<gw_store>(store, "gw_store");
  require(read.set != nullptr, "gw_store.set is null");
  require(read.get != nullptr, "gw_store.get is null");
  return read;
}

RendezvousCallbacks callbacks_of_store(const gw_store& store, milliseconds timeout) {
  const CallerStore keys(store, timeout);
  return {.address = "",
          .publish = [keys](const std::string& text) { keys.publish(text); },
          .read = [keys] { return keys.read(); }};
}

}  // namespace gradwire::c_api
