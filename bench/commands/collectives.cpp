// gradwire-bench collectives: every schedule, compression and transport, with the flags and columns of
// nccl-tests. The baseline is gloo's or NCCL's allreduce.
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "bench/baselines/allreduce_baseline.h"
#include "bench/cases/collective_case.h"
#include "bench/commands/main.h"
#include "bench/harness/measure.h"
#include "bench/harness/result_files.h"
#include "bench/harness/spawn.h"
#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "collectives/schedule/schedule.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "trainer/cli/flags.h"
#include "trainer/cli/launcher.h"

namespace gradwire::bench {

// The flags of gradwire-bench collectives.

struct CollectivesOptions {
  uint64_t min_bytes = 1 << 20, max_bytes = 16 << 20;
  int factor = 4, iterations = 20, warmup = 5, check = 1;
  int average = 3, per_iteration = 0, skip = 0, blocking = 0, unalign = 0;
  std::vector<std::string> schedules, compression, transports;
  int ranks = 4, per_node = 0;
  std::string device = "host", rendezvous;
  ResultPaths results;
  double timeout_s = 60;
  uint64_t slice_bytes = kSliceBytes;
  bool no_baseline = false, child = false;
};

// Returns the names of all schedules that --schedule accepts, except nccl.
std::vector<std::string> schedule_names();

// Adds the flags of nccl-tests, with their meaning there.
void add_nccl_tests_flags(CLI::App& command, CollectivesOptions& o);
// Adds all other flags.
void add_own_flags(CLI::App& command, CollectivesOptions& o);

namespace {

std::vector<int64_t> sizes_of(const CollectivesOptions& o) {
  if (o.max_bytes < o.min_bytes) {
    throw BadInput(fmt::format("-e {} is less than -b {}", size_text(static_cast<int64_t>(o.max_bytes)),
                               size_text(static_cast<int64_t>(o.min_bytes))));
  }
  std::vector<int64_t> sizes;
  for (uint64_t size = o.min_bytes; size <= o.max_bytes; size *= static_cast<uint64_t>(o.factor)) {
    sizes.push_back(static_cast<int64_t>(size / 4 * 4));
  }
  return sizes;
}

int per_node_of(const CollectivesOptions& o, int world) {
  if (o.per_node > 0 && world % o.per_node != 0) {
    throw BadInput(fmt::format("--per-node {} does not divide {} ranks; use a divisor", o.per_node, world));
  }
  return o.per_node > 0 ? o.per_node : usual_per_node(world);
}

// Returns every size with every spec and every schedule that supports this world size.
std::vector<CollectiveCase> cases_of(const CollectivesOptions& o, int world) {
  std::vector<CompressionSpec> specs;
  for (const std::string& text : o.compression) {
    CompressionSpec spec = CompressionSpec::parse(text);
    if (spec.schedule != ScheduleKind::automatic) {
      specs.push_back(spec);
      continue;
    }
    for (const std::string& schedule : o.schedules.empty() ? schedule_names() : o.schedules) {
      if (schedule == "nccl" && !spec.wire->exact) continue;
      bool possible = schedule != "hierarchical" || per_node_of(o, world) > 0;
      if (!possible && o.schedules.empty()) continue;
      if (!possible) {
        throw BadInput(fmt::format(
            "--schedule hierarchical: {} ranks cannot be divided into several nodes of several ranks; use "
            "--ranks 4, 6, 8, ...",
            world));
      }
      spec.schedule = CompressionSpec::parse(fmt::format("fp32:schedule={}", schedule)).schedule;
      specs.push_back(spec);
    }
  }
  if (specs.empty())
    throw BadInput("--schedule nccl needs a --compression that sends FP32; add --compression fp32");
  std::vector<CollectiveCase> cases;
  for (int64_t size : sizes_of(o)) {
    for (const CompressionSpec& spec : specs) {
      make_schedule(spec.schedule, world,
                    {.nodes = 0, .per_node = per_node_of(o, world)});  // throws if the schedule is impossible
      cases.push_back({spec, size});
    }
  }
  return cases;
}

CollectiveSettings settings_of(const CollectivesOptions& o, int world) {
  return {.warmup = o.warmup,
          .iterations = o.iterations,
          .check = o.check != 0,
          .average = static_cast<Average>(o.average),
          .blocking = static_cast<Blocking>(o.blocking),
          .unalign = o.unalign,
          .per_node = per_node_of(o, world),
          .slice_bytes = static_cast<int64_t>(o.slice_bytes)};
}

// The columns of nccl-tests in its order, for an operation in place, then those of Gradwire.
template <typename... Cells>
std::string standard_columns(const Cells&... cells) {
  static_assert(sizeof...(cells) == 9);
  return fmt::format("{:>12}  {:>12}  {:>8}  {:>6}  {:>6}  {:>9}  {:>7}  {:>7}  {:>6}", cells...);
}

template <typename... Cells>
std::string iteration_columns(const Cells&... cells) {
  static_assert(sizeof...(cells) == 4);
  return fmt::format("  {:>9}  {:>9}  {:>9}  {:>7}", cells...);
}

template <typename... Cells>
std::string own_columns(const Cells&... cells) {
  static_assert(sizeof...(cells) == 7);
  return fmt::format("  {:<12}  {:<18}  {:<5}  {:>11}  {:>8}  {:>8}  {:>9}\n", cells...);
}

void print_header(const CollectivesOptions& o, int world) {
  const char* const averages[] = {"rank 0", "the mean of the ranks", "the fastest rank", "the slowest rank"};
  fmt::print(
      "# {} ranks; mean of {} calls after {}, of {}; in place; baseline: allreduce of gloo or NCCL, FP32\n",
      world, o.iterations, o.warmup, averages[o.average]);
  auto line = [&](const std::string& standard, const std::string& iterations, const std::string& own) {
    fmt::print("#{}{}{}", standard, o.per_iteration ? iterations : "", own);
  };
  line(standard_columns("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")
           .substr(1),
       iteration_columns("i_min", "i_max", "i_p99", "i_cv%"),
       own_columns("schedule", "compression", "over", "wire", "eff. bus", "error", "baseline"));
  line(standard_columns("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "").substr(1),
       iteration_columns("(us)", "(us)", "(us)", "(%)"),
       own_columns("", "", "", "(B/rank)", "(GB/s)", "(rel.)", "(us)"));
}

std::string fixed(double value, int digits) {
  return fmt::format("{:.{}f}", value, digits);
}

// Returns a rank's iterations without the first -K, sorted.
std::vector<double> counted(std::vector<double> times_us, int skip) {
  times_us.erase(times_us.begin(), times_us.begin() + skip);
  std::sort(times_us.begin(), times_us.end());
  return times_us;
}

// Returns the slowest rank's time of each iteration, sorted and without the first -K.
std::vector<double> slowest(const CollectiveResult& r, int skip) {
  std::vector<double> most = r.times_us[0];
  for (const std::vector<double>& rank : r.times_us) {
    for (size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], rank[i]);
  }
  return counted(most, skip);
}

// Prints p50 and p99 of each rank's iterations, and returns them with all times.
nlohmann::ordered_json report_ranks(const CollectivesOptions& o, const CollectiveResult& r) {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  fmt::print("#   p50/p99 by rank (us):");
  for (size_t rank = 0; rank < r.times_us.size(); ++rank) {
    const std::vector<double> times = counted(r.times_us[rank], o.skip);
    const double p50 = quantile(times, 0.5), p99 = percentile(times, 99);
    fmt::print(" {}: {:.1f}/{:.1f}", rank, p50, p99);
    ranks.push_back({{"rank", rank}, {"p50_us", p50}, {"p99_us", p99}, {"times_us", r.times_us[rank]}});
  }
  fmt::print("\n");
  return ranks;
}

// Prints one row and returns it for the JSON file. `baseline_us`: the baseline's time; 0 without a baseline.
nlohmann::ordered_json report(const CollectivesOptions& o, const CollectiveCase& c, const CollectiveResult& r,
                              const std::string& transport, int world, double baseline_us) {
  const auto size = static_cast<double>(c.size_bytes);
  const double algbw = size / r.time_us / 1e3;
  const double effective = algbw * 2 * (world - 1) / world;
  const double busbw = r.fp32_bytes > 0 ? effective * r.wire_bytes / r.fp32_bytes : 0;
  CompressionSpec plain = c.spec;
  plain.schedule = ScheduleKind::automatic;
  const std::vector<double> iterations = slowest(r, o.skip);
  const Timing timing = summarize(iterations);
  const double p99 = percentile(iterations, 99);
  fmt::print(" {}{}{}",
             standard_columns(c.size_bytes, c.size_bytes / 4, "float", "avg", -1, fixed(r.time_us, 1),
                              fixed(algbw, 3), fixed(busbw, 3), o.check ? fixed(r.wrong, 0) : "N/A")
                 .substr(1),
             o.per_iteration ? iteration_columns(fixed(timing.min_us, 1), fixed(iterations.back(), 1),
                                                 fixed(p99, 1), fixed(100 * timing.noise, 2))
                             : "",
             own_columns(name(c.spec.schedule), plain.to_string(), transport, fixed(r.wire_bytes, 0),
                         fixed(effective, 3), o.check ? fmt::format("{:.1e}", r.rel_error) : "N/A",
                         baseline_us > 0 ? fixed(baseline_us, 1) : "-"));
  nlohmann::ordered_json row = {{"schedule", name(c.spec.schedule)},
                                {"spec", plain.to_string()},
                                {"transport", transport},
                                {"ranks", world},
                                {"size_bytes", c.size_bytes},
                                {"time_us", r.time_us},
                                {"algbw_gbps", algbw},
                                {"busbw_gbps", busbw},
                                {"effective_busbw_gbps", effective},
                                {"wire_bytes", r.wire_bytes},
                                {"wrong", nullptr},
                                {"rel_error", nullptr},
                                {"baseline_time_us", nullptr}};
  if (o.check) {
    row["wrong"] = r.wrong;
    row["rel_error"] = r.rel_error;
  }
  if (baseline_us > 0) row["baseline_time_us"] = baseline_us;
  add_timing(row, timing, fmt::to_string(o.iterations));
  row["max_us"] = iterations.back();
  row["p99_us"] = p99;
  row["average"] = o.average;
  row["blocking"] = o.blocking;
  row["unalign"] = o.unalign;
  row["skip"] = o.skip;
  if (o.per_iteration) row["per_rank"] = report_ranks(o, r);
  std::fflush(stdout);
  return row;
}

// Runs ranks as threads of this process.
void run_local(const CollectivesOptions& o, const std::vector<CollectiveCase>& cases,
               nlohmann::ordered_json& rows) {
  const std::vector<Device> available = devices_for(o.device);
  std::vector<Device> devices;
  int gpus = available[0].is_cuda() ? cuda_device_count() : 1;
  for (int r = 0; r < o.ranks; ++r) {
    devices.push_back(available[0].is_cuda() ? Device::cuda(r % gpus) : Device::host());
  }
  auto group =
      Communicator::create_local(devices, std::chrono::milliseconds(static_cast<int64_t>(o.timeout_s * 1e3)));
  run_local_ranks(group, [&](Communicator& mine) {
    CollectiveRank rank(mine, settings_of(o, o.ranks));
    for (const CollectiveCase& c : cases) {
      CollectiveResult result = rank.run(c);
      if (mine.rank() == 0) rows.push_back(report(o, c, result, "local", o.ranks, 0));
    }
  });
}

// Runs this process as one rank of several.
void run_rank(const CollectivesOptions& o, const std::string& transport, const Launch& launch,
              nlohmann::ordered_json& rows) {
  share_cores(launch);
  std::vector<CollectiveCase> cases = cases_of(o, launch.world);
  const bool nccl = transport == "nccl";
  const int local_rank = launch.local_rank >= 0 ? launch.local_rank : launch.rank;
  std::unique_ptr<Communicator> comm =
      join(launch, {.rendezvous = o.rendezvous, .timeout_s = o.timeout_s},
           nccl ? Device::cuda(local_rank % std::max(1, cuda_device_count())) : Device::host());
  CollectiveRank rank(*comm, settings_of(o, launch.world));
  std::unique_ptr<AllreduceBaseline> baseline;
  if (!o.no_baseline && launch.world > 1) {
    baseline =
        nccl ? make_nccl_baseline(*comm, rank.stream())
             : make_gloo_baseline(*comm, rank.stream(),
                                  address_towards(o.rendezvous.empty() ? launch.rendezvous : o.rendezvous),
                                  o.timeout_s);
  }
  for (const CollectiveCase& c : cases) {
    CollectiveResult result = rank.run(c);
    const int64_t count = c.size_bytes / 4;
    double baseline_us = 0;
    if (baseline) {
      const double mine_us = baseline->time_us(count, o.warmup, o.iterations);
      baseline_us =
          average_of(all_gather_value(comm->transport(), rank.stream(), mine_us, "the baseline's times"),
                     static_cast<Average>(o.average));
    }
    if (launch.rank == 0) rows.push_back(report(o, c, result, transport, launch.world, baseline_us));
  }
  comm->barrier();
}

// Starts the same command once per rank. Each process reads its rank from the environment.
void run_processes(const CollectivesOptions& o, const std::string& transport, nlohmann::ordered_json& rows) {
  ScratchFolder scratch;
  const std::string json = fmt::format("{}/rows.json", scratch.path());
  std::vector<std::string> arguments = {"collectives", "--child"};
  auto pass = [&](const char* flag, const auto& value) {
    arguments.push_back(fmt::format("{}={}", flag, value));
  };
  pass("--transport", transport);
  pass("--rendezvous", fmt::format("file://{}/rendezvous", scratch.path()));
  pass("--minbytes", o.min_bytes);
  pass("--maxbytes", o.max_bytes);
  pass("--stepfactor", o.factor);
  pass("--iters", o.iterations);
  pass("--warmup_iters", o.warmup);
  pass("--check", o.check);
  pass("--average", o.average);
  pass("--per_iter_timing", o.per_iteration);
  pass("--per_iter_skip", o.skip);
  pass("--blocking", o.blocking);
  pass("--unalign", o.unalign);
  pass("--timeout-s", o.timeout_s);
  for (const std::string& text : o.schedules) pass("--schedule", text);
  for (const std::string& text : o.compression) pass("--compression", text);
  if (o.per_node > 0) pass("--per-node", o.per_node);
  pass("--slice", o.slice_bytes);
  if (o.no_baseline) arguments.push_back("--no-baseline");
  pass("--json", json);
  run_as_ranks(arguments, o.ranks);
  std::ifstream file(json);
  for (auto& row : nlohmann::ordered_json::parse(file)) rows.push_back(std::move(row));
}

int run(CollectivesOptions o) {
  std::optional<Launch> launch = detect_launcher();
  const bool launched = launch && launch->world > 1;
  if (o.transports.empty()) {
    if (!launched) o.transports = {"local"};
    o.transports.push_back("tcp");
  }
  for (const std::string& transport : o.transports) {
    if (transport == "local" && launched) {
      throw BadInput(
          fmt::format("--transport local: ranks are threads of one process, but {} started {} processes "
                      "({}); use --transport tcp",
                      launch->launcher, launch->world, launch->variables));
    }
    if (transport == "nccl") {
      devices_for("cuda");  // throws if the machine has no GPU
      if (std::string why = nccl_unavailable_reason(); !why.empty())
        throw BadInput(fmt::format("--transport nccl: {}", why));
    }
  }
  const bool prints = !launched || launch->rank == 0;
  if (o.skip >= o.iterations) {
    throw BadInput(
        fmt::format("-K {} skips all of the {} calls; use a number below -n", o.skip, o.iterations));
  }
  ResultFiles results = prints ? ResultFiles(o.results) : ResultFiles();
  devices_for(o.device);
  std::vector<CollectiveCase> cases = cases_of(o, launched ? launch->world : o.ranks);
  for (const std::string& transport : o.transports) {
    const bool uses_nccl_schedule = std::any_of(cases.begin(), cases.end(), [](const CollectiveCase& c) {
      return c.spec.schedule == ScheduleKind::nccl;
    });
    if (uses_nccl_schedule && transport != "nccl")
      throw BadInput(
          fmt::format("schedule nccl: --transport {} does not use NCCL; use --transport nccl", transport));
  }
  if (prints && !o.child) print_header(o, launched ? launch->world : o.ranks);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const std::string& transport : o.transports) {
    if (transport == "local") {
      run_local(o, cases, rows);
    } else if (launched) {
      run_rank(o, transport, *launch, rows);
    } else {
      run_processes(o, transport, rows);
    }
  }
  if (!prints) return 0;
  results.write(rows);
  bool all_right = std::all_of(rows.begin(), rows.end(),
                               [](const auto& row) { return row["wrong"].is_null() || row["wrong"] == 0.0; });
  return all_right || o.child ? 0 : 1;  // the parent checks a child's rows
}

}  // namespace

void add_collectives(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<CollectivesOptions>();
  CLI::App* command = app.add_subcommand(
      "collectives", "Every schedule, compression and transport, with nccl-tests' flags and columns");
  add_nccl_tests_flags(*command, *o);
  add_own_flags(*command, *o);
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (ScheduleKind kind : all_schedules()) names.emplace_back(name(kind));
  return names;
}

void add_nccl_tests_flags(CLI::App& command, CollectivesOptions& o) {
  auto bytes = [&](const char* flags, uint64_t& value, const char* what) {
    command.add_option(flags, value, what)
        ->transform(size_value(false))
        ->check(CLI::Range(uint64_t{4}, uint64_t{1} << 36));
  };
  bytes("-b,--minbytes", o.min_bytes, "Smallest size, e.g. 64K");
  bytes("-e,--maxbytes", o.max_bytes, "Largest size");
  command.add_option("-f,--stepfactor", o.factor, "Factor from one size to the next")
      ->check(CLI::Range(2, 1 << 20));
  command.add_option("-n,--iters", o.iterations, "Timed calls")->check(CLI::Range(1, 100000));
  command.add_option("-w,--warmup_iters", o.warmup, "Warm-up calls")->check(CLI::Range(0, 1000000));
  command.add_option("-c,--check", o.check, "0: do not check the results")->check(CLI::Range(0, 1));
  command
      .add_option("-a,--average", o.average,
                  "Time of 0: rank 0, 1: the ranks' mean, 2: the fastest rank, 3: the slowest rank (default)")
      ->check(CLI::Range(0, 3));
  command
      .add_option("-I,--per_iter_timing", o.per_iteration,
                  "1: print minimum, maximum, p99 and deviation of the calls, and p50 and p99 of each rank")
      ->check(CLI::Range(0, 1));
  command
      .add_option("-K,--per_iter_skip", o.skip, "Exclude the first calls from the statistics of the calls")
      ->check(CLI::Range(0, 100000));
  command
      .add_option(
          "-z,--blocking", o.blocking,
          "After each call, 1: wait for the call and all ranks, 2: for the call, 3: as 1, without the "
          "time of the wait for all ranks")
      ->check(CLI::Range(0, 3));
  command
      .add_option("-u,--unalign", o.unalign, "Begin the buffer this many elements after an aligned address")
      ->check(CLI::Range(0, 1 << 20));
}

void add_own_flags(CLI::App& command, CollectivesOptions& o) {
  o.compression = {"fp32", "bf16", "fp8", "powersgd:rank=4"};
  auto schedules = schedule_names();
  schedules.emplace_back("nccl");
  command
      .add_option("--schedule", o.schedules,
                  "Repeatable (default: all but nccl). nccl: NCCL's allreduce, for specs that send FP32")
      ->check(CLI::IsMember(schedules));
  command.add_option("--compression", o.compression, "Compression spec; repeatable");
  command
      .add_option("--transport", o.transports,
                  "local (threads), tcp (processes) or nccl (processes with a GPU each); repeatable "
                  "(default: local and tcp)")
      ->check(CLI::IsMember({"local", "tcp", "nccl"}));
  command.add_option("--ranks", o.ranks, "Number of ranks, unless a launcher started several")
      ->check(CLI::Range(1, 256));
  command.add_option("--per-node", o.per_node, "Ranks per node of hierarchical schedules")
      ->check(CLI::Range(1, 256));
  command
      .add_option("--slice", o.slice_bytes,
                  "Cut messages into slices of about this size, so that exchanges overlap with kernels; 0: "
                  "no overlap")
      ->transform(size_value(false))
      ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 36));
  command.add_option("--device", o.device, "Device of local ranks")->check(CLI::IsMember({"host", "cuda"}));
  command
      .add_option("--rendezvous", o.rendezvous,
                  "Rendezvous of launched ranks: tcp://host:port or file:///path (default: the launcher's)")
      ->type_name("URL");
  command.add_option("--timeout-s", o.timeout_s, "Time for which a rank waits for a peer")
      ->check(CLI::PositiveNumber);
  command.add_flag("--no-baseline", o.no_baseline, "Do not run the allreduce of gloo or NCCL");
  command.add_flag("--child", o.child)->group("");
  add_result_files(command, o.results);
}

}  // namespace gradwire::bench
