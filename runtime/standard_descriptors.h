// The descriptors 0 to 2, and the signal of a pipe that nobody reads.
#pragma once

namespace gradwire {

// For programs, before they open anything: opens /dev/null on those of the descriptors 0 to 2 that are closed, so that
// no file and no connection becomes standard input, output or error. Ignores SIGPIPE: writing to a pipe or terminal
// that has gone fails with an error instead of ending the process in the middle of a checkpoint.
// Also ignores SIGXFSZ: a file that would exceed `ulimit -f` gives an error.
void prepare_standard_descriptors();

// For libraries, whose caller may have closed some of them: returns `fd`, or a copy of it above 2 (then `fd` is closed).
// -1 stays -1; also -1 when there is no descriptor left, with errno set.
int above_standard_descriptors(int fd);

}  // namespace gradwire
