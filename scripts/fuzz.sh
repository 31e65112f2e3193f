#!/usr/bin/env bash
# Runs libFuzzer with ASan and UBSan on the parsers of untrusted input (tests/fuzz); make soak SOAK=fuzz.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]      60 seconds per target, all targets
#   scripts/fuzz.sh --smoke                    100 inputs of each target, on the release build's parsers
#
# clang compiles the parsers, with coverage and sanitizers. The rest of Gradwire, whose kernels need GCC,
# comes from a release build of the host side. New inputs stay in build-fuzz/found/TARGET. The path of an
# input that crashes a target is printed; add the input to the target's folder in tests/fuzz/corpus with the
# fix.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
seconds=${1:-60}
shift || true
targets=("$@")
if [ -n "$smoke" ]; then
  tests=$(ctest --test-dir build -N)
  for target in $(build/bin/fuzz_tests --list); do
    grep -q ": fuzz_$target\$" <<< "$tests" && continue
    echo "fuzz: tests/fuzz/CMakeLists.txt has no test of the target $target" >&2
    exit 1
  done
fi
clang=${CLANG:-clang++}
if ! command -v "$clang" > /dev/null; then
  [ -z "$smoke" ] || not_checked "no $clang"
  echo "fuzz: needs clang (apt install clang), or CLANG=PATH" >&2
  exit 1
fi
readers=(
  collectives/c_api/state.cpp collectives/c_api/state.cpp collectives/net/handshake.cpp
  collectives/net/membership.cpp collectives/net/socket.cpp collectives/net/store.cpp
  collectives/net/quorum.cpp collectives/spec/spec.cpp kernels/gemm/tuning.cpp
  trainer/checkpoint/checkpoint.cpp trainer/checkpoint/folder.cpp trainer/data/safetensors.cpp
  trainer/config/config.cpp trainer/data/arrays.cpp trainer/data/cifar10.cpp trainer/data/dataset.cpp
  trainer/log/records.cpp trainer/log/console.cpp trainer/log/records.cpp trainer/log/summary.cpp
)
for reader in "${readers[@]}"; do
  [ -f "$reader" ] || { echo "fuzz: $reader does not exist" >&2; exit 1; }
done
if [ -n "$smoke" ]; then
  folder=$place/fuzz build=build limits=(-runs=100)
  # Compiling the parsers takes two minutes. The targets are in one file, which takes a third of the time of
  # separate files.
  mkdir -p "$folder"
  ls tests/fuzz/*.cpp | grep -v /replay.cpp | sed 's/.*/#include "&"/' > "$folder/all.cpp.new"
  cmp -s "$folder/all.cpp.new" "$folder/all.cpp" || mv "$folder/all.cpp.new" "$folder/all.cpp"
  sources=("$folder/all.cpp") included=(tests/fuzz) optimization=-O0
else
  folder=build-fuzz build=build-fuzz/release limits=("-max_total_time=$seconds")
  mkdir -p $folder
  cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_CUDA=OFF > $folder/configure.log 2>&1 ||
    { cat $folder/configure.log; exit 1; }
  cmake --build $build --target fuzz_tests
  sources=("${readers[@]}" tests/fuzz/*.cpp) included=(tests/fuzz/*.h)
fi
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <($build/bin/fuzz_tests --list)
[ ${#targets[@]} -gt 0 ] || { echo "fuzz: fuzz_tests names no targets" >&2; exit 1; }
flags=(-std=c++20 ${optimization:--O1} -g1 -fPIC -I. -Iinclude -ffp-contract=off
  -Wno-psabi -fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr)
cache=()
! command -v ccache > /dev/null || cache=(env CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 ccache)
mkdir -p "$folder/objects"
objects=()
for source in "${sources[@]}"; do
  [ "$source" != tests/fuzz/replay.cpp ] || continue
  object=$folder/objects/${source//\//-}.o
  objects+=("$object")
  if [ ! -e "$object" ] || [ "$source" -nt "$object" ] || [ -n "$(find "${included[@]}" trainer collectives kernels \
    runtime \( -name '*.h' -o -path 'tests/fuzz/*' \) -newer "$object" -print -quit)" ]; then
    [ -n "$smoke" ] || echo "fuzz: compiling $source"
    "${cache[@]}" "$clang" "${flags[@]}" -fsanitize=fuzzer-no-link -c "$source" -o "$object"
  fi
done
# Finds the release build's libraries. The parsers compiled by clang precede and replace the parsers in these
# libraries.
mapfile -t libraries < <(ninja -C $build -t commands bin/fuzz_tests | tail -n 1 |
  tr ' ' '\n' | grep -E '\.(a|o|so)$|^-l' | grep -v '^tests/fuzz' | sed -E "s|^([^-/])|$build/\1|")
"$clang" "${flags[@]}" -fsanitize=fuzzer "${objects[@]}" -Wl,-z,muldefs \
  -Wl,--start-group "${libraries[@]}" -Wl,--end-group -Wl,-rpath,"$PWD/$build/lib" -lpthread -o "$folder/fuzz"
status=0
for target in "${targets[@]}"; do
  program=$folder/fuzz-$target
  ln -sf fuzz "$program"  # the program's name selects the target
  mkdir -p "$folder/found/$target" "$folder/seeds/$target"
  $build/bin/fuzz_tests "$target" --mutations 0 --write-seeds "$folder/seeds/$target"
  corpus=("$folder/found/$target" "$folder/seeds/$target")
  [ ! -d "tests/fuzz/corpus/$target" ] || corpus+=("tests/fuzz/corpus/$target")
  # The leak check is off, because Gradwire's threads and rendezvous outlive a run on purpose.
  "$program" "${limits[@]}" -timeout=10 -rss_limit_mb=3000 -detect_leaks=0 -print_final_stats=1 \
    -verbosity=0 -artifact_prefix="$folder/$target-" "${corpus[@]}" > "$folder/$target.log" 2>&1 &&
    ! grep "unrecognized flag" "$folder/$target.log" || {
    tail -30 "$folder/$target.log"
    status=1
  }
  echo "fuzz: $target: $(sed -n 's/^stat::number_of_executed_units: */inputs /p' "$folder/$target.log")"
done
exit $status
