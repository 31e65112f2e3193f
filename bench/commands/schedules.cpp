// gradwire-bench schedules: shows the cost of each schedule by world size; proves schedules.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/commands/main.h"
#include "collectives/schedule/checker.h"
#include "collectives/schedule/schedule.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire::bench {
namespace {

struct SchedulesOptions {
  std::vector<int> ranks = {2, 4, 8, 16, 32, 64};
  int per_node = 0;
  int slices = 1;
  Collective collective = Collective::allreduce;
  int root = 0;
  double size_mb = 25;
  bool check = false, damage = false;
  int max_ranks = 64;
  std::string json;
};

struct NamedSchedule {
  std::string name;
  Schedule schedule;
};

Schedule of_collective(Schedule allreduce, Collective collective) {
  if (collective == Collective::reduce_scatter) return reduce_scatter(allreduce);
  if (collective == Collective::all_gather) return all_gather(allreduce);
  return allreduce;
}

// Returns all schedules, with hierarchical schedules in the shapes `per_nodes`.
std::vector<NamedSchedule> schedules_of(int world, const std::vector<int>& per_nodes,
                                        const SchedulesOptions& o) {
  std::vector<NamedSchedule> all;
  const bool broadcasts = o.collective == Collective::broadcast;
  const int root = std::min(o.root, world - 1);
  for (ScheduleKind kind : all_schedules()) {
    if (kind == ScheduleKind::hierarchical) continue;  // below, in several shapes
    if (kind == ScheduleKind::tree && broadcasts) continue;
    if (kind == ScheduleKind::two_shot && world > kMaxInputs + 1 && !broadcasts) continue;
    all.push_back({name(kind), broadcasts ? broadcast(kind, world, root) : make_schedule(kind, world)});
  }
  for (int per_node : per_nodes) {
    if (broadcasts) {
      all.push_back({fmt::format("hierarchical {}x{}", world / per_node, per_node),
                     broadcast(ScheduleKind::hierarchical, world, root, {.per_node = per_node})});
    } else {
      for (ScheduleKind between : {ScheduleKind::two_shot, ScheduleKind::ring}) {
        if (o.check && world / per_node + per_node - 2 > kMaxInputs) continue;
        all.push_back({fmt::format("hierarchical {}x{} {}", world / per_node, per_node, name(between)),
                       hierarchical(world / per_node, per_node, between)});
      }
    }
  }
  for (NamedSchedule& n : all) n.schedule = pipelined(of_collective(n.schedule, o.collective), o.slices);
  return all;
}

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

// Checks every schedule of every world size up to max_ranks. Checks hierarchical schedules in every shape.
// Returns the exit code.
int check_all(const SchedulesOptions& o, OutputFile& json) {
  int checked = 0;
  nlohmann::ordered_json wrong = nlohmann::ordered_json::array();
  auto prove = [&](std::string what, Schedule s) {
    if (o.damage && s.world > 1) drop_a_transfer(s);
    ++checked;
    CheckReport report = check(s);
    if (report.ok) return;
    wrong.push_back({{"schedule", what}, {"violations", report.to_string()}});
    fmt::print("{}: {}\n", what, report.to_string());
  };
  for (int n = 1; n <= o.max_ranks; ++n) {
    std::vector<int> per_nodes;
    for (int nodes = 1; nodes <= n; ++nodes) {
      if (n % nodes == 0) per_nodes.push_back(n / nodes);
    }
    for (NamedSchedule& named : schedules_of(n, per_nodes, o)) {
      prove(fmt::format("{} of {}", named.name, n), std::move(named.schedule));
    }
  }
  fmt::print("{} schedules of 1 to {} ranks: {}\n", checked, o.max_ranks,
             wrong.empty() ? "each proven right, at its known optimum of bytes and its declared rounding"
                           : fmt::format("{} wrong", wrong.size()));
  const nlohmann::ordered_json document = {
      {"checked", checked}, {"max_ranks", o.max_ranks}, {"wrong", wrong}};
  json.write(document.dump(2) + "\n");
  return wrong.empty() ? 0 : 1;
}

int print_table(const SchedulesOptions& o, OutputFile& json) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  fmt::print(
      "Sent: by the busiest rank, as a multiple of the buffer and in FP32 for {:.4g} MB; slow: between nodes "
      "only.\n"
      "Link: over the busiest pair of ranks. Lossy: times an element is rounded, with the wire format on "
      "every link\n"
      "and on slow links only.\n\n",
      o.size_mb);
  fmt::print("{:>5}  {:<28} {:>7} {:>9} {:>8} {:>9} {:>8} {:>8} {:>6} {:>6}\n", "ranks", "schedule", "rounds",
             "messages", "sent", "MB", "slow", "link", "lossy", "slow");
  bool all_ok = true;
  for (int world : o.ranks) {
    const int per_node = o.per_node > 0 ? o.per_node : usual_per_node(world);
    std::vector<int> per_nodes;
    if (per_node > 0 && world % per_node == 0) per_nodes.push_back(per_node);
    for (const NamedSchedule& n : schedules_of(world, per_nodes, o)) {
      const Schedule& s = n.schedule;
      CheckReport report = check(s);
      all_ok = all_ok && report.ok;
      if (!report.ok) fmt::print("{} of {}: {}\n", n.name, world, report.to_string());
      int64_t sent = 0, slow = 0;
      for (int r = 0; r < world; ++r) {
        sent = std::max(sent, report.sent_inter_node[r] + report.sent_intra_node[r]);
        slow = std::max(slow, report.sent_inter_node[r]);
      }
      auto of_buffer = [&](int64_t chunks) { return static_cast<double>(chunks) / s.chunks; };
      fmt::print("{:>5}  {:<28} {:>7} {:>9} {:>8.3f} {:>9.2f} {:>8.3f} {:>8.3f} {:>6} {:>6}\n", world, n.name,
                 s.num_rounds(), report.messages, of_buffer(sent), of_buffer(sent) * o.size_mb,
                 of_buffer(slow), of_buffer(report.busiest_link), report.lossy_steps,
                 report.inter_node_lossy_steps);
      rows.push_back({{"collective", name(s.collective)},
                      {"schedule", name(s.kind)},
                      {"variant", n.name},
                      {"ranks", world},
                      {"nodes", s.nodes},
                      {"per_node", s.per_node},
                      {"chunks", s.chunks},
                      {"rounds", s.num_rounds()},
                      {"messages", report.messages},
                      {"sent_per_size", of_buffer(sent)},
                      {"sent_slow_per_size", of_buffer(slow)},
                      {"busiest_link_per_size", of_buffer(report.busiest_link)},
                      {"lossy_steps", report.lossy_steps},
                      {"slow_lossy_steps", report.inter_node_lossy_steps},
                      {"proven", report.ok}});
    }
  }
  json.write(rows.dump(2) + "\n");
  return all_ok ? 0 : 1;
}

}  // namespace

int usual_per_node(int world) {
  for (int per_node = std::min(8, world / 2); per_node > 1; --per_node) {
    if (world % per_node == 0) return per_node;
  }
  return 0;
}

void add_schedules(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<SchedulesOptions>();
  CLI::App* command =
      app.add_subcommand("schedules", "Rounds, bytes and lossy steps of every schedule; proves them");
  command->add_option("--ranks", o->ranks, "World sizes, separated by commas (default: 2 to 64)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  command->add_option("--per-node", o->per_node, "Ranks per node of hierarchical schedules")
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--slices", o->slices,
                   "Run each schedule in that many slices: each slice starts one round after the previous "
                   "one, and its own rounds are two apart")
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--collective", o->collective,
                   "allreduce (default), reduce_scatter, all_gather or broadcast")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Collective>{{"allreduce", Collective::allreduce},
                                            {"reduce_scatter", Collective::reduce_scatter},
                                            {"all_gather", Collective::all_gather},
                                            {"broadcast", Collective::broadcast}}));
  command->add_option("--root", o->root, "Root of a broadcast; in smaller worlds, the last rank")
      ->check(CLI::Range(0, 1023));
  command->add_option("--size-mb", o->size_mb, "Buffer size for the table")->check(CLI::PositiveNumber);
  command->add_flag("--check", o->check, "Prove every schedule of every world; exit code 1 if one is wrong");
  command->add_option("--max-ranks", o->max_ranks, "Largest world of --check")->check(CLI::Range(1, 1024));
  command->add_flag("--damage", o->damage,
                    "With --check: drop one transfer of each schedule, to test the checker");
  add_json(*command, o->json, "Write the table, or the result of --check, to FILE");
  command->callback([o, &exit_code] {
    OutputFile json(o->json);
    exit_code = o->check ? check_all(*o, json) : print_table(*o, json);
  });
}

}  // namespace gradwire::bench
