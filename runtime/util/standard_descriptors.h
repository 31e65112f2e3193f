// Handling of the descriptors 0 to 2, and of the signal of a pipe without a reader.
#pragma once

namespace gradwire {

// Opens /dev/null on each closed descriptor of 0 to 2, so that files and connections never become standard
// input, output or error. Called by programs before they open files. Ignores SIGPIPE: writing to a closed
// pipe or terminal fails with an error instead of ending the process in the middle of a checkpoint. Also
// ignores SIGXFSZ: a file that would exceed `ulimit -f` gives an error.
void prepare_standard_descriptors();

// Returns `fd` or, if `fd` is at most 2, a copy above 2, and closes `fd`. Used by libraries, whose caller may
// have closed some of these descriptors. -1 stays -1. Returns -1, with errno set, when no descriptor is left.
int above_standard_descriptors(int fd);

}  // namespace gradwire
