#!/usr/bin/env bash
# All checks that need a GPU, in 10 to 15 minutes; results go to docs/results/.
#
#   make gpu-check                          builds, then runs this
#   scripts/gpu_check.sh [OUTPUT FOLDER]    runs an existing build or a bundle (scripts/bundle.sh)
#   GPU_CHECK_ONLY=REGEX scripts/gpu_check.sh    only the steps whose name matches, such as 'bench-training'
#
# Runs every GPU test; compute-sanitizer's memcheck, racecheck and initcheck on the kernels' tests; the
# benches, with PyTorch as the baseline; and lists registers and shared memory per kernel. Each step has a
# deadline. A step that fails or lacks a tool appears in the table at the end and in the exit status: nothing
# is skipped silently.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ ! -x build/bin/gradwire ] && [ -f build/gradwire-bundle.tar.gz ] && [ ! -d build/bundle ]; then
  tar -C build -xzf build/gradwire-bundle.tar.gz
fi
root=build
[ -x build/bin/gradwire ] || root=build/bundle
bin=$root/bin
if [ ! -x "$bin/gradwire" ]; then
  echo "gpu-check: found neither build/bin/gradwire nor build/gradwire-bundle.tar.gz;" \
    "run make build-tests, or copy a bundle made by make bundle" >&2
  exit 1
fi
python=$(command -v python3 || true)

# A bundle uses the NVIDIA libraries of Python's packages; programs look in ../lib.
if ldd "$bin/gradwire" | grep -q 'libcublas.*not found'; then
  mkdir -p "$root/lib"
  for folder in $("$python" - << 'END'
import importlib.util
import pathlib
spec = importlib.util.find_spec("nvidia")
for place in spec.submodule_search_locations if spec else []:
    for library in pathlib.Path(place).rglob("lib*.so*"):
        if library.name.startswith(("libcublas", "libnccl")):
            print(library.parent)
END
  ); do
    ln -sf "$folder"/libcublas*.so* "$folder"/libnccl*.so* "$root/lib/" 2> /dev/null
  done
fi
if missing=$(ldd "$bin/gradwire" | grep 'not found'); then
  echo "gpu-check: libraries are missing; install CUDA 13's cuBLAS, or Python's nvidia-cublas package:" >&2
  echo "$missing" >&2
  exit 1
fi
if ! command -v nvidia-smi > /dev/null || ! nvidia-smi -L > /dev/null 2>&1; then
  echo "gpu-check: no GPU (nvidia-smi lists none);" \
    "without a GPU, make test runs every CUDA kernel under the shim" >&2
  exit 1
fi

commit=$(git rev-parse --short=12 HEAD 2> /dev/null || head -c 12 "$root/commit" 2> /dev/null || echo unknown)
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 | tr ' /' '--')
out=${1:-docs/results/$(date +%F)-$gpu}
mkdir -p "$out"
started=$SECONDS
printf 'step\tstatus\tseconds\n' > "$out/steps.tsv"
failed=0

# step NAME DEADLINE COMMAND...: its output goes to NAME.log.
step() {
  local name=$1 deadline=$2 begin=$SECONDS status=ok rc
  shift 2
  [[ $name =~ ${GPU_CHECK_ONLY:-.} ]] || return 0
  timeout --kill-after=5 "$deadline" "$@" > "$out/$name.log" 2>&1
  rc=$?
  [ $rc -eq 0 ] || { status="FAILED ($rc)"; failed=$((failed + 1)); }
  [ $rc -eq 124 ] && status="FAILED (deadline of $deadline s)"
  printf '%s\t%s\t%d\n' "$name" "$status" $((SECONDS - begin)) | tee -a "$out/steps.tsv"
}
absent() {
  [[ $1 =~ ${GPU_CHECK_ONLY:-.} ]] || return 0
  failed=$((failed + 1))
  printf '%s\t%s\t0\n' "$1" "NOT RUN: $2" | tee -a "$out/steps.tsv"
}

{
  echo "commit: $commit"
  [ -f "$root/commit" ] && echo "bundle: $(tr '\n' ' ' < "$root/commit")"
  echo "date: $(date -u +%FT%TZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv
  nvcc --version 2> /dev/null | tail -2
  "$python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda)' 2> /dev/null ||
    echo "torch: none"
  uname -r
} > "$out/machine.txt" 2>&1
cat "$out/machine.txt"

# Tests on a GPU have names with cuda0, cuda0_...; CI runs the others. Running no test, because the program
# does not see the GPU, is a failure.
run_suite() {
  ${sanitizer:-} "$bin/$1_tests" --gtest_filter='*cuda*' --gtest_brief=1 | tee /dev/stderr |
    grep -qE '^\[  PASSED  \] [1-9]' && [ "${PIPESTATUS[0]}" -eq 0 ]
}
export -f run_suite
export bin
step doctor 30 "$bin/gradwire" doctor
for suite in runtime kernels collectives trainer; do
  step "tests-$suite" 90 bash -c "run_suite $suite"
done
# Several ranks on one GPU; the tests have their own time limits. Skipped tests do not count as passed.
run_nccl() {
  "$bin/processes_tests" --gtest_filter='NcclGpu*' --gtest_brief=1 | tee /dev/stderr |
    grep -qE '^\[  PASSED  \] [1-9]' && [ "${PIPESTATUS[0]}" -eq 0 ]
}
export -f run_nccl
step tests-nccl 240 bash -c run_nccl
step train 60 "$bin/gradwire" train --model vit_b_32 --data synthetic --device cuda --steps 20 \
  --batch-size 32 --compression powersgd:rank=4

# Shards run in parallel, because the sanitizers are limited by the host.
sanitize() {
  local tool=$1 shards=4 i rc=0 pids=()
  for ((i = 0; i < shards; ++i)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i \
      sanitizer="compute-sanitizer --tool $tool --error-exitcode 9" bash -c "run_suite kernels" &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || rc=1; done
  return $rc
}
export -f sanitize
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck initcheck; do
    step "sanitizer-$tool" 100 bash -c "sanitize $tool"
  done
else
  absent sanitizer "compute-sanitizer is not on PATH"
fi

step bench-kernels 120 "$bin/gradwire-bench" kernels --device cuda --cache cold --factor 16 --min-size 256K \
  --budget-ms 20 --json "$out/kernels.json"
specs=(--compression bf16 --compression fp8 --compression powersgd:rank=1 --compression powersgd:rank=4
  --compression powersgd:rank=32)
step bench-hook 100 "$bin/gradwire-bench" hook --model vit_l_32 --device cuda "${specs[@]}" --baseline \
  --json "$out/hook.json"
step bench-orthonormalize 60 "$bin/gradwire-bench" orthonormalize --model vit_l_32 --device cuda \
  --rank 4 --rank 32 --baseline --json "$out/orthonormalize.json"

# Training steps of ViT-L/32 compared with PyTorch's, eager and compiled; compiling takes most of the time.
if "$python" -c 'import torch' 2> /dev/null; then
  step bench-training 400 "$python" bench/experiments/gpu_training.py --gradwire "$bin/gradwire" \
    --json "$out/training.json"
else
  absent bench-training "no PyTorch for $python"
fi

# Eight ranks on one GPU: checks the sums of every schedule and wire format; the times are not representative.
step bench-collectives 60 "$bin/gradwire-bench" collectives --transport local --device cuda --ranks 8 \
  -b 1M -e 16M -f 16 -n 5 --json "$out/collectives.json"

if command -v cuobjdump > /dev/null; then
  step resources 60 bash -c "cuobjdump --dump-resource-usage '$bin/gradwire-bench' 2> /dev/null | c++filt |
    grep -E 'Function|REG' | paste - - | sed -E 's/ +/ /g' | sort -u"
else
  absent resources "cuobjdump is not on PATH"
fi

{
  echo "# GPU check of $commit"
  echo
  sed 's/^/    /' "$out/machine.txt"
  echo
  echo "| step | status | seconds |"
  echo "|---|---|---|"
  tail -n +2 "$out/steps.tsv" | sed 's/\t/ | /g; s/^/| /; s/$/ |/'
} > "$out/README.md"
echo
cat "$out/README.md"
for log in "$out"/*.log; do [ -s "$log" ] || rm -f "$log"; done
echo
echo "gpu-check: $((SECONDS - started)) s, $failed steps failed; results in $out"
[ $failed -eq 0 ]
