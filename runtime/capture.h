// What Stream, Event and Buffer report to the graph that their thread is capturing: the internals of graph.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device_impl.h"

namespace gradwire {

class Capture {
 public:
  // This thread's capture; null: none.
  static Capture* current() noexcept;
  // Throws during a capture: `what` cannot be in a graph, because `why`.
  static void forbid(const char* what, const std::string& whose, const char* why);

  explicit Capture(Stream::Impl& origin);
  ~Capture();
  Capture(const Capture&) = delete;

  // Work goes to `stream`: it must have joined.
  void touch(Stream::Impl& stream);
  void submit(Stream::Impl& stream, std::function<void()> task);  // host streams only
  void record(Event::Impl& event, Stream::Impl& stream);
  void wait(Stream::Impl& stream, const std::shared_ptr<Event::Impl>& event);
  // Throws unless the origin has waited for everything.
  void finish() const;

  // Host: one call to make again.
  struct Operation {
    enum class Kind : uint8_t { task, record, wait } kind;
    std::shared_ptr<Stream::Impl> stream;
    std::shared_ptr<Event::Impl> event = {};
    std::function<void()> task = {};
  };
  std::vector<Operation> operations;

 private:
  // How much of each stream's work is done when a point is reached.
  using Clock = std::map<const Stream::Impl*, int64_t>;
  Clock& joined(Stream::Impl& stream, const char* what);

  const uint64_t id_;
  Stream::Impl& origin_;
  std::map<const Stream::Impl*, Clock> streams_;
  std::map<const Event::Impl*, Clock> events_;
};

}  // namespace gradwire
