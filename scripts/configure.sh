#!/usr/bin/env bash
# Configures a CMake preset (release, debug, asan, tsan). If the test libraries are missing, prints a message
# and omits the tests.
#
#   scripts/configure.sh PRESET         everything that this machine can build
#   scripts/configure.sh release demo   without tests and, if build/ is new and the machine has no GPU,
#                                       without CUDA. The next `configure.sh release` adds both
set -euo pipefail
cd "$(dirname "$0")/.."
flags=()
mark=build/host-side-alone  # shows that `release demo`, and not the user, omitted CUDA
if [ "$*" = "release demo" ]; then
  if [ -f $mark ] || { [ ! -f build/CMakeCache.txt ] && ! nvidia-smi -L > /dev/null 2>&1; }; then
    mkdir -p build
    touch $mark
    flags+=(-DGRADWIRE_CUDA=OFF)
  fi
elif [ "$1" = release ] && [ -f $mark ]; then
  rm $mark
  flags+=(-DGRADWIRE_CUDA=AUTO)
fi
tests=ON headers=(gtest/gtest.h boost/context/fiber.hpp)
[ "${2:-}" = demo ] && tests=OFF headers=()
for header in "${headers[@]}"; do
  if ! echo "#include <$header>" | "${CXX:-c++}" -std=c++20 -E -x c++ - > /dev/null 2>&1; then
    echo "configure: <$header> is missing, so the tests are not built"
    tests=OFF
  fi
done
# Other compilers have additional warnings, which must not prevent use.
[ "$("${CXX:-c++}" -dumpversion 2> /dev/null)" != 12 ] || flags+=(-DGRADWIRE_WERROR=ON)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$1" -DGRADWIRE_TESTS=$tests "${flags[@]}" > "$log" 2>&1; then
  cat "$log"
  exit 1
fi
grep -E "Gradwire:|[Ww]arning" "$log" || true
