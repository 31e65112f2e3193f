#!/usr/bin/env bash
# Builds and runs every test: the release build's, then a selection under AddressSanitizer + UBSan and under
# ThreadSanitizer. Continues after failures; the last line has the totals.
#
#   scripts/test.sh [quick]      quick: only the release build's
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0

# run_tests PRESET [BUILD TARGETS] -- [ctest arguments]: without targets, builds everything.
run_tests() {
  local preset=$1 targets=()
  shift
  while [ "$1" != -- ]; do
    targets+=("$1")
    shift
  done
  shift
  echo "== $preset: build"
  local build=(cmake --build --preset "$preset")
  [ ${#targets[@]} -gt 0 ] && build+=(--target "${targets[@]}")
  if ! scripts/configure.sh "$preset" || ! "${build[@]}"; then
    echo "== $preset: THE BUILD FAILED"
    failed=$((failed + 1))
    return
  fi
  echo "== $preset: test"
  local folder=build log
  [ "$preset" != release ] && folder=build-$preset
  log=$folder/test.log
  # One more than there are cores, because some tests wait.
  (cd "$folder" && ctest -j $(($(nproc) + 1)) --output-on-failure "$@") 2>&1 | tee "$log" |
    grep -vE "^ *[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed |^ +Start +[0-9]+:"
  local counts
  counts=$(sed -nE 's/^[0-9]+% tests passed, ([0-9]+) tests failed out of ([0-9]+)$/\1 \2/p' "$log" | tail -1)
  if [ -z "$counts" ]; then
    echo "== $preset: no tests ran"
    failed=$((failed + 1))
    return
  fi
  local bad=${counts% *} all=${counts#* } skips
  skips=$(grep -cE "\*\*\*Skipped" "$log")
  # A test that is a whole piece of an executable (gradwire_gtest_pieces in tests/CMakeLists.txt) counts its cases.
  local more more_skips
  read -r more more_skips < <(awk '/^\[  PASSED  \]/ { cases = $4; if (cases > 1) more += cases - 1 }
    /^\[  SKIPPED \] [0-9]+ test/ && cases > 0 { skips += $4 } END { print more + 0, skips + 0 }' \
    "$folder/Testing/Temporary/LastTest.log")
  all=$((all + more + more_skips)) skips=$((skips + more_skips))
  failed=$((failed + bad))
  skipped=$((skipped + skips))
  passed=$((passed + all - bad - skips))
}

# The sanitizer runs omit tests with their own sanitizers (simt), comparisons with other programs (oracles)
# and checks of source text, and of how much memory a run takes. What they run sweeps over less (tests/thinned.h). The tests of the command run under ASan only, and so do those of the C ABI but for its
# requests and its groups. Of the tests with a process per rank, ASan omits the cells of the fault matrix that wait or
# resemble others, and ThreadSanitizer, which is slower, omits all faults. It also omits what runs on one thread, and of
# the wire formats, which differ in arithmetic only, all but one of each kind.
elsewhere="simt|^kernel_table|oracle|^layers$|^environment$|^paths$|^ptx$|^machine_code|^bench|^kill$|MemoryOfItsPlan|NOT_BUILT"
layers=(runtime_tests kernels_tests collectives_tests trainer_tests)
run_tests release --
if [ "${1:-}" != quick ]; then
  like_others="TcpFault\.|Tcp\.(AllToAll|ARankThat|ABusyPort)"
  like_others+="|FaultMatrix.*/(stopped|exits|returns|.*delay|corrupted_frame|wrong_[cs].*)_"
  run_tests asan "${layers[@]}" processes_tests capi_tests capi_inside_tests fuzz_tests gradwire -- \
    -E "$elsewhere|^capi_|$like_others"
  one_thread="SafetensorsTest|Synthetic|MutatedSchedules|ExtraMemory|^(Schedule|Checker)\."
  # The kernels' tests share processes (gradwire_gtest_pieces), so GoogleTest leaves these out.
  one_thread_kernels="*Bf16Gemm.IsTheProduct*:*LargeHostArray*"
  for name in CuttingACall Decode ErrorOnNormal HasTheReferences NonFinite Stochastic TakesAsMany WirePlus WithoutAWire Zeros; do
    one_thread_kernels+=":*WireFormatTest.$name*"
  done
  other_formats="EverySpec.*/host_(powersgd_rank_4_wire_)?(fp8|mxfp|nvfp4|natural|qsgd|terngrad|sign|eden|int4|int2)"
  export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1 second_deadlock_stack=1}"
  GTEST_FILTER="-$one_thread_kernels" run_tests tsan "${layers[@]}" processes_tests capi_tests tsan_overlapped_step tsan_planted_race -- \
    -E "$elsewhere|^capi_|^cli_|^fuzz_|$like_others|$one_thread|$other_formats|TcpFaults|FaultMatrix|Shrink\.|Elastic\.(AStopped|AnotherRank|FewerThan|KeepLocal|RanksKilled|WithoutCompression)|Tcp\.RanksMeet"
fi

[ -e build/frameworks/python ] || echo "PyTorch 2.15, FSDP2 and JAX: NOT TESTED, because they are not installed: make test-frameworks does that (docs/testing.md)"
[ $skipped -gt 0 ] && echo "$skipped skipped (reasons are above)"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
