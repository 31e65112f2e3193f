#include "trainer/cli/session.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>

#include "collectives/agreement/statements.h"
#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "runtime/util/signals.h"
#include "trainer/cli/launcher.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/log/summary.h"
#include "trainer/train/run.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

constexpr const char* kShelf = "shelf";  // in place of a spec

// A run of the comparison. Runs are ordered by seed, so that all specs have a first result before any spec
// has a second result. Runs of one seed are in the order of the table.
struct PlannedRun {
  TrainConfig config;
  std::string title;                       // unique among the runs
  std::string log = {};                    // file name; "" for no log
  std::optional<RunSummary> earlier = {};  // result of an earlier call
  bool half = false;                       // an earlier call started the run and did not finish it
};

// Returns a run's file: demo/compare.json -> demo/compare.2.jsonl.
std::string path_of_run(const std::string& path, size_t index, const std::string& extension) {
  fs::path named = path;
  named.replace_extension(fmt::format("{}{}", index, extension));
  return named.string();
}

std::vector<PlannedRun> plan_runs(const Resolved& run, int seeds) {
  std::vector<PlannedRun> all;
  for (int s = 0; s < seeds; ++s) {
    for (const CompressionSpec& compression : run.compressions) {
      for (double mb : run.buckets_mb) {
        PlannedRun planned{.config = run.config, .title = compression.to_string()};
        planned.config.compression = compression;
        planned.config.ends_diverged = true;
        planned.config.bucket_mb = mb;
        planned.config.seed = run.config.seed + static_cast<uint64_t>(s);
        std::vector<std::string>& flags = planned.config.flags;
        std::erase_if(flags, [](const std::string& flag) {
          const std::string name = flag.substr(0, flag.find('='));
          return name == "--compression" || name == "--bucket-mb" || name == "--seed";
        });
        flags.push_back("--compression=" + compression.to_string());
        flags.push_back(fmt::format("--bucket-mb={}", mb));
        flags.push_back(fmt::format("--seed={}", planned.config.seed));
        if (run.buckets_mb.size() > 1) planned.title += fmt::format(", buckets of {:g} MiB", mb);
        if (seeds > 1) planned.title += fmt::format(", seed {}", planned.config.seed);
        if (!run.config.trace.empty()) {
          planned.config.trace = path_of_run(run.config.trace, all.size(), ".json");
        }
        all.push_back(std::move(planned));
      }
    }
  }
  return all;
}

// Returns the logs next to compare.json, in the order of their numbers.
std::vector<std::string> logs_next_to(const std::string& json) {
  const fs::path path = json;
  const std::string before = path.stem().string() + ".", after = ".jsonl";
  std::vector<size_t> numbers;
  std::error_code error;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.size() <= before.size() + after.size() || !name.starts_with(before) || !name.ends_with(after)) {
      continue;
    }
    const size_t digits = name.size() - before.size() - after.size();
    if (const auto number = parse_number<size_t>(name.substr(before.size(), digits)))
      numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  std::vector<std::string> paths;
  for (size_t number : numbers) paths.push_back(path_of_run(json, number, after));
  return paths;
}

// Finds the logs of runs with the same settings. Assigns each log to one run. Assigns finished logs first,
// because a compression that is given twice has two logs with equal settings.
void find_earlier_runs(std::vector<PlannedRun>& runs, const DataSplits& data, const std::string& json) {
  std::vector<std::string> settings;
  for (const PlannedRun& run : runs) settings.push_back(settings_text(run_record(run.config, data, {})));
  std::vector<std::pair<std::string, EarlierRun>> logs;
  for (const std::string& path : logs_next_to(json)) logs.emplace_back(path, read_earlier_run(path));
  for (bool finished : {true, false}) {
    for (const auto& [path, earlier] : logs) {
      for (size_t i = 0; earlier.finished == finished && i < runs.size(); ++i) {
        if (!runs[i].log.empty() || settings[i] != earlier.settings) continue;
        runs[i].log = path;
        runs[i].half = !finished;
        if (finished) runs[i].earlier = earlier.summary;
        break;
      }
    }
  }
}

// Gives every run without a log the first free number: that of no earlier log, device or FIFO.
void name_logs(std::vector<PlannedRun>& runs, const std::string& json) {
  std::set<std::string> taken;
  for (const PlannedRun& run : runs) taken.insert(run.log);
  size_t number = 0;
  for (PlannedRun& run : runs) {
    while (run.log.empty()) {
      const std::string path = path_of_run(json, number++, ".jsonl");
      if (!taken.contains(path) && OutputFile::would_be_regular(path) && !holds_data(path)) run.log = path;
    }
  }
}

// Sends rank 0's list of earlier runs to the other processes.
void agree_on_earlier_runs(std::vector<PlannedRun>& runs, Communicator* comm) {
  if (comm == nullptr) return;
  std::vector<double> mine;
  for (const PlannedRun& run : runs) mine.push_back(run.earlier ? 1 : 0);
  const Device device = comm->device();
  const Stream stream = device.is_host() ? Stream::immediate_host() : Stream::create(device, "compare");
  const std::vector<double> leader = all_gather(comm->transport(), stream, mine, "runs to compare")[0];
  for (size_t i = 0; i < runs.size() && comm->rank() != 0; ++i) {
    if (leader[i] != 0) runs[i].earlier.emplace();
  }
}

// Runs all runs without a result. `data`: data of the first seed; for other seeds, data that depend on the
// seed are drawn again.
std::vector<RunSummary> run_all(const std::vector<PlannedRun>& runs, const RunOptions& options,
                                DataSplits data, Communicator* comm) {
  const bool prints = leads(options);
  const bool logged = !runs.front().log.empty();
  std::vector<RunSummary> summaries;
  std::vector<double>
      seconds;  // durations of this call's runs; until the first run ends, of earlier calls' runs
  for (const PlannedRun& run : runs) {
    if (run.earlier) seconds.push_back(run.earlier->seconds);
  }
  size_t done = seconds.size();
  if (prints) set_final_text(compare_interruption(options, logged, done, runs.size()));
  bool first = true;
  uint64_t seed = runs.front().config.seed;
  for (size_t i = 0; i < runs.size(); ++i) {
    const PlannedRun& run = runs[i];
    const std::string label = fmt::format("[{}/{}] ", i + 1, runs.size());
    if (run.earlier) {
      if (prints) say(fmt::format("\n{}{}: already done, see {}", label, run.title, run.log));
      summaries.push_back(*run.earlier);
      continue;
    }
    if (run.config.seed != seed) {
      seed = run.config.seed;
      data = load_data(run.config.data, run.config.model, seed, run.config.global_batch());
    }
    const auto train = [&](const RunObservers& all) { run_training(run.config, data, all, comm); };
    if (!prints) {
      train({});
      continue;
    }
    std::string text = fmt::format("\n{}{}", label, run.title);
    if (run.half) text += fmt::format("; an earlier run did not finish ({}); starting over", run.log);
    if (!seconds.empty()) {  // if the other runs take as long
      const double mean =
          std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
      text += fmt::format("; about {} left", human_seconds(mean * static_cast<double>(runs.size() - done)));
    }
    say(text);
    summaries.push_back(
        run_once(run.config, data, {.log = run.log, .log_every = options.log_every, .label = label}, train));
    if (std::exchange(first, false)) seconds.clear();  // earlier calls may have run on another machine
    seconds.push_back(summaries.back().seconds);
    set_final_text(compare_interruption(options, logged, ++done, runs.size()));
  }
  set_final_text("");
  return summaries;
}

// Groups the runs of all seeds by compression and bucket size.
std::vector<ComparedRun> by_seed(const std::vector<PlannedRun>& runs,
                                 const std::vector<RunSummary>& summaries, size_t seeds) {
  const size_t entries = runs.size() / seeds;
  std::vector<ComparedRun> compared;
  for (size_t i = 0; i < runs.size(); ++i) {
    const TrainConfig& config = runs[i].config;
    if (i < entries) {
      compared.push_back({.compression = config.compression.to_string(),
                          .ranks = config.ranks(),
                          .device = config.devices[0].is_host() ? "host" : "cuda",
                          .link = config.link ? config.link.to_string() : "",
                          .bucket_mb = config.bucket_mb});
    }
    compared[i % entries].seeds.push_back(
        {config.seed, summaries[i], fs::path(runs[i].log).filename().string()});
  }
  return compared;
}

// Returns the specs of --compression; `shelf` stands for shelf_specs(), which come first. Throws BadInput
// without specs.
std::vector<std::string> compared_specs(const RunOptions& options) {
  std::vector<std::string> all;
  const auto has = [&](const std::string& text) {
    return std::find(all.begin(), all.end(), text) != all.end();
  };
  const bool shelf = std::find(options.specs.begin(), options.specs.end(), kShelf) != options.specs.end();
  if (shelf) all = shelf_specs();
  for (const std::string& text : options.specs) {
    if (text == kShelf) continue;
    if (AutoCompression::is_request(text)) {
      throw BadInput("--compression {}: compare needs specs; name them, or use gradwire train, which chooses",
                     text);
    }
    if (!shelf || !has(CompressionSpec::parse(text).to_string())) all.push_back(text);
  }
  if (all.empty()) {
    throw BadInput(
        "compare needs --compression SPEC, once for each run, or --compression {}; see gradwire compare "
        "--help",
        kShelf);
  }
  return all;
}

}  // namespace

void compare(const RunOptions& given) {
  RunOptions options = given;
  options.specs = compared_specs(given);
  const bool chosen = given.rank_count > 0 || (given.launch && given.launch->world > 1);
  if (!chosen) options.rank_count = kComparedRanks;
  Resolved run = resolve(options);
  if (!chosen) run.device_line += fmt::format("; --ranks was not given, so {}", kComparedRanks);
  std::vector<PlannedRun> runs = plan_runs(run, options.seeds);
  const bool prints = leads(options);
  if (prints && !options.trace.empty() && !OutputFile::would_be_regular(options.trace)) {
    throw BadInput(
        "--trace {}: not a regular file; compare writes a trace of each run next to this name, so name a "
        "regular file; it need not exist",
        options.trace);
  }
  if (prints && !options.json.empty()) {
    if (OutputFile::would_be_regular(options.json)) {
      // With --trace, repeat all runs, because an earlier run may lack the trace or profile.
      const bool reuses = options.trace.empty() && !options.trace_text;
      if (reuses) find_earlier_runs(runs, run.data, options.json);
      name_logs(runs, options.json);
    } else {
      run.notes.push_back(
          fmt::format("{} is not a regular file: the runs are not logged next to it", options.json));
    }
  }
  if (prints) {
    for (const PlannedRun& planned : runs) {
      if (!planned.config.trace.empty()) OutputFile::would_be_regular(planned.config.trace);
    }
    say_start(run, options);
    const auto done = std::count_if(runs.begin(), runs.end(), [](const auto& each) { return each.earlier; });
    if (done > 0) {
      say(
          fmt::format("{} of {} runs are already done with the same settings and are skipped; remove their "
                      "logs to repeat "
                      "them",
                      done, runs.size()));
    }
  }
  if (options.dry_run) {
    for (size_t i = 0; prints && i < runs.size(); ++i) say_plan(runs[i].config);
    return;
  }
  OutputFile json = prints ? OutputFile(options.json) : OutputFile();
  const std::unique_ptr<Communicator> comm = join(options, run.config);
  agree_on_earlier_runs(runs, comm.get());
  const TrainConfig& config = run.config;
  const std::vector<RunSummary> summaries = run_all(runs, options, std::move(run.data), comm.get());
  if (!prints) return;
  const std::vector<ComparedRun> compared = by_seed(runs, summaries, static_cast<size_t>(options.seeds));
  say(fmt::format(
      "\n{}{} on {}, {}{}{}, {} steps; steps and bytes are medians, bytes per rank{}\n", config.model.name,
      config.model.gelu == Gelu::exact ? "" : fmt::format(", {} GELU", name(config.model.gelu)),
      config.data.to_string(), config.ranks(), config.ranks() == 1 ? " rank" : " ranks",
      config.link ? fmt::format(" over emulated links of {}", config.link.to_string()) : "", config.steps,
      options.seeds == 1
          ? ""
          : fmt::format("; accuracy and loss: mean and standard deviation over {} seeds", options.seeds)));
  say(compare_table(compared, options.target_accuracy));
  json.write(compare_document(compared, options.target_accuracy));
}

}  // namespace gradwire
