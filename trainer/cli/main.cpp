#include "runtime/util/no_memory.h"
#include "trainer/cli/cli.h"

// Runs before the static initializers, which allocate.
[[gnu::constructor(101)]] static void prepare() {
  gradwire::exit_cleanly_without_memory("gradwire");
}

int main(int argc, char** argv) {
  return gradwire::cli_main(argc, argv);
}
