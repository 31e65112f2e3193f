// A Python process that runs the class Codec of a file (codec_worker.py). The two sides take turns: each
// send() is answered by one reply.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/threads/child_process.h"
#include "runtime/util/file.h"

namespace gradwire {

class CodecWorker {
 public:
  struct Reply {
    // gather: a message for all ranks. done: the average. failed: an error text, also if the process has
    // ended or did not answer in time.
    enum class Kind : char { ready = 'r', gather = 'g', done = 'd', failed = 'e' };
    Kind kind = Kind::failed;
    std::string bytes;
  };

  // Starts the process for `file`. It has `limit` for each answer.
  CodecWorker(const std::string& file, std::chrono::milliseconds limit);
  CodecWorker(const CodecWorker&) = delete;

  // Sends the letter and the parts' bytes, and returns the reply.
  Reply ask(char letter, const std::vector<std::string_view>& parts);
  // Ends a step that waits for messages; there is no reply.
  void abandon();

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  // Return "", or an error text.
  std::string send(char letter, const std::vector<std::string_view>& parts, Deadline deadline);
  std::string send_bytes(std::string_view bytes, Deadline deadline);
  std::string receive_bytes(char* to, size_t count, Deadline deadline);
  // Waits until the socket is ready for `events`.
  std::string wait(short events, Deadline deadline);
  std::string ended();

  const std::chrono::milliseconds limit_;
  FileDescriptor socket_;
  std::unique_ptr<ChildProcess> process_;
};

}  // namespace gradwire
