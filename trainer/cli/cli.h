// The `gradwire` command: train, compare, doctor.
#pragma once

namespace gradwire {

// Exit codes: 0 done, 1 failed while running, 2 bad input, with one line on stderr for 1 and 2.
int cli_main(int argc, char** argv);

}  // namespace gradwire
