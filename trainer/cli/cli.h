// The `gradwire` command: train, compare, doctor, top.
#pragma once

namespace gradwire {

// Returns the exit code: 0 done, 1 failed while running, 2 bad input. 1 and 2 print one line on stderr.
int cli_main(int argc, char** argv);

}  // namespace gradwire
