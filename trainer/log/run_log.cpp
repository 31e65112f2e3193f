#include "trainer/log/run_log.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {

RunLog::RunLog(std::string path, const TrainConfig& config, const DataSplits& data, std::string choice)
    : path_(std::move(path)), config_(config), data_(data), choice_(std::move(choice)) {
  check_writable(path_);
}

void RunLog::on_run(const RunInfo& info) {
  file_ = FileDescriptor();  // also releases the lock, if this rank returns to a checkpoint
  bool continues = false;
  try {
    file_ = open(info, continues);
  } catch (const Error& error) {
    if (!info.takes_over) throw;
    return lose_output(path_, error.what());  // the run has begun: a missing log must not end it
  }
  if (!continues) {
    write(run_record(config_, data_, info));
    if (!choice_.empty()) write(choice_);
  } else if (!info.takes_over) {
    write(resume_record(config_, info));
  }
}

FileDescriptor RunLog::open(const RunInfo& info, bool& continues) const {
  OutputFile file(path_);
  const OutputFile::Lock lock = info.takes_over ? OutputFile::Lock::steal : OutputFile::Lock::take;
  std::string kept;
  if (file.is_regular() && (info.takes_over || !config_.resume.empty())) kept = kept_until(info);
  continues = !kept.empty();
  return continues ? file.begin_with(kept, lock) : file.begin(lock);
}

// Returns the records of the old log before this run's first step, or "" without an old log.
std::string RunLog::kept_until(const RunInfo& info) const {
  // A run that resumes after its last step repeats its evaluation. A rank that replaces rank 0 may repeat an
  // overdue evaluation.
  const bool evaluates = info.takes_over || info.first_step == config_.steps;
  std::ifstream old(path_, std::ios::binary);
  std::string kept, line;
  while (std::getline(old, line)) {
    if (kept.empty() && !is_run_record(line)) return "";
    if (is_before(line, info.first_step, evaluates)) kept += line + "\n";
  }
  return kept;
}

void RunLog::write(const std::string& record) {
  if (!file_) return;  // the log was lost
  struct stat before {};
  fstat(file_.fd(), &before);
  const int error = write_fully(file_.fd(), record + "\n");
  if (error == 0) return;
  if (S_ISREG(before.st_mode) && ftruncate(file_.fd(), before.st_size) != 0) {
    warn_once(fmt::format("{}: its last line is not complete", path_));
  }
  file_ = FileDescriptor();
  lose_output(path_, fmt::format("{}: writing failed: {}", path_, std::strerror(error)));
}

}  // namespace gradwire
