// One target as a libFuzzer program: -DGRADWIRE_FUZZ_TARGET=NAME. See scripts/fuzz.sh.
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::GRADWIRE_FUZZ_TARGET({data, size});
  return 0;
}
