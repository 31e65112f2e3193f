// The flags of each command: ranges, choices, conflicts. Parsing throws CLI::ParseError if a flag is invalid.
#pragma once

#include "trainer/cli/options.h"
#include "trainer/cli/plan.h"
#include "trainer/cli/report.h"
#include "trainer/cli/top.h"

namespace CLI {
class App;
}

namespace gradwire {

void add_train_flags(CLI::App& command, RunOptions& options);
void add_compare_flags(CLI::App& command, RunOptions& options);
void add_top_flags(CLI::App& command, TopOptions& options);
void add_report_flags(CLI::App& command, ReportOptions& options);
void add_plan_flags(CLI::App& command, PlanOptions& options);
void add_export_flags(CLI::App& command, ExportOptions& options);
void add_doctor_flags(CLI::App& command, RunOptions& options, bool& show_environment);

}  // namespace gradwire
