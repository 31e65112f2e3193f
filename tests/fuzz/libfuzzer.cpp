// All targets as one libFuzzer program. The program's file name, fuzz-NAME, selects the target NAME
// (scripts/fuzz.sh).
#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/targets.h"

namespace {
const gradwire::fuzz::Target* chosen = nullptr;
}

extern "C" int LLVMFuzzerInitialize(int*, char*** argv) {
  const std::string_view program = (*argv)[0];
  for (const gradwire::fuzz::Target& target : gradwire::fuzz::kTargets) {
    if (program.substr(program.rfind("fuzz-") + 5) == target.name) chosen = &target;
  }
  if (chosen == nullptr) {
    std::fprintf(stderr, "fuzz: '%s' does not end with the name of a target\n", (*argv)[0]);
    std::exit(2);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  chosen->run({data, size});
  return 0;
}
