// The `gradwire` command: train, compare, doctor, plan, top, report, export.
#pragma once

namespace gradwire {

// Runs the command, and returns the exit code: 0 for success, 1 for a failure while running, 2 for bad input,
// 3 if training ended with a loss that is not finite. Codes 1 and 2 print one line on stderr. `train` without
// flags also prints examples.
int cli_main(int argc, char** argv);

}  // namespace gradwire
