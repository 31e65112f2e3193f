#!/usr/bin/env bash
# Configures a CMake preset (release, debug, asan, tsan). Without the test libraries it configures without tests, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=ON
for header in gtest/gtest.h boost/context/fiber.hpp; do
  if ! echo "#include <$header>" | "${CXX:-c++}" -std=c++20 -E -x c++ - > /dev/null 2>&1; then
    echo "configure: <$header> is missing, so the tests are not built"
    tests=OFF
  fi
done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$1" -DGRADWIRE_TESTS=$tests > "$log" 2>&1; then
  cat "$log"
  exit 1
fi
grep -E "Gradwire:|[Ww]arning" "$log" || true
