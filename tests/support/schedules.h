// Schedules for tests.
#pragma once

#include <string>
#include <vector>

#include "collectives/schedule/schedule.h"
#include "collectives/spec/spec.h"

namespace gradwire::testing {

inline std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (ScheduleKind kind : all_schedules()) names.emplace_back(name(kind));
  return names;
}

// Returns an allreduce by its name in specs. Nodes have two ranks.
inline Schedule schedule_named(const std::string& schedule, int world) {
  return make_schedule(CompressionSpec::parse("fp32:schedule=" + schedule).schedule, world, {.per_node = 2});
}

// Returns all allreduces, the hierarchical one in every shape.
inline std::vector<Schedule> allreduces(int world) {
  std::vector<Schedule> all;
  for (ScheduleKind kind : all_schedules()) {
    if (kind != ScheduleKind::hierarchical) all.push_back(make_schedule(kind, world));
  }
  for (int nodes = 1; nodes <= world; ++nodes) {
    if (world % nodes != 0) continue;
    all.push_back(hierarchical(nodes, world / nodes));
    // Between two nodes a ring has the transfers of a two-shot.
    if (nodes > 2) all.push_back(hierarchical(nodes, world / nodes, ScheduleKind::ring));
  }
  return all;
}

}  // namespace gradwire::testing
