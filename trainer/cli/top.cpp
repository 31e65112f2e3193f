#include "trainer/cli/top.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "runtime/util/error.h"
#include "trainer/log/console.h"
#include "trainer/log/json.h"
#include "trainer/log/live_run.h"

namespace gradwire {
namespace {

// Reads the lines added to a log since the last reading.
class LogReader {
 public:
  explicit LogReader(std::string path) : path_(std::move(path)) {}

  // Reads only complete lines. Restarts if another run has replaced the log or a resumed run has cut it.
  void read_into(LiveRun& run) {
    struct stat status {};
    if (stat(path_.c_str(), &status) != 0) fail(std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail("not a regular file");
    if (status.st_ino != inode_ || status.st_size < read_) {
      run = {};
      read_ = 0;
      inode_ = status.st_ino;
    }
    written_ = status.st_mtime;
    std::ifstream file(path_, std::ios::binary);
    if (!file) fail(std::strerror(errno));
    file.seekg(read_);
    std::string line;
    while (std::getline(file, line) && !file.eof()) {
      read_ += static_cast<off_t>(line.size()) + 1;
      try {
        run.read(line);
      } catch (const BadInput& error) {
        fail(error.what());
      }
    }
    if (read_ == 0) fail("the file is empty");
  }
  double idle_s() const { return std::difftime(std::time(nullptr), written_); }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw BadInput(fmt::format("{}: {}", path_, why)); }

  const std::string path_;
  off_t read_ = 0;
  ino_t inode_ = 0;
  time_t written_ = 0;
};

// Adds the label run="PATH" to each sample, so that a collector can tell runs apart.
std::string with_run(std::string metrics, const std::string& path) {
  const std::string run = "run=" + json_text(std::filesystem::absolute(path).lexically_normal().string());
  for (size_t at = 0; at < metrics.size(); at = metrics.find('\n', at) + 1) {
    if (metrics[at] == '#') continue;
    at = metrics.find_first_of("{ ", at);
    const bool labeled = metrics[at] == '{';
    metrics.replace(at, labeled, labeled ? "{" + run + "," : "{" + run + "}");
  }
  return metrics;
}

}  // namespace

void top(const TopOptions& options) {
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  const bool once = options.prometheus || !terminal;
  LogReader log(options.log);
  LiveRun run;
  while (true) {
    log.read_into(run);
    if (options.prometheus) {
      std::fputs(with_run(run.metrics(), options.log).c_str(), stdout);
      return;
    }
    std::string text = run.text();
    constexpr double kSilent = 30;
    if (!run.finished() && log.idle_s() > kSilent) {
      text +=
          fmt::format("Nothing has been written for {}: has the run ended?\n", human_seconds(log.idle_s()));
    }
    std::printf("%s%s", once ? "" : "\033[H\033[2J", text.c_str());
    const bool written = std::fflush(stdout) == 0;
    if (once || run.finished() || !written) return;
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

}  // namespace gradwire
