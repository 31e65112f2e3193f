// gradwire-bench schedules: shows the cost of each schedule by world size; proves schedules.
// gradwire-bench numerics: the error of an allreduce relative to the exact sum, by number of ranks, for every
// schedule and several wire formats. Error feedback is off: the error is the rounding of a single call, which
// error feedback would retain for later calls. Ranks are threads of one process; bits do not depend on the
// transport.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>

#include "bench/harness/command.h"
#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/schedule/checker.h"
#include "collectives/schedule/schedule.h"
#include "collectives/spec/spec.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire::bench {
namespace {

// The words of --collective, in the order of Collective.
const std::vector<std::string> kCollectives = {"allreduce", "reduce_scatter", "all_gather", "broadcast"};

void drop_a_transfer(Schedule& s) {
  for (auto rounds = s.rounds.rbegin(); rounds != s.rounds.rend(); ++rounds) {
    for (Round& round : *rounds) {
      const auto received = std::find_if(round.begin(), round.end(),
                                         [](const Step& step) { return step.kind != Step::Kind::send; });
      if (received == round.end()) continue;
      round.erase(received);
      return;
    }
  }
}

class Schedules final : public Command {
 public:
  explicit Schedules(CLI::App& app)
      : Command(app, "schedules", "Rounds, bytes and lossy steps of every schedule; proves them") {
    add("--ranks", worlds_, "World sizes, separated by commas (default: 2 to 64)", CLI::Range(1, 1024))
        ->delimiter(',');
    add("--per-node", per_node_, "Ranks per node of hierarchical schedules", CLI::Range(1, 1024));
    add("--slices", slices_,
        "Run each schedule in that many slices: each slice starts one round after the previous one, and its "
        "own rounds are two apart",
        CLI::Range(1, 1024));
    add("--collective", collective_text_, "allreduce, reduce_scatter, all_gather or broadcast",
        CLI::IsMember(kCollectives))
        ->capture_default_str();
    add("--root", root_, "Root of a broadcast; in smaller worlds, the last rank", CLI::Range(0, 1023));
    add("--size-mb", size_mb_, "Buffer size for the table", CLI::PositiveNumber);
    add("--check", check_, "Prove every schedule of every world; exit code 1 if one is wrong");
    add("--max-ranks", max_ranks_, "Largest world of --check", CLI::Range(1, 1024));
    add("--damage", damage_, "With --check: drop one transfer of each schedule, to test the checker");
    add_json("Write the table, or the result of --check, to FILE");
    columns_ = {{"ranks", "ranks", 5},
                {"schedule", "variant", -28, -1, "", 1, "  "},
                {"rounds", "rounds", 7},
                {"messages", "messages", 9},
                {"sent", "sent_per_size", 8, 3},
                {"MB", "sent_mb", 9, 2},
                {"slow", "sent_slow_per_size", 8, 3},
                {"link", "busiest_link_per_size", 8, 3},
                {"lossy", "lossy_steps", 6},
                {"slow", "slow_lossy_steps", 6}};
  }

  int run() override {
    open();
    collective_ =
        static_cast<Collective>(std::ranges::find(kCollectives, collective_text_) - kCollectives.begin());
    const bool right = check_ ? check_all() : print_table();
    write_files();
    return right ? 0 : 1;
  }

 private:
  // Returns all schedules, with hierarchical schedules in the shapes `per_nodes`.
  std::vector<std::pair<std::string, Schedule>> schedules_of(int world,
                                                             const std::vector<int>& per_nodes) const {
    std::vector<std::pair<std::string, Schedule>> all;
    const bool broadcasts = collective_ == Collective::broadcast;
    const int root = std::min(root_, world - 1);
    for (ScheduleKind kind : all_schedules()) {
      if (kind == ScheduleKind::hierarchical) continue;  // below, in several shapes
      if (broadcasts ? !has_broadcast(kind) : world > max_world(kind)) continue;
      all.emplace_back(name(kind), broadcasts ? broadcast(kind, world, root) : make_schedule(kind, world));
    }
    for (int per_node : per_nodes) {
      const int nodes = world / per_node;
      const std::string shape = fmt::format("hierarchical {}x{}", nodes, per_node);
      if (broadcasts) {
        all.emplace_back(shape, broadcast(ScheduleKind::hierarchical, world, root, {.per_node = per_node}));
        continue;
      }
      for (ScheduleKind between : {ScheduleKind::two_shot, ScheduleKind::ring}) {
        if (check_ && nodes + per_node - 2 > kMaxInputs) continue;
        all.emplace_back(fmt::format("{} {}", shape, name(between)), hierarchical(nodes, per_node, between));
      }
    }
    for (auto& [label, schedule] : all) {
      if (collective_ == Collective::reduce_scatter) schedule = reduce_scatter(schedule);
      if (collective_ == Collective::all_gather) schedule = all_gather(schedule);
      schedule = pipelined(schedule, slices_);
    }
    return all;
  }

  // Checks every schedule of every world size up to max_ranks_, hierarchical schedules in every shape.
  // Returns whether all are right.
  bool check_all() {
    int checked = 0;
    Json wrong = Json::array();
    for (int world = 1; world <= max_ranks_; ++world) {
      std::vector<int> per_nodes;
      for (int nodes = 1; nodes <= world; ++nodes) {
        if (world % nodes == 0) per_nodes.push_back(world / nodes);
      }
      for (auto& [label, schedule] : schedules_of(world, per_nodes)) {
        if (damage_ && world > 1) drop_a_transfer(schedule);
        ++checked;
        const CheckReport report = check(schedule);
        if (report.ok) continue;
        const std::string what = fmt::format("{} of {}", label, world);
        wrong.push_back({{"schedule", what}, {"violations", report.to_string()}});
        fmt::print("{}: {}\n", what, report.to_string());
      }
    }
    fmt::print("{} schedules of 1 to {} ranks: {}\n", checked, max_ranks_,
               wrong.empty() ? "each proven right, at its known optimum of bytes and its declared rounding"
                             : fmt::format("{} wrong", wrong.size()));
    rows_ = {{"checked", checked}, {"max_ranks", max_ranks_}, {"wrong", wrong}};
    return wrong.empty();
  }

  bool print_table() {
    fmt::print(
        "Sent: by the busiest rank, as a multiple of the buffer and in FP32 for {:.4g} MB; slow: between "
        "nodes only.\n"
        "Link: over the busiest pair of ranks. Lossy: times an element is rounded, with the wire format on "
        "every link\n"
        "and on slow links only.\n\n",
        size_mb_);
    print_heading();
    bool all_ok = true;
    for (int world : worlds_) {
      const int per_node = per_node_ > 0 ? per_node_ : usual_per_node(world);
      std::vector<int> per_nodes;
      if (per_node > 0 && world % per_node == 0) per_nodes.push_back(per_node);
      for (const auto& [label, s] : schedules_of(world, per_nodes)) {
        const CheckReport report = check(s);
        all_ok = all_ok && report.ok;
        if (!report.ok) fmt::print("{} of {}: {}\n", label, world, report.to_string());
        int64_t sent = 0, slow = 0;
        for (int r = 0; r < world; ++r) {
          sent = std::max(sent, report.sent_inter_node[r] + report.sent_intra_node[r]);
          slow = std::max(slow, report.sent_inter_node[r]);
        }
        const double chunks = s.chunks, share = static_cast<double>(sent) / chunks;
        add_row({{"collective", name(s.collective)},
                 {"schedule", name(s.kind)},
                 {"variant", label},
                 {"ranks", world},
                 {"nodes", s.nodes},
                 {"per_node", s.per_node},
                 {"chunks", s.chunks},
                 {"rounds", s.num_rounds()},
                 {"messages", report.messages},
                 {"sent_per_size", share},
                 {"sent_slow_per_size", static_cast<double>(slow) / chunks},
                 {"busiest_link_per_size", static_cast<double>(report.busiest_link) / chunks},
                 {"lossy_steps", report.lossy_steps},
                 {"slow_lossy_steps", report.inter_node_lossy_steps},
                 {"proven", report.ok}},
                {{"sent_mb", share * size_mb_}});
      }
    }
    return all_ok;
  }

  std::vector<int> worlds_ = {2, 4, 8, 16, 32, 64};
  int per_node_ = 0, slices_ = 1, root_ = 0, max_ranks_ = 64;
  std::string collective_text_ = "allreduce";
  Collective collective_ = Collective::allreduce;
  double size_mb_ = 25;
  bool check_ = false, damage_ = false;
};

class Numerics final : public Command {
 public:
  explicit Numerics(CLI::App& app)
      : Command(app, "numerics", "Error by number of ranks, for every schedule and wire format") {
    add("--ranks", worlds_, "World sizes, separated by commas (default: 2 to 64)",
        CLI::Range(2, kMaxInputs + 1))
        ->delimiter(',');
    add("--elements", elements_, "Number of values per rank", CLI::Range(1, 1 << 26));
    add("--seed", seed_, "Seed of the values", CLI::NonNegativeNumber);
    add_repeatable("--spec", texts_,
                   "A wire format; repeatable (default: fp32, and bf16, fp8 and int8 with either rounding)")
        ->type_name("SPEC");
    add_json("Write the table to FILE; bench/plots/plot.py draws it");
  }

  int run() override {
    columns_ = {{"ranks", "", 5}, {"schedule", "", -28, -1, "", 1, "  "}};
    std::vector<CompressionSpec> specs;
    for (const std::string& text : texts_) {
      columns_.push_back({text.c_str(), "", 22});
      specs.push_back(CompressionSpec::parse(text));
      if (specs.back().method != CompressionSpec::Method::wire)
        throw BadInput("--spec {}: not a wire format by itself", text);
    }
    open();
    fmt::print("# relative error of a sum of {} normal values per rank, without error feedback\n", elements_);
    print_heading();
    for (int world : worlds_) {
      // Independent standard normal values, and their sums.
      inputs_.assign(static_cast<size_t>(world), std::vector<float>(static_cast<size_t>(elements_)));
      exact_.assign(static_cast<size_t>(elements_), 0.0);
      for (int r = 0; r < world; ++r) {
        std::mt19937_64 generator(seed_ * 1'000'003 + static_cast<uint64_t>(r));
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < exact_.size(); ++i) exact_[i] += inputs_[r][i] = normal(generator);
      }
      const int per_node = usual_per_node(world);
      for (ScheduleKind kind : all_schedules()) {
        const bool hierarchical = kind == ScheduleKind::hierarchical;
        if (hierarchical && per_node <= 1) continue;
        const Schedule schedule = make_schedule(kind, world, {.per_node = per_node});
        measure(name(kind), schedule, specs, false);
        if (hierarchical) measure("hierarchical,intra_node=fp32", schedule, specs, true);
      }
    }
    write_files();
    return 0;
  }

 private:
  // Prints the errors of a schedule with each spec as one line, and adds a row for each.
  void measure(const std::string& label, const Schedule& schedule, const std::vector<CompressionSpec>& specs,
               bool fp32_intra_node) {
    std::vector<std::string> cells = {std::to_string(schedule.world), label};
    for (size_t i = 0; i < specs.size(); ++i) {
      const double error = relative_error(schedule, specs[i], fp32_intra_node);
      cells.push_back(fmt::format("{:.3e}", error));
      rows_.push_back({{"schedule", label},
                       {"compression", texts_[i]},
                       {"ranks", schedule.world},
                       {"lossy_steps", specs[i].wire->exact ? 0
                                       : fp32_intra_node    ? schedule.inter_node_lossy_steps
                                                            : schedule.lossy_steps},
                       {"elements", elements_},
                       {"rel_error", error}});
    }
    fmt::print("{}\n", line_text(cells));
    std::fflush(stdout);
  }

  // Returns the norm of the error of an allreduce, which is equal on every rank, / the norm of the exact sum.
  double relative_error(const Schedule& schedule, const CompressionSpec& spec, bool fp32_intra_node) const {
    auto data = inputs_;
    auto group =
        Communicator::create_local(std::vector<Device>(data.size(), Device::host()), std::chrono::minutes(5));
    run_local_ranks(group, [&](Communicator& comm) {
      const auto r = static_cast<size_t>(comm.rank());
      Stream stream = Stream::immediate_host();
      Program program(comm.transport(), schedule, {data[r].data(), data[r].data(), nullptr, elements_},
                      {.what = "numerics",
                       .wire = spec.wire,
                       .fp32_intra_node = fp32_intra_node,
                       .rounding = {spec.rounding, static_cast<uint64_t>(r) + 1, nullptr, 0}});
      Buffer workspace(Device::host(), program.workspace_bytes());
      program.bind(workspace.data());
      program.run(stream);
    });
    double wrong = 0, right = 0;
    for (size_t i = 0; i < exact_.size(); ++i) {
      wrong += (data[0][i] - exact_[i]) * (data[0][i] - exact_[i]);
      right += exact_[i] * exact_[i];
    }
    return std::sqrt(wrong / right);
  }

  std::vector<int> worlds_ = {2, 3, 4, 5, 8, 11, 16, 23, 32, 45, 64};
  int64_t elements_ = 1 << 15;
  uint64_t seed_ = 1;
  std::vector<std::string> texts_ = {"fp32",
                                     "bf16",
                                     "bf16:round=stochastic",
                                     "fp8",
                                     "fp8:round=stochastic",
                                     "int8",
                                     "int8:round=stochastic"};
  std::vector<std::vector<float>> inputs_;  // [rank][element]
  std::vector<double> exact_;
};

}  // namespace

std::unique_ptr<Command> make_schedules(CLI::App& app) {
  return std::make_unique<Schedules>(app);
}

std::unique_ptr<Command> make_numerics(CLI::App& app) {
  return std::make_unique<Numerics>(app);
}

}  // namespace gradwire::bench
