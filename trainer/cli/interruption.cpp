#include "trainer/cli/interruption.h"

#include <fmt/format.h>

#include <fstream>
#include <utility>

#include "runtime/util/signals.h"
#include "trainer/checkpoint/folder.h"

namespace gradwire {
namespace {

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

}  // namespace

TrainInterruption::TrainInterruption(const RunOptions& options, const TrainConfig& config)
    : options_(options), config_(config) {
  const bool exist = holds_checkpoints(config.checkpoint_directory);
  set_final_text(text(exist ? find_checkpoint(config.checkpoint_directory).path.value_or("") : ""));
}

TrainInterruption::~TrainInterruption() {
  set_final_text("");
}

void TrainInterruption::on_checkpoint(const CheckpointRecord& record) {
  set_final_text(text(record.path));
}

std::string TrainInterruption::text(const std::string& checkpoint) const {
  std::string kept = checkpoint;
  if (!options_.log.empty()) kept += (kept.empty() ? "" : " and ") + options_.log;
  kept = kept.empty() ? "nothing was kept" : "kept " + kept;
  const std::string with =
      config_.processes && options_.launch ? "start each rank again with" : "continue with";
  if (!checkpoint.empty()) {
    return fmt::format("{}; {}:\n  {}", kept, with, command_line(config_.checkpoint_directory));
  }
  return kept + (config_.checkpoint_directory.empty()
                     ? "; a run with --checkpoint DIR --resume DIR can be continued"
                     : fmt::format("; there is no checkpoint yet, the first would be after {} steps",
                                   config_.checkpoint_every));
}

std::string compare_interruption(const RunOptions& options, bool logged, size_t done, size_t all) {
  if (!logged) return "nothing was kept; with --json FILE, compare can be continued";
  const std::string kept = fmt::format("kept {} of {} runs next to {}", done, all, options.json);
  const char* repeats = !options.trace.empty() ? "--trace" : options.trace_steps ? "--trace-steps" : nullptr;
  if (repeats != nullptr) return fmt::format("{}; with {}, compare repeats all runs", kept, repeats);
  return fmt::format("{}; continue with:\n  {}", kept, command_line());
}

}  // namespace gradwire
