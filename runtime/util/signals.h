// Signals that end a command: what it prints, and a checkpoint that it may write, before it ends.
#pragma once

#include <atomic>
#include <string>

namespace gradwire {

// Prepares the process; called by programs before they start threads. No signal stays blocked, and SIGCHLD
// gets its default action: if a parent had SIGCHLD ignored, the ends of children would be lost. Signals that
// the caller ignores stay ignored. The others (SIGINT, SIGTERM, SIGHUP, ...) print the text of
// set_final_text() and end the process as by default. They also end process 1 of a container, where the
// default action has no effect, with exit status 128 + signal.
void prepare_signals();

// Sets the text that follows "gradwire: interrupted by SIGTERM; ". "": nothing is printed.
// Called by one thread at a time.
void set_final_text(const std::string& text);

// While an object with `on` exists, SIGTERM and SIGUSR1 only set requested_end(). The same signal ends the
// process if it comes again after more than a second: schedulers and launchers may both pass on one signal.
class DeferredEnd {
 public:
  explicit DeferredEnd(bool on) : on_(on) { deferring += on_; }
  ~DeferredEnd() { deferring -= on_; }

 private:
  friend void on_signal(int number);
  static inline std::atomic<int> deferring = 0;
  const bool on_;
};
// Returns the latest deferred signal, or 0.
int requested_end();

// Returns whether standard output is a pipe, a socket or a terminal whose other end is closed.
bool reader_is_gone();

// Prints the text and ends the process as the signal does by default. Safe in signal handlers.
[[noreturn]] void end_by_signal(int number);

}  // namespace gradwire
