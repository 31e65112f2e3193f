#!/usr/bin/env bash
# make fuzz: libFuzzer with ASan and UBSan on the parsers of untrusted input (tests/fuzz).
#
#   scripts/fuzz.sh [SECONDS_PER_TARGET [TARGET...]]     60 seconds, all targets
#
# clang compiles the parsers, with coverage and sanitizers. The rest of Gradwire, whose kernels need GCC,
# comes from a release build of the host side. New inputs stay in build-fuzz/found/TARGET. The path of an
# input that crashes a target is printed; add the input to the target's folder in tests/fuzz/corpus with the
# fix.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(checkpoint cifar handshake_in handshake_out idx log safetensors settings state store)
clang=${CLANG:-clang++}
command -v "$clang" > /dev/null || { echo "fuzz: needs clang (apt install clang), or CLANG=PATH"; exit 1; }

build=build-fuzz/release
cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_CUDA=OFF > build-fuzz.log 2>&1 || { cat build-fuzz.log; exit 1; }
rm build-fuzz.log
cmake --build $build --target fuzz_tests
readers=(
  collectives/c_api/state.cpp collectives/codec/powersgd_choice.cpp collectives/rendezvous/handshake.cpp collectives/rendezvous/store.cpp collectives/spec/spec.cpp
  kernels/gemm/tuning.cpp
  trainer/checkpoint/checkpoint.cpp trainer/checkpoint/folder.cpp trainer/checkpoint/safetensors.cpp
  trainer/config/config.cpp trainer/data/cifar10.cpp trainer/data/fashion_mnist.cpp trainer/data/file.cpp
  trainer/log/earlier_run.cpp trainer/log/live_run.cpp trainer/log/records.cpp trainer/log/stragglers.cpp
)
version=$(sed -n 's/^project(gradwire VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
flags=(-std=c++20 -O1 -g1 -fPIC -I. "-DGRADWIRE_VERSION=\"$version\"" -ffp-contract=off -Wno-psabi
  -fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr)
mkdir -p build-fuzz/objects
objects=()
for source in "${readers[@]}" tests/fuzz/*.cpp; do
  case $source in */replay.cpp | */libfuzzer.cpp) continue ;; esac
  object=build-fuzz/objects/${source//\//-}.o
  objects+=("$object")
  if [ ! -e "$object" ] || [ -n "$(find "$source" tests/fuzz/*.h trainer collectives kernels runtime -name '*.h' -newer "$object" -print -quit)" ] ||
    [ "$source" -nt "$object" ]; then
    echo "fuzz: compiling $source"
    "$clang" "${flags[@]}" -fsanitize=fuzzer-no-link -c "$source" -o "$object"
  fi
done
# The release build's libraries. clang's parsers precede and replace their copies in these libraries.
mapfile -t libraries < <(ninja -C $build -t commands bin/fuzz_tests | tail -n 1 |
  tr ' ' '\n' | grep -E '\.(a|o|so)$|^-l' | grep -v '^tests/fuzz' | sed -E "s|^([^-/])|$build/\1|")
status=0
for target in "${targets[@]}"; do
  program=build-fuzz/fuzz-$target
  "$clang" "${flags[@]}" -DGRADWIRE_FUZZ_TARGET="$target" -fsanitize=fuzzer tests/fuzz/libfuzzer.cpp \
    "${objects[@]}" -Wl,-z,muldefs \
    -Wl,--start-group "${libraries[@]}" -Wl,--end-group -Wl,-rpath,"$PWD/$build/lib" -lpthread -o "$program"
  mkdir -p "build-fuzz/found/$target" "build-fuzz/seeds/$target"
  $build/bin/fuzz_tests "$target" --mutations 0 --write-seeds "build-fuzz/seeds/$target"
  corpus=("build-fuzz/found/$target" "build-fuzz/seeds/$target")
  [ ! -d "tests/fuzz/corpus/$target" ] || corpus+=("tests/fuzz/corpus/$target")
  # No leak check, because Gradwire's threads and rendezvous outlive a run on purpose.
  "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=3000 -detect_leaks=0 -print_final_stats=1 \
    -verbosity=0 -artifact_prefix="build-fuzz/$target-" "${corpus[@]}" > "build-fuzz/$target.log" 2>&1 || {
    tail -30 "build-fuzz/$target.log"
    status=1
  }
  echo "fuzz: $target: $(sed -n 's/^stat::number_of_executed_units: */inputs /p' "build-fuzz/$target.log")"
done
exit $status
