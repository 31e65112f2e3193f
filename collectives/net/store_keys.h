// The keys of a rendezvous store (store.h), and the number of bytes that each rank has stored.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "collectives/net/store.h"
#include "runtime/util/error.h"

namespace gradwire {

// Thrown if a request of a rank exceeds the StoreLimits. The text completes a sentence whose subject is the
// rank.
class OverStoreLimit : public Error {
 public:
  using Error::Error;
};

class StoreKeys {
 public:
  StoreKeys(int world, const StoreLimits& limits) : limits_(limits), bytes_of_(static_cast<size_t>(world)) {}

  // Sets the key's value. Throws OverStoreLimit.
  void set(int rank, const std::string& key, const std::string& value) {
    remove(values_, key);
    const Owner owner = account(rank, key.size() + value.size());
    values_[key] = {value, owner};
  }
  // Adds one to the key's count. Returns the new count. Throws OverStoreLimit.
  int64_t add(int rank, const std::string& key) {
    auto found = counts_.find(key);
    if (found == counts_.end())
      found = counts_.emplace(key, Entry<int64_t>{0, account(rank, key.size())}).first;
    return ++found->second.content;
  }
  // Returns the key's value; null while the key is not set.
  const std::string* value(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : &found->second.content;
  }
  // Removes the key's value and count.
  void drop(const std::string& key) {
    remove(values_, key);
    remove(counts_, key);
  }

 private:
  static constexpr size_t kOverhead = 128;  // bookkeeping bytes counted for each key

  struct Owner {
    int rank = 0;
    size_t bytes = 0;
  };
  template <typename T>
  struct Entry {
    T content = {};
    Owner owner;  // the first rank that set the key or added to its count
  };

  Owner account(int rank, size_t content) {
    const size_t bytes = content + kOverhead;
    size_t& of_rank = bytes_of_[static_cast<size_t>(rank)];
    if (of_rank + bytes > limits_.key_bytes_of_rank || bytes_ + bytes > limits_.key_bytes) {
      throw OverStoreLimit(fmt::format(
          "leaves more with rank 0 than it has room for: {} bytes in addition to its {} bytes and "
          "the {} bytes of all ranks",
          bytes, of_rank, bytes_));
    }
    of_rank += bytes;
    bytes_ += bytes;
    return {rank, bytes};
  }

  template <typename T>
  void remove(std::map<std::string, Entry<T>>& entries, const std::string& key) {
    const auto found = entries.find(key);
    if (found == entries.end()) return;
    bytes_of_[static_cast<size_t>(found->second.owner.rank)] -= found->second.owner.bytes;
    bytes_ -= found->second.owner.bytes;
    entries.erase(found);
  }

  const StoreLimits limits_;
  std::map<std::string, Entry<std::string>> values_;
  std::map<std::string, Entry<int64_t>> counts_;
  std::vector<size_t> bytes_of_;  // bytes stored by each rank
  size_t bytes_ = 0;              // bytes stored by all ranks
};

}  // namespace gradwire
