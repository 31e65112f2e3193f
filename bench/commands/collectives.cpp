// gradwire-bench collectives: every schedule, compression and transport, with the flags and columns of
// nccl-tests, beside gloo's own allreduce.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench/baselines/gloo_baseline.h"
#include "bench/baselines/nccl_baseline.h"
#include "bench/cases/collective_case.h"
#include "bench/commands/commands.h"
#include "bench/harness/measure.h"
#include "bench/harness/spawn.h"
#include "bench/harness/text.h"
#include "collectives/transport/nccl.h"
#include "collectives/transport/tcp.h"
#include "runtime/error.h"
#include "runtime/thread_pool.h"
#include "trainer/cli/launcher.h"
#include "trainer/log/run_log.h"

namespace gradwire::bench {
namespace {

struct Options {
  uint64_t min_bytes = 1 << 20, max_bytes = 16 << 20;
  int factor = 4, iterations = 20, warmup = 5, check = 1;
  std::vector<std::string> schedules, compression, transports;
  int ranks = 4, per_node = 0;
  std::string device = "host", rendezvous, json;
  double timeout_s = 60;
  uint64_t slice_bytes = kSliceBytes;
  bool no_baseline = false, child = false;
};

const std::vector<std::string> kAllSchedules = {"ring", "tree", "two_shot", "hierarchical"};

std::vector<int64_t> sizes_of(const Options& o) {
  if (o.max_bytes < o.min_bytes) {
    throw BadInput("-e " + size_text(static_cast<int64_t>(o.max_bytes)) + " is less than -b " +
                   size_text(static_cast<int64_t>(o.min_bytes)));
  }
  std::vector<int64_t> sizes;
  for (uint64_t size = o.min_bytes; size <= o.max_bytes; size *= static_cast<uint64_t>(o.factor)) {
    sizes.push_back(static_cast<int64_t>(size / 4 * 4));
  }
  return sizes;
}

int per_node_of(const Options& o, int world) {
  if (o.per_node > 0 && world % o.per_node != 0) {
    throw BadInput("--per-node " + std::to_string(o.per_node) + " does not divide " + std::to_string(world) +
                   " ranks");
  }
  return o.per_node > 0 ? o.per_node : usual_per_node(world);
}

// Every size with every spec with every schedule that can serve this world.
std::vector<CollectiveCase> cases_of(const Options& o, int world) {
  std::vector<CompressionSpec> specs;
  for (const std::string& text : o.compression) {
    CompressionSpec spec = CompressionSpec::parse(text);
    if (spec.schedule != ScheduleKind::automatic) {
      specs.push_back(spec);
      continue;
    }
    for (const std::string& schedule : o.schedules.empty() ? kAllSchedules : o.schedules) {
      if (std::find(kAllSchedules.begin(), kAllSchedules.end(), schedule) == kAllSchedules.end()) {
        throw BadInput("--schedule '" + schedule + "': use ring, tree, two_shot or hierarchical");
      }
      bool possible = schedule != "hierarchical" || per_node_of(o, world) > 0;
      if (!possible && o.schedules.empty()) continue;
      if (!possible) {
        throw BadInput("--schedule hierarchical: " + std::to_string(world) +
                       " ranks do not make several nodes of several ranks; use 4, 6, 8, ... --ranks");
      }
      spec.schedule = CompressionSpec::parse("fp32:schedule=" + schedule).schedule;
      specs.push_back(spec);
    }
  }
  std::vector<CollectiveCase> cases;
  for (int64_t size : sizes_of(o)) {
    for (const CompressionSpec& spec : specs) {
      make_schedule(spec.schedule, world, {.nodes = 0, .per_node = per_node_of(o, world)});  // or refuses
      cases.push_back({spec, size});
    }
  }
  return cases;
}

CollectiveSettings settings_of(const Options& o, int world) {
  return {.warmup = o.warmup,
          .iterations = o.iterations,
          .check = o.check != 0,
          .per_node = per_node_of(o, world),
          .slice_bytes = static_cast<int64_t>(o.slice_bytes)};
}

void print_header() {
  std::printf("#%11s %11s %6s %6s %-13s %-18s %-6s %10s %8s %8s %7s %11s %9s %9s %10s\n", "size", "count",
              "type", "redop", "schedule", "compression", "over", "time", "algbw", "busbw", "#wrong", "wire",
              "eff. bus", "error", "baseline");
  std::printf("#%11s %11s %6s %6s %-13s %-18s %-6s %10s %8s %8s %7s %11s %9s %9s %10s\n", "(B)", "(elements)",
              "", "", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(B/rank)", "(GB/s)", "(rel.)", "(us)");
}

// One row on the screen and in the JSON. `baseline_us` is 0 without a baseline.
nlohmann::ordered_json report(const Options& o, const CollectiveCase& c, const CollectiveResult& r,
                              const std::string& transport, int world, double baseline_us) {
  const auto size = static_cast<double>(c.size_bytes);
  const double algbw = size / r.time_us / 1e3;
  const double effective = algbw * 2 * (world - 1) / world;
  const double busbw = r.fp32_bytes > 0 ? effective * r.wire_bytes / r.fp32_bytes : 0;
  CompressionSpec plain = c.spec;
  plain.schedule = ScheduleKind::automatic;
  char error[32] = "N/A";
  if (o.check) std::snprintf(error, sizeof error, "%.1e", r.rel_error);
  std::printf(" %11lld %11lld %6s %6s %-13s %-18s %-6s %10s %8s %8s %7s %11s %9s %9s %10s\n",
              static_cast<long long>(c.size_bytes), static_cast<long long>(c.size_bytes / 4), "float", "avg",
              name(c.spec.schedule), plain.to_string().c_str(), transport.c_str(),
              number(r.time_us, 1).c_str(), number(algbw, 3).c_str(), number(busbw, 3).c_str(),
              o.check ? number(r.wrong, 0).c_str() : "N/A", number(r.wire_bytes, 0).c_str(),
              number(effective, 3).c_str(), error, baseline_us > 0 ? number(baseline_us, 1).c_str() : "-");
  std::fflush(stdout);
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
                                {"peer_time_us", nullptr}};
  if (o.check) {
    row["wrong"] = r.wrong;
    row["rel_error"] = r.rel_error;
  }
  if (baseline_us > 0) row["peer_time_us"] = baseline_us;
  return row;
}

// Ranks as threads of this process.
void run_local(const Options& o, const std::vector<CollectiveCase>& cases, nlohmann::ordered_json& rows) {
  const std::vector<Device> available = devices_for(o.device);
  std::vector<Device> devices;
  int gpus = available[0].is_cuda() ? cuda_device_count() : 1;
  for (int r = 0; r < o.ranks; ++r) {
    devices.push_back(available[0].is_cuda() ? Device::cuda(r % gpus) : Device::host());
  }
  auto group =
      Communicator::create_local(devices, std::chrono::milliseconds(static_cast<int64_t>(o.timeout_s * 1e3)));
  std::vector<std::exception_ptr> errors(group.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < o.ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        CollectiveRank rank(*group[r], settings_of(o, o.ranks));
        for (const CollectiveCase& c : cases) {
          CollectiveResult result = rank.run(c);
          if (r == 0) rows.push_back(report(o, c, result, "local", o.ranks, 0));
        }
      } catch (const std::exception& error) {
        errors[r] = std::current_exception();
        group[r]->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// This process is one rank of several.
void run_rank(const Options& o, const std::string& transport, const Launch& launch,
              nlohmann::ordered_json& rows) {
  share_cores(launch);
  std::vector<CollectiveCase> cases = cases_of(o, launch.world);
  const bool nccl = transport == "nccl";
  const int local_rank = launch.local_rank >= 0 ? launch.local_rank : launch.rank;
  std::unique_ptr<Communicator> comm =
      join(launch, o.rendezvous, o.timeout_s,
           nccl ? Device::cuda(local_rank % std::max(1, cuda_device_count())) : Device::host());
  CollectiveRank rank(*comm, settings_of(o, launch.world));
  std::unique_ptr<GlooBaseline> gloo_baseline;
  std::unique_ptr<NcclBaseline> nccl_baseline;
  if (!o.no_baseline && launch.world > 1) {
    if (nccl && NcclBaseline::available()) {
      nccl_baseline = std::make_unique<NcclBaseline>(*comm, rank.stream());
    } else if (!nccl && GlooBaseline::available()) {
      gloo_baseline = std::make_unique<GlooBaseline>(
          *comm, rank.stream(), address_towards(o.rendezvous.empty() ? launch.rendezvous : o.rendezvous),
          o.timeout_s);
    }
  }
  for (const CollectiveCase& c : cases) {
    CollectiveResult result = rank.run(c);
    const int64_t count = c.size_bytes / 4;
    double baseline_us = gloo_baseline   ? gloo_baseline->time_us(count, o.warmup, o.iterations)
                         : nccl_baseline ? nccl_baseline->time_us(count, o.warmup, o.iterations)
                                         : 0;
    if (launch.rank == 0) rows.push_back(report(o, c, result, transport, launch.world, baseline_us));
  }
  comm->barrier();
}

// The same command once per rank, told who it is by the environment.
void run_processes(const Options& o, const std::string& transport, nlohmann::ordered_json& rows) {
  ScratchFolder scratch;
  std::string json = scratch.path() + "/rows.json";
  std::vector<std::string> arguments = {"collectives",
                                        "--transport=" + transport,
                                        "--child",
                                        "--rendezvous=file://" + scratch.path() + "/rendezvous",
                                        "--minbytes=" + std::to_string(o.min_bytes),
                                        "--maxbytes=" + std::to_string(o.max_bytes),
                                        "--stepfactor=" + std::to_string(o.factor),
                                        "--iters=" + std::to_string(o.iterations),
                                        "--warmup_iters=" + std::to_string(o.warmup),
                                        "--check=" + std::to_string(o.check),
                                        "--timeout-s=" + std::to_string(o.timeout_s)};
  for (const std::string& text : o.schedules) arguments.push_back("--schedule=" + text);
  for (const std::string& text : o.compression) arguments.push_back("--compression=" + text);
  if (o.per_node > 0) arguments.push_back("--per-node=" + std::to_string(o.per_node));
  arguments.push_back("--slice=" + std::to_string(o.slice_bytes));
  if (o.no_baseline) arguments.push_back("--no-baseline");
  arguments.push_back("--json=" + json);
  run_as_ranks(arguments, o.ranks);
  std::ifstream file(json);
  for (auto& row : nlohmann::ordered_json::parse(file)) rows.push_back(std::move(row));
}

int run(Options o) {
  std::optional<Launch> launch = detect_launcher();
  const bool launched = launch && launch->world > 1;
  if (o.transports.empty()) {
    if (!launched) o.transports = {"local"};
    o.transports.push_back("tcp");
  }
  for (const std::string& transport : o.transports) {
    if (transport != "local" && transport != "tcp" && transport != "nccl")
      throw BadInput("--transport '" + transport + "': use local, tcp or nccl");
    if (transport == "local" && launched) {
      throw BadInput("--transport local: its ranks are threads of one process, but " + launch->launcher +
                     " started " + std::to_string(launch->world) + " (" + launch->variables +
                     "); use --transport tcp");
    }
    if (transport == "nccl") {
      devices_for("cuda");  // says what is missing
      if (std::string why = nccl_unavailable_reason(); !why.empty())
        throw BadInput("--transport nccl: " + why);
    }
  }
  const bool speaks = !launched || launch->rank == 0;
  if (!o.json.empty() && speaks) check_writable(o.json);
  if (o.device != "host" && o.device != "cuda")
    throw BadInput("--device '" + o.device + "': use host or cuda");
  devices_for(o.device);
  std::vector<CollectiveCase> cases = cases_of(o, launched ? launch->world : o.ranks);
  if (speaks && !o.child) {
    std::printf("# %d ranks; mean of %d calls after %d; baseline: gloo's or NCCL's own allreduce, FP32\n",
                launched ? launch->world : o.ranks, o.iterations, o.warmup);
    print_header();
  }
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
  if (!speaks) return 0;
  if (!o.json.empty()) write_file_atomically(o.json, rows.dump(1) + "\n");
  bool all_right = std::all_of(rows.begin(), rows.end(),
                               [](const auto& row) { return row["wrong"].is_null() || row["wrong"] == 0.0; });
  return all_right || o.child ? 0 : 1;  // the parent has the rows and says it
}

}  // namespace

void add_collectives(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  o->compression = {"fp32", "bf16", "fp8", "powersgd:rank=4"};
  CLI::App* command = app.add_subcommand(
      "collectives", "Every schedule, compression and transport, with nccl-tests' flags and columns");
  auto bytes = [&](const char* flags, uint64_t& value, const char* what) {
    command->add_option(flags, value, what)
        ->transform(CLI::AsSizeValue(false))
        ->check(CLI::Range(uint64_t{4}, uint64_t{1} << 36));
  };
  bytes("-b,--minbytes", o->min_bytes, "Smallest size, e.g. 64K");
  bytes("-e,--maxbytes", o->max_bytes, "Largest size");
  command->add_option("-f,--stepfactor", o->factor, "From one size to the next")
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("-n,--iters", o->iterations, "Timed calls")->check(CLI::Range(1, 1000000));
  command->add_option("-w,--warmup_iters", o->warmup, "Calls before")->check(CLI::Range(0, 1000000));
  command->add_option("-c,--check", o->check, "0: no check of the results")->check(CLI::Range(0, 1));
  command->add_option("--schedule", o->schedules,
                      "ring, tree, two_shot or hierarchical; repeatable (default: all)");
  command->add_option("--compression", o->compression, "Compression spec; repeatable");
  command->add_option("--transport", o->transports,
                      "local (threads), tcp (processes) or nccl (processes with a GPU each); repeatable "
                      "(default: local and tcp)");
  command->add_option("--ranks", o->ranks, "Ranks, unless a launcher started several")
      ->check(CLI::Range(1, 256));
  command->add_option("--per-node", o->per_node, "Ranks per node of hierarchical schedules")
      ->check(CLI::Range(1, 256));
  command
      ->add_option("--slice", o->slice_bytes,
                   "Cut messages into slices of about this size, so that exchanges overlap with kernels; 0: "
                   "no overlap")
      ->transform(CLI::AsSizeValue(false));
  command->add_option("--device", o->device, "host or cuda, of local ranks");
  command->add_option("--rendezvous", o->rendezvous,
                      "Where launched ranks meet: tcp://host:port or file:///path (default: the launcher's)");
  command->add_option("--timeout-s", o->timeout_s, "How long a rank waits for a peer")
      ->check(CLI::PositiveNumber);
  command->add_flag("--no-baseline,--no-peer", o->no_baseline, "Leave gloo's and NCCL's own allreduce out");
  command->add_flag("--child", o->child)->group("");
  command->add_option("--json", o->json, "Write the table to FILE");
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace gradwire::bench
