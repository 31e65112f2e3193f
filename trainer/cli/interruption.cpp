#include "trainer/cli/interruption.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <thread>
#include <vector>

#include "trainer/checkpoint/folder.h"

namespace gradwire {
namespace {

std::atomic_flag busy;  // held while a thread replaces or prints the text
std::string* shown = nullptr;

void lock() {
  while (busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
}

// Calls only functions that are safe in a signal handler.
void print_and_end(int signal) {
  lock();  // forever: the process ends, and another signal must not print the text again
  if (shown != nullptr) {
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, shown->data(), shown->size());
  }
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // takes effect when the handler returns
}

// Replaces the text. Blocks this thread's signals meanwhile, because the handler waits for the lock.
void replace(std::string* text) {
  sigset_t ours, before;
  sigemptyset(&ours);
  sigaddset(&ours, SIGINT);
  sigaddset(&ours, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ours, &before);
  lock();
  delete std::exchange(shown, text);
  busy.clear(std::memory_order_release);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Quotes a word for a shell if necessary.
std::string shell_word(const std::string& word) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+:,./@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string text = "'";
  for (char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// Returns this process's command line. With a checkpoint folder, as a command that resumes from the folder.
std::string command_line(const std::string& checkpoints = "") {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text;
  bool skip = false;
  for (std::string word; std::getline(file, word, '\0');) {
    if (std::exchange(skip, false)) continue;
    if (!checkpoints.empty()) {
      skip = word == "--resume" || word == "--init";
      if (skip || word.starts_with("--resume=") || word.starts_with("--init=")) continue;
    }
    text += (text.empty() ? "" : " ") + shell_word(word);
  }
  return checkpoints.empty() ? text : text + " --resume " + shell_word(checkpoints);
}

std::string interrupted(const std::string& what) {
  return fmt::format("{}gradwire: interrupted; {}\n", isatty(STDERR_FILENO) == 1 ? "\n" : "", what);
}

}  // namespace

Interruption::Interruption(const std::string& text) {
  set(text);
  for (int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = print_and_end;
    sigaction(signal, &action, nullptr);
  }
}

Interruption::~Interruption() {
  replace(nullptr);
}

void Interruption::set(const std::string& text) {
  replace(new std::string(text));
}

TrainInterruption::TrainInterruption(const RunOptions& options, const TrainConfig& config)
    : options_(options),
      config_(config),
      interruption_(text(holds_checkpoints(config.checkpoint_directory)
                             ? find_checkpoint(config.checkpoint_directory).path.value_or("")
                             : "")) {}

void TrainInterruption::on_checkpoint(const CheckpointRecord& record) {
  interruption_.set(text(record.path));
}

std::string TrainInterruption::text(const std::string& checkpoint) const {
  std::string kept = checkpoint;
  if (!options_.log.empty()) kept += (kept.empty() ? "" : " and ") + options_.log;
  kept = kept.empty() ? "nothing was kept" : "kept " + kept;
  const std::string with =
      config_.processes && options_.launch ? "start each rank again with" : "continue with";
  if (!checkpoint.empty()) {
    return interrupted(fmt::format("{}; {}:\n  {}", kept, with, command_line(config_.checkpoint_directory)));
  }
  return interrupted(kept +
                     (config_.checkpoint_directory.empty()
                          ? "; a run with --checkpoint DIR --resume DIR can be continued"
                          : fmt::format("; there is no checkpoint yet, the first would be after {} steps",
                                        config_.checkpoint_every)));
}

std::string compare_interruption(const RunOptions& options, bool logged, size_t done, size_t all) {
  if (!logged) return interrupted("nothing was kept; with --json FILE, compare can be continued");
  const std::string kept = fmt::format("kept {} of {} runs next to {}", done, all, options.json);
  const char* repeats = !options.trace.empty() ? "--trace" : options.trace_steps ? "--trace-steps" : nullptr;
  if (repeats != nullptr)
    return interrupted(fmt::format("{}; with {}, compare repeats all runs", kept, repeats));
  return interrupted(fmt::format("{}; continue with:\n  {}", kept, command_line()));
}

}  // namespace gradwire
