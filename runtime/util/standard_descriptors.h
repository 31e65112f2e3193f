// Handling of the descriptors 0 to 2, and of the signal of a pipe without a reader.
#pragma once

namespace gradwire {

// For programs, before they open anything: opens /dev/null on each closed descriptor of 0 to 2, so that no
// file or connection becomes standard input, output or error. Ignores SIGPIPE: writing to a closed pipe or
// terminal fails with an error instead of ending the process in the middle of a checkpoint. Also ignores
// SIGXFSZ: a file that would exceed `ulimit -f` gives an error.
void prepare_standard_descriptors();

// For libraries, whose caller may have closed some of these descriptors: returns `fd`, or a copy of it above
// 2 (then `fd` is closed). -1 stays -1. Returns -1, with errno set, when no descriptor is left.
int above_standard_descriptors(int fd);

}  // namespace gradwire
