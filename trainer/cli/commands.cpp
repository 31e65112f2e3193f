#include "trainer/cli/session.h"

#include <fmt/ranges.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "collectives/spec/spec.h"
#include "kernels/wire/format.h"
#include "runtime/threads/child_process.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/plan/plan.h"

namespace gradwire {

namespace {

namespace fs = std::filesystem;

// Returns a file or folder that is in share/gradwire of a bundle or an installation, and in trainer/ of the
// sources next to a build folder.
fs::path data_path(const std::string& installed, const std::string& source) {
  std::error_code no_proc;
  fs::path program = fs::read_symlink("/proc/self/exe", no_proc);
  if (no_proc) program = fs::canonical(reinterpret_cast<const char*>(getauxval(AT_EXECFN)));
  const fs::path here = program.parent_path();
  for (const fs::path& path : {here / "../share/gradwire" / installed, here / "../../trainer" / source}) {
    if (fs::exists(path)) return path.lexically_normal();
  }
  throw Error(
      "{} was not found, because gradwire is in {}; start gradwire from build/bin of its "
      "sources, or from bin of a bundle",
      installed, here.string());
}

// Returns the file of --cluster: `text`, or the description of that name which comes with the program.
std::string cluster_file(const std::string& text) {
  std::error_code ignored;
  if (fs::exists(text, ignored) || fs::path(text).has_parent_path()) return text;
  const fs::path folder = data_path("clusters", "plan/clusters");
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    names.push_back(entry.path().stem().string());
    if (names.back() == text || names.back() + ".json" == text) return entry.path().string();
  }
  std::ranges::sort(names);
  throw BadInput("--cluster {}: no such file, and no cluster has this name{}; the clusters are {}", text,
                 suggestion(text, {names.begin(), names.end()}), fmt::join(names, ", "));
}

}  // namespace

void plan(const RunOptions& options) {
  OutputFile file(options.json);
  PlanRequest request{.cluster = read_cluster(cluster_file(options.cluster)),
                      .ranks = options.rank_count,
                      .model = named_model(options.model.name),
                      .batch_size = options.batch_size,
                      .specs = options.specs,
                      .bucket_mb = {}};
  for (double mb : options.buckets_mb) request.bucket_mb.push_back(std::llround(std::ceil(mb)));
  const Plan made = make_plan(request);
  std::fputs(plan_text(request, made).c_str(), stdout);
  file.write(plan_json(request, made));
}

void formats() {
  constexpr size_t kColumn = 46;  // of the last column's texts
  std::string text;
  const auto row = [&](const std::string& spec, const std::string& bytes, const std::string& less,
                       const std::string& error, const std::string& what) {
    text += fmt::format("{:<15} {:>11} {:>7} {:>8}  {}\n", spec, bytes, less, error,
                        wrapped(what, std::max(text_columns(), kColumn + 20), kColumn, kColumn));
  };
  row("spec", "bytes/value", "smaller", "error", "what is sent; options and their defaults");
  for (Wire wire : wire_formats()) {
    std::string what = wire->summary;
    for (const auto& [option, values] : option_texts(wire)) what += fmt::format("; {} ({})", option, values);
    const double bytes = wire->bytes_per_value();
    row(wire->name, fmt::format("{:.4g}", bytes), fmt::format("{:.3g}x", sizeof(float) / bytes),
        wire->exact ? "0" : fmt::format("{:.2g}", wire->gaussian_error), what);
  }
  row("powersgd:rank=R", "-", "-", "-", "4 R (rows + columns) bytes of each matrix");
  row("randk:ratio=X", "4 X", "1/X", "1 - X", "a share X of the values, the same ones on every rank");
  row("dion:rank=R", "-", "-", "-", "an optimizer that sends factors: --optimizer dion:rank=R");
  text += "\nError: expected square of what one encode loses of normal values, over their square.\n\n";
  say(text + wrapped("A spec is " + CompressionSpec::grammar(), text_columns(), 0, 2));
}

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
  [[noreturn]] void fail(const std::string& why) const { throw BadInput("{}: {}", path_, why); }

  const std::string path_;
  off_t read_ = 0;
  ino_t inode_ = 0;
  time_t written_ = 0;
};

}  // namespace

void top(const FileOptions& options) {
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  const bool once = options.prometheus || !terminal;
  LogReader log(options.log);
  LiveRun run;
  while (true) {
    log.read_into(run);
    if (options.prometheus) {
      // Add the label run="PATH" to each sample, so that a collector can tell runs apart.
      std::string metrics = run.metrics();
      const std::string label =
          "run=" + json_text(std::filesystem::absolute(options.log).lexically_normal().string());
      for (size_t at = 0; at < metrics.size(); at = metrics.find('\n', at) + 1) {
        if (metrics[at] == '#') continue;
        at = metrics.find_first_of("{ ", at);
        const bool labeled = metrics[at] == '{';
        metrics.replace(at, labeled, labeled ? "{" + label + "," : "{" + label + "}");
      }
      std::fputs(metrics.c_str(), stdout);
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

namespace {

// Runs a program of trainer/report to its end, with GRADWIRE_PYTHON or the system's Python. Debian's Python
// has Debian's packages, but may not be the first on PATH. Python uses UTF-8 in any locale, and ignores its
// variables, which could keep it from starting or replace its modules; the programs append the folders of
// PYTHONPATH to sys.path. Its errors go to stderr. Its output is all that it delivers (read_results.py);
// other prints, such as those of an imported module, are dropped. Returns its exit code and output.
std::pair<int, std::string> run_program(const char* name, const std::vector<std::string>& arguments) {
  constexpr std::string_view kMark("\0gradwire\0", 10);
  const FileDescriptor output(memfd_create("output", MFD_CLOEXEC));
  if (!output) throw_refused("a file in memory", errno);
  const char* given = path_in_environment("GRADWIRE_PYTHON");
  const char* system = access("/usr/bin/python3", X_OK) == 0 ? "/usr/bin/python3" : "python3";
  const std::string program = (data_path("report", "report") / name).string();
  std::vector<std::string> words{given != nullptr ? given : system, "-E", "-B", "-X", "utf8", program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::optional<ChildProcess> child;
  try {
    child.emplace(words, ChildProcess::Descriptors{{output.fd(), STDOUT_FILENO}});
  } catch (const ChildProcess::NotStarted& error) {
    throw Error("{}; install python3, or name a Python in GRADWIRE_PYTHON", error.what());
  }
  const ChildProcess::End& end = child->wait();
  const std::string text = read_from_start(output.fd(), "a file in memory");
  const size_t first = text.find(kMark), last = text.rfind(kMark);
  if (end.signal != 0 || first == last) {
    throw Error(
        "{}: {} {} before all output was written; GRADWIRE_PYTHON must name a Python 3, or a script that "
        "passes its arguments on to one",
        name, child->program(), end.text);
  }
  return {end.code, text.substr(first + kMark.size(), last - first - kMark.size())};
}

}  // namespace

int write_report(const FileOptions& options) {
  for (const std::string& file : options.files) open_regular_file(file);
  OutputFile output(options.page);
  const auto [code, page] = run_program("report.py", options.files);
  if (code != 0) return code;
  output.write(page);
  if (output.is_regular())
    say(fmt::format("Report: {}, {}", options.page, human_bytes(static_cast<double>(page.size()))));
  return 0;
}

int export_logs(const FileOptions& options) {
  for (const std::string& log : options.files) open_regular_file(log);
  if (fs::exists(options.tensorboard) && !fs::is_directory(options.tensorboard)) {
    throw BadInput("--tensorboard {}: not a folder", options.tensorboard);
  }
  const bool csv = !options.csv.empty();
  if (!csv && options.tensorboard.empty()) throw BadInput("export needs --tensorboard DIR or --csv FILE");
  OutputFile table(options.csv);
  std::vector<std::string> arguments{csv ? "csv" : "tensorboard", csv ? "-" : options.tensorboard};
  arguments.insert(arguments.end(), options.files.begin(), options.files.end());
  const auto [code, output] = run_program("export.py", arguments);
  if (code == 0 && csv) table.write(output);
  if (!csv) std::fputs(output.c_str(), stdout);
  return code;
}

}  // namespace gradwire
