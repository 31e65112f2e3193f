// gradwire-bench numerics: the error of an allreduce relative to the exact sum, by number of ranks, for every
// schedule and several wire formats. Error feedback is off: the error is the rounding of a single call, which
// error feedback would retain for later calls. Ranks are threads of one process; bits do not depend on the
// transport.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/commands/main.h"
#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/spec/spec.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire::bench {
namespace {

struct NumericsOptions {
  std::vector<int> ranks = {2, 3, 4, 5, 8, 11, 16, 23, 32, 45, 64};
  int64_t elements = 1 << 15;
  uint64_t seed = 1;
  std::vector<std::string> specs = {"fp32",
                                    "bf16",
                                    "bf16:round=stochastic",
                                    "fp8",
                                    "fp8:round=stochastic",
                                    "int8",
                                    "int8:round=stochastic"};
  std::string json;
};

struct Case {
  std::string name;  // label of the schedule in the picture
  Schedule schedule;
  bool fp32_intra_node = false;
};

// A wire format with a rounding. The name is the spec.
struct Format {
  std::string name;
  Wire wire;
  Rounding rounding;
};

std::vector<Format> formats(const std::vector<std::string>& specs) {
  std::vector<Format> all;
  for (const std::string& text : specs) {
    const CompressionSpec spec = CompressionSpec::parse(text);
    if (spec.method != CompressionSpec::Method::wire) {
      throw BadInput(fmt::format("--spec {}: not a wire format by itself", text));
    }
    all.push_back({text, spec.wire, spec.rounding});
  }
  return all;
}

std::vector<Case> cases_of(int world) {
  std::vector<Case> all;
  const int per_node = usual_per_node(world);
  for (ScheduleKind kind : all_schedules()) {
    if (kind == ScheduleKind::hierarchical && per_node <= 1) continue;
    all.push_back({name(kind), make_schedule(kind, world, {.per_node = per_node})});
    if (kind == ScheduleKind::hierarchical)
      all.push_back({"hierarchical,intra_node=fp32", all.back().schedule, true});
  }
  return all;
}

// Returns independent standard normal values: [rank][element].
std::vector<std::vector<float>> gradients(int world, int64_t count, uint64_t seed) {
  std::vector<std::vector<float>> all(static_cast<size_t>(world));
  for (int r = 0; r < world; ++r) {
    std::mt19937_64 generator(seed * 1'000'003 + static_cast<uint64_t>(r));
    std::normal_distribution<float> normal;
    all[r].resize(static_cast<size_t>(count));
    for (float& v : all[r]) v = normal(generator);
  }
  return all;
}

// Returns the result of an allreduce of `data`, which is equal on every rank.
std::vector<float> summed(const Case& c, const Format& f, std::vector<std::vector<float>> data) {
  const int world = c.schedule.world;
  auto group = Communicator::create_local(std::vector<Device>(static_cast<size_t>(world), Device::host()),
                                          std::chrono::minutes(5));
  run_local_ranks(group, [&](Communicator& comm) {
    const auto r = static_cast<size_t>(comm.rank());
    std::vector<float>& mine = data[r];
    Stream stream = Stream::immediate_host();
    Program program(comm.transport(), c.schedule,
                    {mine.data(), mine.data(), nullptr, static_cast<int64_t>(mine.size())},
                    {.what = "numerics",
                     .wire = f.wire,
                     .fp32_intra_node = c.fp32_intra_node,
                     .rounding = {f.rounding, static_cast<uint64_t>(r) + 1, nullptr, 0}});
    Buffer workspace(Device::host(), program.workspace_bytes());
    program.bind(workspace.data());
    program.run(stream);
  });
  return std::move(data[0]);
}

// Returns the norm of the error / the norm of the exact sum.
double relative_error(const std::vector<float>& result, const std::vector<std::vector<float>>& inputs) {
  double wrong = 0, right = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    double exact = 0;
    for (const auto& input : inputs) exact += input[i];
    wrong += (result[i] - exact) * (result[i] - exact);
    right += exact * exact;
  }
  return std::sqrt(wrong / right);
}

int lossy_steps(const Case& c, const Format& f) {
  if (f.wire->exact) return 0;
  return c.fp32_intra_node ? c.schedule.inter_node_lossy_steps : c.schedule.lossy_steps;
}

void run(const NumericsOptions& o, const std::vector<Format>& chosen) {
  OutputFile json(o.json);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  fmt::print("# relative error of a sum of {} normal values per rank, without error feedback\n{:>5}  {:<28}",
             o.elements, "ranks", "schedule");
  for (const Format& f : chosen) fmt::print(" {:>22}", f.name);
  fmt::print("\n");
  for (int world : o.ranks) {
    const auto inputs = gradients(world, o.elements, o.seed);
    for (const Case& c : cases_of(world)) {
      fmt::print("{:>5}  {:<28}", world, c.name);
      for (const Format& f : chosen) {
        const double error = relative_error(summed(c, f, inputs), inputs);
        fmt::print(" {:>22.3e}", error);
        rows.push_back({{"schedule", c.name},
                        {"compression", f.name},
                        {"ranks", world},
                        {"lossy_steps", lossy_steps(c, f)},
                        {"elements", o.elements},
                        {"rel_error", error}});
      }
      fmt::print("\n");
      std::fflush(stdout);
    }
  }
  json.write(rows.dump(2) + "\n");
}

}  // namespace

void add_numerics(CLI::App& app, int&) {
  auto o = std::make_shared<NumericsOptions>();
  CLI::App* command =
      app.add_subcommand("numerics", "Error by number of ranks, for every schedule and wire format");
  command->add_option("--ranks", o->ranks, "World sizes, separated by commas (default: 2 to 64)")
      ->delimiter(',')
      ->check(CLI::Range(2, kMaxInputs + 1));
  command->add_option("--elements", o->elements, "Number of values per rank")->check(CLI::Range(1, 1 << 26));
  command->add_option("--seed", o->seed, "Seed of the values")->check(CLI::NonNegativeNumber);
  command
      ->add_option("--spec", o->specs,
                   "A wire format; repeatable (default: fp32, and bf16, fp8 and int8 with either rounding)")
      ->expected(1)
      ->take_all();
  add_json(*command, o->json, "Write the table to FILE; bench/plots/plot.py draws it");
  command->callback([o] {
    const std::vector<Format> chosen = formats(o->specs);
    run(*o, chosen);
  });
}

}  // namespace gradwire::bench
