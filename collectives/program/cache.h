// Caches programs by buffer, for callers that pass memory with each call (the C ABI's gw_allreduce, the NCCL
// interposer).
//
// All programs of a cache share one workspace, so the programs must run on one stream or one at a time.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <utility>

#include "collectives/program/program.h"

namespace gradwire {

template <typename Key>
class ProgramCache {
 public:
  struct Entry {
    Key key;
    Buffer residual;  // empty: no error feedback
    std::unique_ptr<Program> program;
  };

  // Creates an empty cache for at most `most` programs. `allocate` returns memory for the workspace.
  ProgramCache(size_t most, std::function<Buffer(size_t bytes)> allocate)
      : most_(most), allocate_(std::move(allocate)) {}

  Entry* find(const Key& key) {
    const auto at = places_.find(key);
    if (at == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, at->second);
    return &entries_.front();
  }

  // Adds an entry after find() returned null. Evicts the least recently used entry if the cache is full. May
  // free or rebind memory, so none of the cache's programs may be in flight. Exception: on CUDA programs may
  // be in flight if a stream that waits for the programs releases all memory in its order, including
  // residuals.
  Entry& add(Entry entry) {
    if (entries_.size() >= most_) {
      places_.erase(entries_.back().key);
      entries_.pop_back();
    }
    entries_.push_front(std::move(entry));
    places_[entries_.front().key] = entries_.begin();
    if (entries_.front().program->workspace_bytes() > workspace_.bytes()) {
      workspace_ = allocate_(entries_.front().program->workspace_bytes());
      for (Entry& e : entries_) e.program->bind(workspace_.data());
    } else {
      entries_.front().program->bind(workspace_.data());
    }
    return entries_.front();
  }

  const std::list<Entry>& entries() const { return entries_; }  // the most recently used entry is first

 private:
  const size_t most_;
  const std::function<Buffer(size_t)> allocate_;
  Buffer workspace_;
  std::list<Entry> entries_;
  std::map<Key, typename std::list<Entry>::iterator> places_;
};

}  // namespace gradwire
