#!/usr/bin/env bash
# Builds and runs tests. Continues after failures. The last line has the totals.
#
#   scripts/test.sh [PART...]     without a part: all tests of the release build
#
# PART: system       tests of the release build that depend on installed packages and on the user. Without
#                    root omits those of PART=root
#       root         of these the tests that need root
#       code         of the release build the other tests, which depend on the code and nvcc
#       sanitizers   a selection under AddressSanitizer + UBSan, then under ThreadSanitizer
#
# GRADWIRE_FULL_SWEEPS=1: runs every sweep at full length, and under the sanitizers all tests that support
# them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0

folder_of() { [ "$1" = release ] && echo build || echo "build-$1"; }

# build_tests PRESET [TARGET...]: builds the targets; without targets, builds all targets.
build_tests() {
  local build=(cmake --build --preset "$1")
  [ $# -gt 1 ] && build+=(--target "${@:2}")
  scripts/configure.sh "$1" && "${build[@]}"
}

# Builds like build_tests while tests run, on the cores that the tests leave idle. run_tests later builds the
# targets that are missing or have failed.
ahead=  # process group of the build
build_ahead() {
  local log
  log=$(folder_of "$1")/build_ahead.log
  mkdir -p "${log%/*}"
  set -m
  { renice -n 19 "$BASHPID" && build_tests "$@"; } < /dev/null > "$log" 2>&1 &
  ahead=$!
  set +m
}
stop_ahead() {
  [ -n "$ahead" ] || return 0
  kill -INT -- -"$ahead" 2> /dev/null
  wait "$ahead" 2> /dev/null
  for _ in {1..100}; do  # until ninja, which outlives cmake, has deleted unfinished outputs
    kill -0 -- -"$ahead" 2> /dev/null || break
    sleep 0.1
  done
  ahead=
}
trap stop_ahead EXIT

only=() release=1 sanitizers=
for part; do
  case $part in
    system) only=(-LE "^code$"); [ "$(id -u)" -eq 0 ] || only=(-LE "^(code|root)$") ;;
    root) only=(-L "^root$") ;;
    code) only=(-L "^(code|cuda)$") ;;
    sanitizers) sanitizers=1; [ $# -gt 1 ] || release= ;;
    *) echo "test: '$part' is not a part: system, root, code, sanitizers" >&2; exit 2 ;;
  esac
done
time_since() { printf '%d:%02d min' $(((SECONDS - $1) / 60)) $(((SECONDS - $1) % 60)); }

# run_tests PRESET [TARGET...] -- [ARGUMENT...]: builds the targets and runs ctest with the arguments.
run_tests() {
  local preset=$1 targets=() folder log begin=$SECONDS
  shift
  while [ "$1" != -- ]; do
    targets+=("$1")
    shift
  done
  shift
  folder=$(folder_of "$preset")
  log=$folder/test.log
  stop_ahead
  echo "== $preset: build"
  if ! build_tests "$preset" "${targets[@]}"; then
    echo "== $preset: THE BUILD FAILED"
    failed=$((failed + 1))
    return
  fi
  # Without a disassembler the machine-code test is skipped.
  [ "$preset" = release ] && scripts/cuda_pip.sh disassembler
  [ ${#next[@]} -gt 0 ] && build_ahead "${next[@]}"
  echo "== $preset: test (the build took $(time_since "$begin"))"
  begin=$SECONDS
  # ctest has four slots per core. A busy test takes three slots (tests/CMakeLists.txt).
  (cd "$folder" && ctest -j $((4 * $(nproc))) --output-on-failure "$@") 2>&1 | tee "$log" |
    grep --line-buffered -vE "^ *[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed |^ +Start +[0-9]+:"
  local counts
  counts=$(sed -nE 's/^[0-9]+% tests passed, ([0-9]+) tests failed out of ([0-9]+)$/\1 \2/p' "$log" | tail -1)
  echo "== $preset: the tests took $(time_since "$begin")"
  if [ -z "$counts" ]; then
    echo "== $preset: no tests ran"
    failed=$((failed + 1))
    return
  fi
  local bad=${counts% *} all=${counts#* } skips
  skips=$(grep -cE "\*\*\*Skipped" "$log")
  # Counts test cases. A test that is a piece of an executable (gradwire_gtest_pieces in tests/CMakeLists.txt)
  # reports its number of cases, and the skipped cases with their reasons.
  local more more_skips ran=$folder/Testing/Temporary/LastTest.log
  read -r more more_skips < <(awk '/^\[  PASSED  \]/ { cases = $4; if (cases > 1) more += cases - 1 }
    /^\[  SKIPPED \] [0-9]+ test/ && cases > 0 { skips += $4 } END { print more + 0, skips + 0 }' "$ran")
  [ "$more_skips" -gt 0 ] && awk '/: Skipped$/ { why = "skipped"; next } why == "skipped" { why = $0 }
    /^\[  SKIPPED \] .* \([0-9]+ ms\)$/ { print "skipped: " $4 ": " why }' "$ran" | sort -u
  all=$((all + more + more_skips)) skips=$((skips + more_skips))
  failed=$((failed + bad))
  skipped=$((skipped + skips))
  passed=$((passed + all - bad - skips))
}

# The labels of the tests that a sanitizer build omits (tests/CMakeLists.txt).
asan_not="^not_sanitized$" tsan_not="^not_(sanitized|tsan)$"
if [ -z "${GRADWIRE_FULL_SWEEPS:-}" ]; then
  asan_not+="|^long$" tsan_not+="|^long(_tsan)?$"
fi

layers=(runtime_tests kernels_tests collectives_tests trainer_tests)
asan=(asan "${layers[@]}" processes_tests capi_tests capi_inside_tests fuzz_tests gradwire)
tsan=(tsan "${layers[@]}" processes_tests capi_tests tsan_overlapped_step tsan_planted_race)
next=()  # targets to build while tests run
[ -z "$sanitizers" ] || next=("${asan[@]}")
[ -z "$release" ] || run_tests release -- "${only[@]}"
if [ -n "$sanitizers" ]; then
  next=("${tsan[@]}")
  run_tests "${asan[@]}" -- -LE "$asan_not"
  # By default TSan waits a second for races at the end of each process. Half of these processes take less
  # time.
  export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1 second_deadlock_stack=1 atexit_sleep_ms=50}"
  next=()
  run_tests "${tsan[@]}" -- -LE "$tsan_not"
fi

[ -e build/frameworks/python ] || echo "PyTorch 2.15, FSDP2 and JAX: NOT TESTED, because they are not installed: make test-frameworks does that (docs/testing.md)"
[ $skipped -gt 0 ] && echo "$skipped skipped (reasons are above)"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
