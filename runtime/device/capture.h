// The reports of Stream, Event and Buffer to the graph that the calling thread is capturing: the internals of
// graph.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device/device_impl.h"

namespace gradwire {

class Capture {
 public:
  // Returns this thread's capture, or null.
  static Capture* current() noexcept;
  // Throws if this thread is capturing a graph. The error says that `what` cannot be in a graph, because
  // `why`.
  static void forbid(const char* what, const std::string& whose, const char* why);

  explicit Capture(Stream::Impl& origin);
  ~Capture();
  Capture(const Capture&) = delete;

  // Records that work is about to be enqueued on `stream`, which must have joined the capture.
  void touch(Stream::Impl& stream);
  void submit(Stream::Impl& stream, std::function<void()> task);  // host streams only
  void record(Event::Impl& event, Stream::Impl& stream);
  void wait(Stream::Impl& stream, const std::shared_ptr<Event::Impl>& event);
  // Throws unless the origin has waited for all other streams.
  void finish() const;

  // On the host: one call that each launch repeats.
  struct Operation {
    enum class Kind : uint8_t { task, record, wait } kind;
    std::shared_ptr<Stream::Impl> stream;
    std::shared_ptr<Event::Impl> event = {};
    std::function<void()> task = {};
  };
  std::vector<Operation> operations;

 private:
  // The amount of each stream's work that is complete at a point.
  using Clock = std::map<const Stream::Impl*, int64_t>;
  Clock& joined(Stream::Impl& stream, const char* what);

  const uint64_t id_;
  Stream::Impl& origin_;
  std::map<const Stream::Impl*, Clock> streams_;
  std::map<const Event::Impl*, Clock> events_;
};

}  // namespace gradwire
