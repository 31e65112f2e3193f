// gradwire-bench collectives: every schedule, compression and transport, with the flags and columns of
// nccl-tests. The baseline is gloo's or NCCL's allreduce.
#include <fmt/format.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>

#include "bench/cases/collective_case.h"
#include "bench/harness/command.h"
#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/schedule/schedule.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/threads/child_process.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/cli/launcher.h"

namespace gradwire::bench {
namespace {

// Runs this program with `arguments` as ranks 0 to world - 1, identified by RANK, WORLD_SIZE, LOCAL_RANK and
// LOCAL_WORLD_SIZE. Blocks until all ranks have ended. Rank 0 inherits stdout; the output of other ranks is
// not shown. Throws Error with the error message of the first rank that failed.
void run_as_ranks(const std::vector<std::string>& arguments, int world) {
  std::vector<std::string> words = {"/proc/self/exe"};
  // /proc is not mounted
  if (access(words[0].c_str(), X_OK) != 0) words[0] = reinterpret_cast<const char*>(getauxval(AT_EXECFN));
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<FileDescriptor> errors;
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (int r = 0; r < world; ++r) {
    const std::string rank = fmt::to_string(r), all = fmt::to_string(world);
    const int fd = errors.emplace_back(memfd_create("errors", MFD_CLOEXEC)).fd();
    if (fd < 0) throw_refused(fmt::format("cannot start rank {}", r), errno);
    const ChildProcess::Variables variables = {
        {"RANK", rank}, {"LOCAL_RANK", rank}, {"WORLD_SIZE", all}, {"LOCAL_WORLD_SIZE", all}};
    ranks.push_back(std::make_unique<ChildProcess>(
        words, ChildProcess::Descriptors{{fd, 2}, {r > 0 ? fd : 1, 1}}, variables));
  }
  std::string failure;
  // Wait for all ranks. Each rank has deadlines, so all ranks end.
  for (size_t r = 0; r < ranks.size(); ++r) {
    const ChildProcess::End& end = ranks[r]->wait();
    if ((end.code == 0 && end.signal == 0) || !failure.empty()) continue;
    const std::string program = "gradwire-bench: ";
    failure = last_line(errors[r].fd());
    if (failure.starts_with(program)) failure.erase(0, program.size());
    if (end.signal != 0 || failure.empty()) failure = fmt::format("rank {} {}", r, end.text);
  }
  if (!failure.empty()) throw Error(failure);
}

// Returns the smallest time that is at least 99 % of the sorted times (nearest rank).
double p99_of(const std::vector<double>& sorted) {
  return sorted[(sorted.size() * 99 + 99) / 100 - 1];
}

class Collectives final : public Command {
 public:
  explicit Collectives(CLI::App& app)
      : Command(app, "collectives",
                "Every schedule, compression and transport, with nccl-tests' flags and columns") {
    for (ScheduleKind kind : all_schedules()) all_schedules_.emplace_back(name(kind));
    add_nccl_tests_flags();
    Texts schedules = all_schedules_;
    schedules.emplace_back("nccl");
    add("--schedule", schedules_,
        "Repeatable (default: all but nccl). nccl: NCCL's allreduce, for specs that send FP32",
        CLI::IsMember(schedules));
    add("--compression", compression_, "Compression spec; repeatable")->type_name("SPEC");
    add("--transport", transports_,
        "local (threads), tcp (processes) or nccl (processes with a GPU each); repeatable (default: local "
        "and tcp)",
        CLI::IsMember({"local", "tcp", "nccl"}));
    add("--ranks", ranks_, "Number of ranks, unless a launcher started several", CLI::Range(1, 256));
    add("--per-node", settings_.per_node, "Ranks per node of hierarchical schedules", CLI::Range(1, 256));
    add_size("--slice", settings_.slice_bytes,
             "Cut messages into slices of about this size, so that exchanges overlap with kernels; 0: no "
             "overlap",
             0);
    device_ = "host";
    add("--device", device_, "Device of local ranks", CLI::IsMember({"host", "cuda"}));
    add("--rendezvous", rendezvous_,
        "Rendezvous of launched ranks: tcp://host:port or file:///path (default: the launcher's)")
        ->type_name("URL");
    add("--timeout-s", timeout_s_, "Time for which a rank waits for a peer", CLI::PositiveNumber);
    add("--no-baseline", no_baseline_, "Do not run the allreduce of gloo or NCCL");
    add("--child", child_, "")->group("");
    add_files();
  }

  int run() override {
    std::optional<Launch> launch = detect_launcher();
    const bool launched = launch && launch->world > 1;
    const bool prints = !launched || launch->rank == 0;
    if (launched) ranks_ = launch->world;
    if (transports_.empty()) transports_ = launched ? Texts{"tcp"} : Texts{"local", "tcp"};
    for (const std::string& transport : transports_) {
      if (transport == "local" && launched) {
        throw BadInput(
            "--transport local: ranks are threads of one process, but {} started {} processes "
            "({}); use --transport tcp",
            launch->launcher, launch->world, launch->variables);
      }
      if (transport == "nccl") {
        devices_for("cuda");  // throws if the machine has no GPU
        if (std::string why = nccl_unavailable_reason(); !why.empty())
          throw BadInput("--transport nccl: {}", why);
      }
    }
    if (skip_ >= settings_.iterations) {
      throw BadInput("-K {} skips all of the {} calls; use a number below -n", skip_, settings_.iterations);
    }
    if (prints) open();
    stop_.exactly = settings_.iterations;
    devices_for(device_);
    const std::vector<CollectiveCase> cases = all_cases();
    for (const std::string& transport : transports_) {
      const bool uses_nccl_schedule = std::any_of(cases.begin(), cases.end(), [](const CollectiveCase& c) {
        return c.spec.schedule == ScheduleKind::nccl;
      });
      if (uses_nccl_schedule && transport != "nccl")
        throw BadInput("schedule nccl: --transport {} does not use NCCL; use --transport nccl", transport);
    }
    set_columns();
    if (prints && !child_) print_two_headings();
    for (const std::string& transport : transports_) {
      if (transport == "local") {
        run_local(cases);
      } else if (launched) {
        run_rank(transport, *launch, cases);
      } else {
        run_processes(transport);
      }
    }
    if (!prints) return 0;
    write_files();
    bool all_right = std::all_of(rows_.begin(), rows_.end(), [](const auto& row) {
      return row["wrong"].is_null() || row["wrong"] == 0.0;
    });
    return all_right || child_ ? 0 : 1;  // the parent checks a child's rows
  }

 private:
  using Texts = std::vector<std::string>;

  // Adds the flags of nccl-tests, with their meaning there.
  void add_nccl_tests_flags() {
    add_size("-b,--minbytes", min_bytes_, "Smallest size, e.g. 64K", 4);
    add_size("-e,--maxbytes", max_bytes_, "Largest size", 4);
    add("-f,--stepfactor", factor_, "Factor from one size to the next", CLI::Range(2, 1 << 20));
    add("-n,--iters", settings_.iterations, "Timed calls", CLI::Range(1, 100000));
    add("-w,--warmup_iters", settings_.warmup, "Warm-up calls", CLI::Range(0, 1000000));
    add("-c,--check", settings_.check, "0: do not check the results", CLI::Range(0, 1));
    add("-a,--average", settings_.average,
        "Time of 0: rank 0, 1: the ranks' mean, 2: the fastest rank, 3: the slowest rank (default)",
        CLI::Range(0, 3));
    add("-I,--per_iter_timing", per_iteration_,
        "1: print minimum, maximum, p99 and deviation of the calls, and p50 and p99 of each rank",
        CLI::Range(0, 1));
    add("-K,--per_iter_skip", skip_, "Exclude the first calls from the statistics of the calls",
        CLI::Range(0, 100000));
    add("-z,--blocking", settings_.blocking,
        "After each call, 1: wait for the call and all ranks, 2: for the call, 3: as 1, without the time of "
        "the wait for all ranks",
        CLI::Range(0, 3));
    add("-u,--unalign", settings_.unalign, "Begin the buffer this many elements after an aligned address",
        CLI::Range(0, 1 << 20));
  }

  // Returns every size with every spec and every schedule that supports this world size. Sets the ranks per
  // node.
  std::vector<CollectiveCase> all_cases() {
    if (settings_.per_node > 0 && ranks_ % settings_.per_node != 0) {
      throw BadInput("--per-node {} does not divide {} ranks; use a divisor", settings_.per_node, ranks_);
    }
    if (settings_.per_node == 0) settings_.per_node = usual_per_node(ranks_);
    std::vector<CompressionSpec> specs;
    for (const std::string& text : compression_) {
      CompressionSpec spec = CompressionSpec::parse(text);
      if (spec.schedule != ScheduleKind::automatic) {
        specs.push_back(spec);
        continue;
      }
      for (const std::string& schedule : schedules_.empty() ? all_schedules_ : schedules_) {
        if (schedule == "nccl" && !spec.wire->exact) continue;
        const bool possible = schedule != "hierarchical" || settings_.per_node > 0;
        if (!possible && schedules_.empty()) continue;
        if (!possible) {
          throw BadInput(
              "--schedule hierarchical: {} ranks cannot be divided into several nodes of several ranks; use "
              "--ranks 4, 6, 8, ...",
              ranks_);
        }
        spec.schedule = CompressionSpec::parse(fmt::format("fp32:schedule={}", schedule)).schedule;
        specs.push_back(spec);
      }
    }
    if (specs.empty())
      throw BadInput("--schedule nccl needs a --compression that sends FP32; add --compression fp32");
    if (max_bytes_ < min_bytes_) {
      throw BadInput("-e {} is less than -b {}", size_text(static_cast<int64_t>(max_bytes_)),
                     size_text(static_cast<int64_t>(min_bytes_)));
    }
    std::vector<CollectiveCase> cases;
    for (uint64_t size = min_bytes_; size <= max_bytes_; size *= static_cast<uint64_t>(factor_)) {
      for (const CompressionSpec& spec : specs) {
        // Throws if the schedule is impossible.
        make_schedule(spec.schedule, ranks_, {.nodes = 0, .per_node = settings_.per_node});
        cases.push_back({spec, static_cast<int64_t>(size / 4 * 4)});
      }
    }
    return cases;
  }

  // The columns of nccl-tests in its order, for an operation in place, then those of Gradwire.
  void set_columns() {
    columns_ = {
        {"size", "size_bytes", 12},    {"count", "count", 13},        {"type", "type", 9},
        {"redop", "redop", 7},         {"root", "root", 7},           {"time", "time_us", 10, 1},
        {"algbw", "algbw_gbps", 8, 3}, {"busbw", "busbw_gbps", 8, 3}, {"#wrong", "shown_wrong", 7, 0}};
    if (per_iteration_ != 0) {
      columns_.insert(columns_.end(), {{"i_min", "min_us", 10, 1},
                                       {"i_max", "max_us", 10, 1},
                                       {"i_p99", "p99_us", 10, 1},
                                       {"i_cv%", "noise", 8, 2, "", 100}});
    }
    columns_.insert(columns_.end(), {{"schedule", "schedule", -12, -1, "", 1, "  "},
                                     {"compression", "spec", -18, -1, "", 1, "  "},
                                     {"over", "transport", -5, -1, "", 1, "  "},
                                     {"wire", "wire_bytes", 12, 0},
                                     {"eff. bus", "effective_busbw_gbps", 9, 3},
                                     {"error", "shown_error", 9},
                                     {"baseline", "baseline_time_us", 10, 1}});
  }

  void print_two_headings() const {
    const char* const averages[] = {"rank 0", "the mean of the ranks", "the fastest rank",
                                    "the slowest rank"};
    fmt::print(
        "# {} ranks; mean of {} calls after {}, of {}; in place; baseline: allreduce of gloo or NCCL, FP32\n",
        ranks_, settings_.iterations, settings_.warmup, averages[settings_.average]);
    Texts names, units = {"(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""};
    for (const Column& column : columns_) names.emplace_back(column.heading);
    if (per_iteration_ != 0) units.insert(units.end(), {"(us)", "(us)", "(us)", "(%)"});
    units.insert(units.end(), {"", "", "", "(B/rank)", "(GB/s)", "(rel.)", "(us)"});
    for (const Texts& cells : {names, units}) fmt::print("#{}\n", line_text(cells).substr(1));
  }

  // Adds a row. `baseline_us`: the baseline's time; 0 without a baseline.
  void report(const CollectiveCase& c, const CollectiveResult& r, const std::string& transport,
              double baseline_us) {
    const double algbw = static_cast<double>(c.size_bytes) / r.time_us / 1e3;
    const double effective = algbw * 2 * (ranks_ - 1) / ranks_;
    CompressionSpec plain = c.spec;
    plain.schedule = ScheduleKind::automatic;
    // The slowest rank's time of each iteration.
    std::vector<double> slowest = r.times_us[0];
    for (const std::vector<double>& rank : r.times_us) {
      for (size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
    }
    slowest = counted(slowest);
    const bool checked = settings_.check != 0;
    Json row = {{"schedule", name(c.spec.schedule)},
                {"spec", plain.to_string()},
                {"transport", transport},
                {"ranks", ranks_},
                {"size_bytes", c.size_bytes},
                {"time_us", r.time_us},
                {"algbw_gbps", algbw},
                {"busbw_gbps", r.fp32_bytes > 0 ? effective * r.wire_bytes / r.fp32_bytes : 0.0},
                {"effective_busbw_gbps", effective},
                {"wire_bytes", r.wire_bytes},
                {"wrong", checked ? Json(r.wrong) : Json()},
                {"rel_error", checked ? Json(r.rel_error) : Json()},
                {"baseline_time_us", baseline_us > 0 ? Json(baseline_us) : Json()}};
    row.update(timing_json(summarize(slowest)));
    row.update({{"max_us", slowest.back()},
                {"p99_us", p99_of(slowest)},
                {"average", settings_.average},
                {"blocking", settings_.blocking},
                {"unalign", settings_.unalign},
                {"skip", skip_}});
    if (per_iteration_ != 0) row["per_rank"] = Json::array();
    std::string by_rank;
    for (size_t rank = 0; per_iteration_ != 0 && rank < r.times_us.size(); ++rank) {
      const std::vector<double> times = counted(r.times_us[rank]);
      const double p50 = quantile(times, 0.5), p99 = p99_of(times);
      by_rank += fmt::format(" {}: {:.1f}/{:.1f}", rank, p50, p99);
      row["per_rank"].push_back(
          {{"rank", rank}, {"p50_us", p50}, {"p99_us", p99}, {"times_us", r.times_us[rank]}});
    }
    add_row(std::move(row), {{"count", c.size_bytes / 4},
                             {"type", "float"},
                             {"redop", "avg"},
                             {"root", -1},
                             {"shown_wrong", checked ? Json(r.wrong) : Json("N/A")},
                             {"shown_error", checked ? fmt::format("{:.1e}", r.rel_error) : "N/A"}});
    if (per_iteration_ != 0) fmt::print("#   p50/p99 by rank (us):{}\n", by_rank);
    std::fflush(stdout);
  }

  // Returns the times without the first -K, sorted.
  std::vector<double> counted(std::vector<double> times_us) const {
    times_us.erase(times_us.begin(), times_us.begin() + skip_);
    std::sort(times_us.begin(), times_us.end());
    return times_us;
  }

  // Runs ranks as threads of this process.
  void run_local(const std::vector<CollectiveCase>& cases) {
    const bool cuda = device_ == "cuda";
    std::vector<Device> devices;
    for (int r = 0; r < ranks_; ++r) {
      devices.push_back(cuda ? Device::cuda(r % cuda_device_count()) : Device::host());
    }
    auto group = Communicator::create_local(
        devices, std::chrono::milliseconds(static_cast<int64_t>(timeout_s_ * 1e3)));
    run_local_ranks(group, [&](Communicator& comm) {
      CollectiveRank rank(comm, settings_);
      for (const CollectiveCase& c : cases) {
        CollectiveResult result = rank.run_case(c);
        if (comm.rank() == 0) report(c, result, "local", 0);
      }
    });
  }

  // Runs this process as one rank of several.
  void run_rank(const std::string& transport, const Launch& launch,
                const std::vector<CollectiveCase>& cases) {
    share_cores(launch);
    const bool nccl = transport == "nccl";
    const int local_rank = launch.local_rank >= 0 ? launch.local_rank : launch.rank;
    std::unique_ptr<Communicator> comm =
        join(launch, tcp_options(rendezvous_, timeout_s_),
             nccl ? Device::cuda(local_rank % std::max(1, cuda_device_count())) : Device::host());
    CollectiveRank rank(*comm, settings_);
    AllreduceBaseline baseline_us;
    if (!no_baseline_) {
      baseline_us =
          nccl ? make_nccl_baseline(*comm, rank.stream)
               : make_gloo_baseline(*comm, rank.stream, rendezvous_.empty() ? launch.rendezvous : rendezvous_,
                                    timeout_s_);
    }
    for (const CollectiveCase& c : cases) {
      const CollectiveResult result = rank.run_case(c);
      double reference_us = 0;
      if (baseline_us) {
        const double mine_us = baseline_us(c.size_bytes / 4, settings_.warmup, settings_.iterations);
        reference_us = settings_.average_of(
            all_gather_value(comm->transport(), rank.stream, mine_us, "the baseline's times"));
      }
      if (launch.rank == 0) report(c, result, transport, reference_us);
    }
    comm->barrier();
  }

  // Starts the same command once per rank. Each process reads its rank from the environment.
  void run_processes(const std::string& transport) {
    namespace fs = std::filesystem;
    std::string scratch = (fs::temp_directory_path() / "gradwire-bench-XXXXXX").string();
    if (mkdtemp(scratch.data()) == nullptr)
      throw Error("cannot create the folder {}; set TMPDIR to a writable one", scratch);
    const std::shared_ptr<void> removed(nullptr, [&](void*) {
      std::error_code ignored;
      fs::remove_all(scratch, ignored);
    });
    const std::string json = scratch + "/rows.json";
    Texts arguments = {"collectives", "--child", "--transport=" + transport,
                       fmt::format("--rendezvous=file://{}/rendezvous", scratch), "--json=" + json};
    const Texts replaced = {"--transport", "--rendezvous", "--json",  "--csv",
                            "--markdown",  "--ranks",      "--device"};
    for (const CLI::Option* option : app_.get_options()) {
      const std::string flag = option->get_name();
      if (std::find(replaced.begin(), replaced.end(), flag) != replaced.end()) continue;
      for (const std::string& value : option->results()) arguments.push_back(flag + "=" + value);
    }
    run_as_ranks(arguments, ranks_);
    std::ifstream file(json);
    for (auto& row : Json::parse(file)) rows_.push_back(std::move(row));
  }

  uint64_t min_bytes_ = 1 << 20, max_bytes_ = 16 << 20;
  int factor_ = 4, per_iteration_ = 0, skip_ = 0, ranks_ = 4;
  CollectiveSettings settings_;
  Texts all_schedules_, schedules_, compression_ = {"fp32", "bf16", "fp8", "powersgd:rank=4"}, transports_;
  std::string rendezvous_;
  double timeout_s_ = 60;
  bool no_baseline_ = false, child_ = false;
};

}  // namespace

std::unique_ptr<Command> make_collectives(CLI::App& app) {
  return std::make_unique<Collectives>(app);
}

}  // namespace gradwire::bench
