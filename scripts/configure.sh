#!/usr/bin/env bash
# Configures a CMake preset (release, debug, asan, tsan). If the test libraries are missing, prints a message
# and omits the tests.
#
#   scripts/configure.sh PRESET         everything that this machine can build
#   scripts/configure.sh release host   only the host side, if build/ is new. The next `configure.sh release`
#                                       adds CUDA
set -euo pipefail
cd "$(dirname "$0")/.."
flags=()
if [ "$1" = release ]; then
  # `release host` creates this file. The file shows that `release host`, and not the user, omitted CUDA.
  mark=build/host-side-alone
  if [ "${2:-}" = host ] && { [ -f $mark ] || [ ! -f build/CMakeCache.txt ]; }; then
    mkdir -p build
    touch $mark
    flags+=(-DGRADWIRE_CUDA=OFF)
  elif [ "${2:-}" != host ] && [ -f $mark ]; then
    rm $mark
    flags+=(-DGRADWIRE_CUDA=AUTO)
  fi
fi
tests=ON
for header in gtest/gtest.h boost/context/fiber.hpp; do
  if ! echo "#include <$header>" | "${CXX:-c++}" -std=c++20 -E -x c++ - > /dev/null 2>&1; then
    echo "configure: <$header> is missing, so the tests are not built"
    tests=OFF
  fi
done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$1" -DGRADWIRE_TESTS=$tests "${flags[@]}" > "$log" 2>&1; then
  cat "$log"
  exit 1
fi
grep -E "Gradwire:|[Ww]arning" "$log" || true
