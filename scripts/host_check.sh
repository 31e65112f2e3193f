#!/usr/bin/env bash
# Measures Gradwire's speed on a machine without a GPU, in five to ten minutes; results go to docs/results/.
#
#   make host-check                          builds, then runs this
#   scripts/host_check.sh [OUTPUT FOLDER]    runs an existing build
#   scripts/host_check.sh --smoke            the same with tiny sizes, in build/smoke; speeds are not compared
#
# Compares kernels with copy bandwidth, compression with PyTorch's hooks, and collectives with gloo, also over
# 1 Gb/s links (bench/harness/shaped_link.sh; needs root). The table at the end compares the measurements with
# the published numbers and the goals; a missed goal is a failure (bench/harness/check.py, which `make
# bench-check` runs on fewer measurements). Run nothing else meanwhile: ratios are taken within a step, but a
# busy machine changes them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/smoke.sh
bench=build/bin/gradwire-bench
[ -x $bench ] || { echo "host-check: no $bench; run make build" >&2; exit 1; }
python=/usr/bin/python3
[ -x $python ] || python=python3
out=${1:-${smoke:+$place/host}}
out=${out:-docs/results/$(date +%F)-host}
small=()
[ -z "$smoke" ] || small=($python bench/harness/smoke.py)
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.log

{
  commit=$(git rev-parse --short=12 HEAD 2> /dev/null || echo unknown)
  echo "commit: $commit$(git diff --quiet HEAD 2> /dev/null || echo ', with changes')"
  lscpu | sed -nE 's/^Model name: +/cpu: /p; s/^L3 cache: +/L3 cache: /p'
  echo "cores: $(nproc)"
  echo "memory: $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
  echo "system: $(uname -sr), $(. /etc/os-release && echo "$PRETTY_NAME")"
  echo "compiler: $(c++ --version | head -1)"
  $python -c 'import torch; print("baseline: torch", torch.__version__)' 2> /dev/null ||
    echo "baseline: no torch"
  echo "load at start: $(cut -d' ' -f1 /proc/loadavg)"
} > "$out/machine.txt"
cat "$out/machine.txt"

failed=0
# step NAME COMMAND...: writes the command and its output to NAME.log, its results to NAME.json.
step() {
  local name=$1
  shift
  echo "== $*"
  echo "\$ $*" > "$out/$name.log"
  if ! timeout --kill-after=5 400 "${small[@]}" "$@" --json "$out/$name.json" >> "$out/$name.log" 2>&1; then
    failed=$((failed + 1))
    echo "FAILED: $(tail -1 "$out/$name.log")"
  fi
}

step kernels $bench kernels --device host --min-size 64K --max-size 256M --factor 16 --stop 30ms
step hook $bench hook --model vit_b_32 --device host --baseline --stop 15 \
  --compression bf16 --compression fp8 --compression powersgd:rank=1 --compression powersgd:rank=4
step hook_resnet18 $bench hook --model resnet18 --device host --baseline --stop 30 \
  --compression powersgd:rank=1 --compression powersgd:rank=4
step orthonormalize $bench orthonormalize --model vit_l_32 --device host --rank 4 --rank 32 --stop 10 --baseline
step collectives $bench collectives -b 256K -e 16M -f 8 -n 10 -w 2
step shaped bench/harness/shaped_link.sh --hosts 4 --rate 1gbit -- $bench collectives -b 25M -e 25M -n 10 -w 2

{
  echo "# Speed on the host"
  echo
  echo "Written by \`scripts/host_check.sh\`. The \`.log\` files have the commands and their output,"
  echo "the \`.json\` files all numbers ([docs/results.md](../../results.md) explains them)."
  echo
  sed 's/^/    /' "$out/machine.txt"
  echo
  $python bench/harness/check.py compare "$out" --markdown ${smoke:+--smoke} || failed=$((failed + 1))
} > "$out/README.md"
echo
cat "$out/README.md"
[ $failed -eq 0 ]
