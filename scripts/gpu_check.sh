#!/usr/bin/env bash
# Runs all checks that need a GPU, in parts of at most 8 minutes each, the most informative part first. Part
# `first` has the first checks for a GPU that has never run Gradwire, and takes at most 4 minutes. Parts
# `next` and `unseen`, together about 8 minutes, answer what the last GPU left open: `next` times what has
# changed, and `unseen` runs side by side, without timing, what no GPU has run.
#
#   make gpu-check                                  builds, then runs every part
#   scripts/gpu_check.sh [FOLDER [PART...]]         runs parts, on a build or a bundle (scripts/bundle.sh)
#   scripts/gpu_check.sh --list                     lists parts, steps and their deadlines in seconds
#   scripts/gpu_check.sh --smoke                    every step without a GPU, in build/smoke: benches and
#                                                   training with tiny sizes, and the names of the GPU's tests
#   GPU_CHECK_ONLY=REGEX scripts/gpu_check.sh       only steps whose name matches, e.g. 'bench-training'
#   PYTHON=PATH scripts/gpu_check.sh                a Python with torch; default: the first python3 with it
#
# Writes each result at once to FOLDER, by default a folder of docs/results named after the date and the GPU:
# README.md (rewritten after each step), steps.tsv, log.txt, the benches' JSON, and NAME.log of each step that
# runs side by side with others. At the end, even if interrupted, packs all files into gpu-check.tar.gz.
# README.md and steps.tsv also stay in FOLDER.
#
# Each step has a deadline. A step that fails, lacks a tool or would begin too late appears in the table and
# in the exit status. No step is skipped silently.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

. scripts/smoke.sh
parts=(first next unseen kernels peers training memcheck racecheck initcheck)
list=
case ${1:-} in
  --list) list=1 ;;
  -*)
    echo "usage: gpu_check.sh [FOLDER [PART...]] | --list; the parts are ${parts[*]}" >&2
    exit 2
    ;;
esac
folder=${1:-${smoke:+$place/gpu}}
wanted=("${@:2}")
[ ${#wanted[@]} -gt 0 ] || wanted=("${parts[@]}")
for part in "${wanted[@]}"; do
  [[ " ${parts[*]} " == *" $part "* ]] && continue
  echo "gpu-check: no part '$part'; the parts are ${parts[*]}" >&2
  exit 2
done

if [ ! -x build/bin/gradwire ] && [ -f build/gradwire-bundle.tar.xz ] && [ ! -d build/bundle ]; then
  tar -C build -xJf build/gradwire-bundle.tar.xz || {
    echo "gpu-check: cannot unpack build/gradwire-bundle.tar.xz; install xz, or unpack it in build/ elsewhere" >&2
    exit 1
  }
fi
root=$PWD/build
[ -x build/bin/gradwire ] || root=$PWD/build/bundle
bin=$root/bin
python='' torch=''
for candidate in "${PYTHON:-}" "$(command -v python3)" /usr/bin/python3; do
  [ -n "$candidate" ] && [ -z "$list" ] || continue
  [ -n "$python" ] || python=$candidate
  torch=$("$candidate" -c 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda)' \
    2> /dev/null) || continue
  python=$candidate
  break
done

# Links a library from Python's nvidia packages into the programs' library folder, unless the system provides
# the library. Handles one library, because a machine may have only some of the libraries.
provide() {
  local name=$1 found
  { [ -e "$root/lib/$name" ] || ldconfig -p 2> /dev/null | grep -q "$name "; } && return
  [ -n "$python" ] || return
  mkdir -p "$root/lib"
  found=$("$python" -c '
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("nvidia")
places = spec.submodule_search_locations if spec else []
print(next((str(path) for place in places for path in sorted(pathlib.Path(place).rglob(sys.argv[1]))), ""))
' "$name")
  [ -z "$found" ] || ln -sf "$found" "$root/lib/$name"
}

check_machine() {
  if [ ! -x "$bin/gradwire" ]; then
    echo "gpu-check: found neither build/bin/gradwire nor build/gradwire-bundle.tar.xz;" \
      "run make build-tests, or copy a bundle made by make bundle" >&2
    exit 1
  fi
  if [ -n "$smoke" ]; then  # standin_tests has the names of the GPU's tests
    [ -x "$bin/standin_tests" ] || not_checked "this build has no standin_tests"
    return
  fi
  if ! command -v nvidia-smi > /dev/null || ! nvidia-smi -L > /dev/null 2>&1; then
    echo "gpu-check: no GPU (nvidia-smi lists none);" \
      "without a GPU, make test runs every CUDA kernel under the shim" >&2
    exit 1
  fi
  local driver library missing
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0)
  if [[ ${driver%%.*} =~ ^[0-9]+$ ]] && [ "${driver%%.*}" -lt 580 ]; then
    echo "gpu-check: driver $driver is too old for CUDA 13, which needs R580 or later; update the driver" >&2
    exit 1
  fi
  for library in libcublas.so.13 libcublasLt.so.13 libnccl.so.2 libcupti.so.13; do provide $library; done
  export LD_LIBRARY_PATH=$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  if missing=$(ldd "$bin/gradwire" 2> /dev/null | grep 'not found'); then
    echo "gpu-check: libraries are missing; install CUDA 13's cuBLAS, or Python's nvidia-cublas package:" >&2
    echo "$missing" >&2
    exit 1
  fi
}

describe_machine() {
  echo "commit: $commit"
  [ -f "$root/commit" ] && echo "bundle: $(tr '\n' ' ' < "$root/commit")"
  echo "date: $(date -u +%FT%TZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv
  nvcc --version 2> /dev/null | tail -2
  echo "${torch:-torch: none (${python:-no python3}); PYTHON names another}"
  uname -r
}

write_readme() {
  {
    echo "# GPU check of $commit"
    echo
    while IFS= read -r line; do echo "    $line"; done <<< "$machine"
    echo
    echo "| part | step | status | seconds |"
    echo "|---|---|---|---|"
    tail -n +2 "$out/steps.tsv" | sed 's/\t/ | /g; s/^/| /; s/$/ |/'
  } > "$out/README.md"
}

declare -A running=()  # process -> log, begin, deadline and name of its step
pack() {
  trap - EXIT
  trap '' TERM INT  # a second signal would lose the results
  [ ${#running[@]} -eq 0 ] || { kill "${!running[@]}"; wait "${!running[@]}"; } 2> /dev/null
  write_readme
  (
    cd "$out" || exit
    shopt -s nullglob
    files=(log.txt *.json *.jsonl *.log graph_*.tsv)
    tar -czf gpu-check.tar.gz.new README.md steps.tsv "${files[@]}" && mv gpu-check.tar.gz.new gpu-check.tar.gz &&
      rm -f "${files[@]}"
  )
  echo
  cat "$out/README.md"
  echo
  echo "gpu-check: $((SECONDS - started)) s, $failed steps failed; results in $out/gpu-check.tar.gz"
}

report() { # STATUS SECONDS NAME: of a step of part $part
  [ "$1" = ok ] || failed=$((failed + 1))
  printf '%s\t%s\t%s\t%d\n' "$part" "$3" "$1" "$2" | tee -a "$out/steps.tsv"
  write_readme
}

# begin_step LOG NAME DEADLINE COMMAND...: starts COMMAND in the background, so that the script handles
# signals at once. Returns 1 if this run omits the step.
begin_step() {
  local log=$1 name=$2 deadline=$3
  shift 3
  if [ -n "$list" ]; then
    printf '%s\t%s\t%d%s\n' "$part" "$name" "$deadline" "$([ "$log" = log.txt ] || printf '\tside by side')"
    return 1
  fi
  [[ $name =~ ${GPU_CHECK_ONLY:-.} ]] || return 1
  [ -z "$smoke" ] || deadline=$((deadline > 60 ? deadline : 60))  # deadlines are for a machine with a GPU
  echo "=== $part: $name: $*" >> "$out/$log"
  timeout --kill-after=5 "$deadline" "${small[@]}" "$@" >> "$out/$log" 2>&1 &
  running[$!]="$log $SECONDS $deadline $name"
}
# end_step PROCESS: waits for a step, and reports it.
end_step() {
  local log begin deadline name status=ok rc
  read -r log begin deadline name <<< "${running[$1]}"
  wait "$1"
  rc=$?
  unset "running[$1]"
  [ $rc -eq 0 ] || status="FAILED ($rc)"
  [ $rc -eq 124 ] && status="FAILED (deadline of $deadline s)"
  [ -n "$smoke" ] && [ $rc -eq 77 ] && status=ok && echo "NOT CHECKED: $name: $(tail -n 1 "$out/$log")"
  [ -z "$smoke" ] || [ "$status" = ok ] || tail -n 5 "$out/$log"
  report "$status" $((SECONDS - begin)) "$name"
}
# step NAME DEADLINE COMMAND...: runs COMMAND, with its output in log.txt.
step() {
  begin_step log.txt "$@" && end_step $!
}
# together NAME DEADLINE COMMAND...: starts COMMAND, with its output in NAME.log. end_all waits for all.
together() { begin_step "$1.log" "$@" || true; }
end_all() {
  local process
  while [ ${#running[@]} -gt 0 ]; do
    for process in "${!running[@]}"; do kill -0 "$process" 2> /dev/null || end_step "$process"; done
    sleep 0.2 &
    wait $!
  done
}
# needs NAME REASON COMMAND...: returns whether the step can run; otherwise records it as failed.
needs() {
  local name=$1 why=$2
  shift 2
  { [ -n "$list" ] || "$@" > /dev/null 2>&1; } && return 0
  [[ $name =~ ${GPU_CHECK_ONLY:-.} ]] || return 1
  [ -z "$smoke" ] || { echo "NOT CHECKED: $name: $why"; return 1; }
  report "NOT RUN: $why" 0 "$name"
  return 1
}
# early NAME SECONDS: returns whether the part began less than SECONDS ago; otherwise records that the step
# was not run.
early() {
  [ -z "$list$smoke" ] || return 0
  local late=$(($(date +%s) - part_began))
  [ $late -lt "$2" ] || needs "$1" "late, $late s after the part began" false
}

# suite PROGRAM SHARDS [FILTER]: runs the GPU tests of a program (cuda0, cuda0_... in the name; CI runs the
# others), with shards in parallel. Fails if no test runs because the program does not see the GPU.
suite() {
  local shards=$2 filter=${3:-*cuda*} logs i rc=0 pids=()
  if [ -n "$smoke" ]; then
    [ -x "$bin/$1_tests" ] || { echo "$bin/$1_tests does not exist"; return 1; }
    [ "$1" = processes ] || set -- standin
    "$python" tools/checks/check_filters.py "$bin/$1_tests" "$filter"
    return
  fi
  logs=$(mktemp -d)
  for ((i = 0; i < shards; ++i)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i ${sanitizer:-} "$bin/$1_tests" --gtest_filter="$filter" \
      > "$logs/$i" 2>&1 &
    pids+=($!)
  done
  # At the deadline, show which tests hang. Ignore the second TERM, which timeout sends to the whole group.
  trap 'trap "" TERM; tail -n +1 "$logs"/*; rm -r "$logs"; exit 1' TERM
  for i in "${pids[@]}"; do wait "$i" || rc=1; done
  # For passed tests, show only the totals.
  grep -hvE '^\[( RUN  |       OK|-----).*|^$' "$logs"/*
  grep -hE '^\[       OK' "$logs"/* | sed -nE 's/.*OK \] (.*) \(([0-9]{4,}) ms\)$/slow: \2 ms \1/p' | sort -k2nr | head -n 5
  grep -qE '^\[  PASSED  \] [1-9]' "$logs"/* || rc=1
  grep -qE '^========= (Warning|Error)' "$logs"/* && rc=1  # compute-sanitizer's status covers only errors
  rm -r "$logs"
  return $rc
}
sanitize() { # TOOL SHARDS FILTER [FILTER OF runtime_tests]
  local sanitizer="compute-sanitizer --tool $1 --report-api-errors no --error-exitcode 9"
  suite kernels "$2" "$3" && { [ -z "${4:-}" ] || suite runtime "$2" "$4"; }
}
# Installs a wheel into a folder of its own, and tests it on CUDA tensors, with the NCCL of Python's packages.
wheel() { # WHEEL cuda|cpu
  local folder rc
  folder=$(mktemp -d)
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$folder" "$1" &&
    env -u LD_LIBRARY_PATH -u GRADWIRE_LIBRARY PYTHONPATH="$folder" \
      "$python" tests/integrations/device_test.py 2 "$2"
  rc=$?
  rm -r "$folder"
  return $rc
}
export -f suite sanitize wheel
export bin smoke python
small=()
[ -z "$smoke" ] || small=("$python" bench/harness/smoke.py)

# The specs with these schedules take more than half of the collectives' time
# (docs/results/2026-11-26-gpu), so part `kernels` tests them. Part `first` tests the specs with two_shot.
schedules='*EverySpec*cuda*schedule_ring:*EverySpec*cuda*schedule_tree:*EverySpec*cuda*schedule_hierarchical*'
# The deadlines add up to at most 240 s. docs/results/2026-11-28-h100 has the seconds that an H100 needed.
part_first() {
  step doctor 10 "$bin/gradwire" doctor
  step launch 8 bash -c "suite kernels 1 '*Pack*cuda0*'"
  step tests-runtime 6 bash -c "suite runtime 2"
  step tests-kernels 75 bash -c "suite kernels 14"
  step tests-collectives 65 bash -c "suite collectives 8 '*cuda*-$schedules'"
  step tests-trainer 35 bash -c "suite trainer 6"
  step train 10 env CUBLASLT_LOG_LEVEL=5 CUBLASLT_LOG_FILE="$out/cublaslt.log" "$bin/gradwire" train \
    --model vit_s_16 --data synthetic --device cuda --steps 20 --batch-size 32 --compression powersgd:rank=4
}

vit=("$bin/gradwire" train --model vit_l_32 --data synthetic --device cuda --batch-size 32 --optimizer sgd
  --lr 0.01 --momentum 0 --eval-every 0 --precision bf16)
train_step() { # NAME FLAGS...: $with is a variable of the environment
  step "$1" 10 env ${with:+"$with"} "${vit[@]}" --log "$out/$1.jsonl" --steps 60 "${@:2}"
}
# Lists the kernels of a program's graph, in the order of time spent.
trace_step() { # NAME COMMAND...
  needs "$1" "this build has no libgraph_trace.so" has "$root/lib/libgraph_trace.so" || return 0
  step "$1" 20 env -C "$out" CUDA_INJECTION64_PATH="$root/lib/libgraph_trace.so" "${@:2}"
  [ -z "$smoke" ] || printf '0\t9\t7\t1\t1\t1,1,1\t32\t8\t0\tkernel\n' > "$out/graph_trace.tsv"
  [ ! -e "$out/graph_trace.tsv" ] || mv "$out/graph_trace.tsv" "$out/$1.tsv"
  step "$1-table" 5 "$python" bench/harness/graph_table.py "$out/$1.tsv"
}
# Whether a file exists. In a smoke run the step's command runs without it.
has() { [ -n "$smoke" ] || [ -e "$1" ]; }

# Timings, alone; the least important steps, which come last, only while the part is not late.
part_next() {
  local with='' filters kernel i
  step doctor 10 "$bin/gradwire" doctor
  step tests-kernels-changed 75 bash -c "suite kernels 14"
  trace_step trace "${vit[@]}" --steps 25 --graph
  needs bench-captured "no PyTorch for ${python:-python3}" has_torch &&
    step bench-captured 180 "$python" bench/experiments/run.py gpu_training --captured --precision bf16 \
      --steps 50 --deadline-s 30 --gradwire "$bin/gradwire" --json "$out/captured.json"
  with=GRADWIRE_TUNING=$out/tuning.log
  train_step tune  # outside graphs, where products are timed
  train_step tuned --graph
  for i in 1 2; do
    with='' train_step "ordered-$i" --graph
    with=GRADWIRE_EARLY_LAUNCH=1 train_step "early-$i" --graph
  done
  with=
  train_step gelu-tanh --graph --gelu tanh
  train_step gradient-group-1 --graph --gradient-group 1
  needs overlap "this build has no bin/overlap" has "$bin/overlap" && step overlap 20 "$bin/overlap"
  filters=(fp8 int8 int4 eden topk attention layer_norm tokens patchify cross_entropy powersgd)
  early bench-kernels-changed 330 &&
    step bench-kernels-changed 40 "$bin/gradwire-bench" kernels --device cuda --cache cold --min-size 1G \
      --max-size 1G --stop 20ms --json "$out/kernels-changed.json" "${filters[@]/#/--filter=}"
  early bench-hook-changed 370 &&
    step bench-hook-changed 20 "$bin/gradwire-bench" hook --model vit_l_32 --device cuda \
      --compression powersgd:rank=32 --compression fp8 --stop 6 --json "$out/hook-changed.json"
  for kernel in attention_backward_kernel layer_norm_backward_slice_kernel; do
    if [ -n "$smoke" ]; then
      step "ncu-$kernel" 15 grep -m 1 "$kernel" docs/gpu.md
    else
      early "ncu-$kernel" 390 && needs "ncu-$kernel" "ncu is not on PATH" command -v ncu &&
        step "ncu-$kernel" 15 ncu --csv --clock-control none --set full -k "regex:^$kernel" --launch-skip 30 \
          --launch-count 1 "${vit[@]}" --steps 2
    fi
  done
}

# What has not run on a GPU or under compute-sanitizer, side by side; nothing is timed. The nine sanitizer
# runs are of the kernels that docs/gpu.md says await a GPU or were checked in part.
part_unseen() {
  local archive tool
  needs interposer "no PyTorch for ${python:-python3}" has_torch &&
    needs interposer "this build has no libgradwire_nccl.so" test -e "$root/lib/libgradwire_nccl.so" &&
    together interposer 110 "$python" tests/nccl/interposed.py cuda "$root/lib/libgradwire_nccl.so"
  archive=$(compgen -G "$root/gradwire-*.whl" || compgen -G "dist/gradwire-*.whl")
  needs wheel "no PyTorch for ${python:-python3}" has_torch &&
    needs wheel "neither the bundle nor dist has a wheel (make wheel)" test -n "$archive" &&
    together wheel 110 bash -c "wheel '$archive' $([ -n "$smoke" ] && echo cpu || echo cuda)"
  together tests-early 110 env GRADWIRE_EARLY_LAUNCH=1 bash -c "suite trainer 4"
  needs nccl-newer "no lib/newer/libnccl.so.2 in $root" has "$root/lib/newer/libnccl.so.2" &&
    together nccl-newer 110 env GRADWIRE_NCCL_LIBRARY="$root/lib/newer/libnccl.so.2" \
      bash -c "suite processes 4 'NcclGpu*'"
  for tool in memcheck racecheck initcheck; do
    sanitizer_step $tool clip-store "1 '*Clip*cuda*' '*StoreAndIncrement*cuda*'" together 115
  done
  for tool in memcheck racecheck; do
    sanitizer_step $tool attention "1 '*VitAttention*cuda*-*Large*'" together 115
    sanitizer_step $tool model "1 '*VitLayerNorm*cuda*:*VitTokens*cuda*:*VitCrossEntropy*cuda*'" together 115
    sanitizer_step $tool int8 "1 '*WireFormat*cuda*int8*:*Int8Wire*cuda*-$few'" together 115
  done
  end_all
}

part_kernels() {
  step bench-kernels 150 "$bin/gradwire-bench" kernels --device cuda --cache cold --factor 16 --min-size 256K \
    --stop 20ms --json "$out/kernels.json"
  PATH=$PATH:$PWD/build/disassembler/bin
  needs resources "cuobjdump is not on PATH" command -v cuobjdump &&
    step resources 60 bash -c "cuobjdump --dump-resource-usage '$bin/gradwire-bench' 2> /dev/null | c++filt |
      grep -E 'Function|REG' | paste - - | sed -E 's/ +/ /g' | sort -u"
  needs trace-pytorch "no PyTorch for ${python:-python3}" has_torch &&
    trace_step trace-pytorch "$python" "$PWD/bench/baselines/pytorch_vit.py" \
      $([ -n "$smoke" ] && echo tiny cpu || echo vit_l_32 cuda)
  step tests-schedules 120 bash -c "suite collectives 8 '$schedules'"
}

has_torch() { [ -n "$torch" ]; }

# Compares PyTorch's hook and torch.linalg.qr with Gradwire's, alternating. Runs several ranks on one GPU, as
# threads and as processes. With threads, checks the sums of every schedule and wire format; the times are not
# representative.
part_peers() {
  # The tests have their own time limits. Skipped tests do not count as passed.
  step tests-nccl 100 env NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$out/nccl-%p.log" bash -c "suite processes 4 'NcclGpu*'"
  # Smoke runs omit these steps, because ctest's `device` and `jax` test the same without a GPU.
  [ -z "$smoke" ] && needs tests-pytorch "no PyTorch for ${python:-python3}" has_torch &&
    step tests-pytorch 100 env PYTHONPATH="$PWD/integrations/python" GRADWIRE_LIBRARY="$root/lib/libgradwire.so" \
      "$python" tests/integrations/device_test.py 2 cuda
  [ -z "$smoke" ] && needs tests-jax "no JAX for ${python:-python3}" "${python:-false}" -c 'import jax, optax' &&
    step tests-jax 40 env PYTHONPATH="$PWD/integrations/python" GRADWIRE_LIBRARY="$root/lib/libgradwire.so" \
      "$python" tests/integrations/jax_device_test.py 2 cuda
  needs bench-hook "no PyTorch for ${python:-python3}" has_torch &&
    step bench-hook 90 "$bin/gradwire-bench" hook --model vit_l_32 --device cuda --compression bf16 \
      --compression fp8 --compression powersgd:rank=1 --compression powersgd:rank=4 --compression powersgd:rank=32 \
      --stop 10 --baseline --python "$python" --json "$out/hook.json"
  needs bench-orthonormalize "no PyTorch for ${python:-python3}" has_torch &&
    step bench-orthonormalize 50 "$bin/gradwire-bench" orthonormalize --model vit_l_32 --device cuda \
      --rank 4 --rank 32 --rank 128 --stop 10 --baseline --python "$python" \
      --json "$out/orthonormalize.json"
  step bench-collectives 50 "$bin/gradwire-bench" collectives --transport local --device cuda --ranks 8 \
    -b 1M -e 16M -f 16 -n 5 --json "$out/collectives.json"
}

# Compares ViT-L/32 with PyTorch's, eager and compiled. Compiling takes most of the time.
part_training() {
  step train 50 "$bin/gradwire" train --model vit_b_32 --data synthetic --device cuda --steps 20 \
    --batch-size 32 --compression powersgd:rank=4
  needs bench-training "no PyTorch for ${python:-python3}" has_torch &&
    step bench-training 420 "$python" bench/experiments/run.py gpu_training --gradwire "$bin/gradwire" \
      --json "$out/training.json"
}

# A kernel takes seconds under these tools, so the many tests of the wire formats run separately, without the
# longest tests. Each step ends at its deadline at the latest. Tests that have not run by the deadline count
# as failed.
few='*HasTheReferencesBits*:*Large*'
sanitizer_step() { # TOOL NAME ARGUMENTS [step|together DEADLINE]: the arguments of sanitize, as text
  { [ -n "$smoke" ] ||
    needs "sanitizer-$1-$2" "compute-sanitizer is not on PATH" command -v compute-sanitizer; } &&
    "${4:-step}" "sanitizer-$1-$2" "${5:-230}" bash -c "sanitize $1 $3"
}
sanitize_kernels() { # TOOL
  sanitizer_step "$1" kernels "14 '*cuda*-*WireFormat*:$few'"
  sanitizer_step "$1" formats "14 '*WireFormat*cuda*-$few'"
}
part_memcheck() { sanitize_kernels memcheck; }
part_racecheck() { sanitize_kernels racecheck; }
part_initcheck() { sanitize_kernels initcheck; }

out=
if [ -n "$list" ]; then
  for part in "${parts[@]}"; do "part_$part"; done
  exit 0
fi
check_machine
commit=$(git rev-parse --short=12 HEAD 2> /dev/null || head -c 12 "$root/commit" 2> /dev/null || echo unknown)
gpu=$([ -n "$smoke" ] || nvidia-smi --query-gpu=name --format=csv,noheader -i 0 | tr ' /' '--')
out=${folder:-docs/results/$(date +%F)-$gpu}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
rm -f "$out"/graph_*.tsv "$out"/*.{json,jsonl,log}
: > "$out/log.txt"
started=$SECONDS
failed=0
printf 'part\tstep\tstatus\tseconds\n' > "$out/steps.tsv"
machine=$(describe_machine 2>&1)
echo "$machine"
trap pack EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
for part in "${wanted[@]}"; do
  part_began=$(date +%s)
  "part_$part"
done
[ $failed -eq 0 ]
