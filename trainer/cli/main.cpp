#include "runtime/util/error.h"
#include "trainer/cli/session.h"

// Prepares the process before the static initializers allocate memory.
[[gnu::constructor(101)]] static void prepare() {
  gradwire::exit_cleanly_without_memory("gradwire");
}

int main(int argc, char** argv) {
  return gradwire::cli_main(argc, argv);
}
