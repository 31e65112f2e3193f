#include "trainer/log/run_log.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "runtime/error.h"

namespace gradwire {
namespace {

[[noreturn]] void cannot_write(const std::string& path, const std::string& why) {
  throw BadInput(fmt::format("{}: cannot be written: {}; name a file in a folder that exists and is writable",
                             path, why));
}

}  // namespace

void check_writable(const std::string& path) {
  if (path.empty()) cannot_write("''", "the name is empty");
  struct stat status {};
  if (stat(path.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) cannot_write(path, "it is a folder");
    if (access(path.c_str(), W_OK) != 0) cannot_write(path, std::strerror(errno));
    return;
  }
  if (errno != ENOENT) cannot_write(path, std::strerror(errno));
  std::string folder = std::filesystem::path(path).parent_path().string();
  if (folder.empty()) folder += '.';
  auto bad_folder = [&] { cannot_write(path, fmt::format("folder {}: {}", folder, std::strerror(errno))); };
  if (stat(folder.c_str(), &status) != 0) bad_folder();
  if (!S_ISDIR(status.st_mode)) cannot_write(path, folder + " is not a folder");
  if (access(folder.c_str(), W_OK | X_OK) != 0) bad_folder();
}

void check_all_different(const std::vector<NamedFile>& files) {
  std::map<std::filesystem::path, const NamedFile*> seen;
  for (const NamedFile& file : files) {
    if (file.path.empty()) continue;
    std::error_code ignored;
    const auto [at, is_new] =
        seen.emplace(std::filesystem::weakly_canonical(std::filesystem::absolute(file.path), ignored), &file);
    if (!is_new) {
      throw BadInput(fmt::format("{} {} and {} {} are the same file; name another for one of them",
                                 at->second->flag, at->second->path, file.flag, file.path));
    }
  }
}

void write_file_atomically(const std::string& path, const std::string& contents) {
  std::string temporary = path + ".tmp";
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) cannot_write(path, std::strerror(errno));
  bool written = std::fwrite(contents.data(), 1, contents.size(), file) == contents.size();
  written = std::fflush(file) == 0 && written;
  int error = errno;
  std::fclose(file);
  if (!written || std::rename(temporary.c_str(), path.c_str()) != 0) {
    if (written) error = errno;
    std::remove(temporary.c_str());
    throw Error(fmt::format("{}: writing failed: {}", path, std::strerror(error)));
  }
}

RunLog::RunLog(std::string path, const TrainConfig& config, const DataSplits& data)
    : path_(std::move(path)), config_(config), data_(data) {
  check_writable(path_);
}

void RunLog::on_run(const RunInfo& info) {
  const bool goes_on = (info.takes_over || !config_.resume.empty()) && keep_until(info);
  file_.reset(std::fopen(path_.c_str(), goes_on ? "ab" : "wb"));
  if (!file_) cannot_write(path_, std::strerror(errno));
  if (!goes_on) {
    write(run_record(config_, data_, info));
  } else if (!info.takes_over) {
    write(resume_record(config_, info));
  }
}

// Keeps the old log's records before this run's first step; false when there is no old log.
bool RunLog::keep_until(const RunInfo& info) {
  // A run resumed after its last step repeats its evaluation. A rank that takes over has one that was due before it.
  const bool evaluates = info.takes_over || info.first_step == config_.steps;
  std::ifstream old(path_, std::ios::binary);
  std::string kept, line;
  while (std::getline(old, line)) {
    if (kept.empty() && !is_run_record(line)) return false;
    if (is_before(line, info.first_step, evaluates)) kept += line + "\n";
  }
  if (kept.empty()) return false;
  write_file_atomically(path_, kept);
  return true;
}

void RunLog::on_step(const StepRecord& step) {
  write(step_record(step));
}
void RunLog::on_waits(const WaitRecord& waits) {
  write(waits_record(waits));
}
void RunLog::on_shrink(const ShrinkRecord& shrink) {
  write(shrink_record(shrink));
}
void RunLog::on_grow(const GrowRecord& grow) {
  write(grow_record(grow));
}
void RunLog::on_eval(const EvalRecord& eval) {
  write(eval_record(eval));
}
void RunLog::on_checkpoint(const CheckpointRecord& checkpoint) {
  write(checkpoint_record(checkpoint));
}
void RunLog::write_summary(const RunSummary& summary) {
  write(summary_record(summary));
}

void RunLog::write(const std::string& record) {
  if (std::fputs((record + "\n").c_str(), file_.get()) < 0 || std::fflush(file_.get()) != 0) {
    throw Error(fmt::format("{}: writing failed: {}", path_, std::strerror(errno)));
  }
}

}  // namespace gradwire
