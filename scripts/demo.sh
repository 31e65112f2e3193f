#!/usr/bin/env bash
# make demo: builds only the gradwire command, trains a ViT three times and plots the results.
#
# In a fresh checkout on a machine without a GPU, the build omits the CUDA side; make build adds it later.
# Arguments are additional flags for `gradwire compare`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

# Builds a target. Shows the share of finished build steps and an estimate of the remaining time: one line
# that changes on a terminal, otherwise a line per 10 %. Other output, such as errors, passes through.
build() {
  local line text begin=$SECONDS passed percent shown=0
  NINJA_STATUS='@%f/%t ' ninja -C build "$1" | while IFS= read -r line; do
    if [[ $line =~ ^@([0-9]+)/([0-9]+)\  ]]; then
      percent=$((100 * BASH_REMATCH[1] / BASH_REMATCH[2])) passed=$((SECONDS - begin))
      text="demo: build: $percent %"
      if [ "$percent" -lt 100 ] && [ "$passed" -ge 5 ]; then
        text+=$(printf ', about %d:%02d min left' $((passed * (100 - percent) / percent / 60)) $((passed * (100 - percent) / percent % 60)))
      fi
      if [ -t 1 ]; then
        printf '\r\033[K%s' "$text"
      elif [ $((percent / 10)) -gt "$shown" ]; then
        shown=$((percent / 10))
        echo "$text"
      fi
    elif [[ $line != ninja:* || $line == ninja:\ error* || $line == *stopped* ]]; then
      if [ -t 1 ]; then printf '\r\033[K'; fi
      printf '%s\n' "$line"
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

scripts/configure.sh release demo
echo "demo: building gradwire on $(nproc) cores: minutes, or seconds with a warm compiler cache"
build gradwire
mkdir -p build/demo
rm -f build/demo/compare.*.jsonl  # compare would skip these runs
echo "demo: training three times, about a minute each on two cores"
build/bin/gradwire compare --model vit_tiny --data fashion-mnist --ranks 4 \
  --batch-size 64 --epochs 3 --optimizer adamw --lr 2e-3 --log-every 100 \
  --compression fp32 --compression bf16 --compression powersgd:rank=4 \
  --json build/demo/compare.json "$@"
if "$python" -c 'import matplotlib' 2> /dev/null; then
  "$python" bench/plots/plot.py build/demo/compare.json -o build/demo/report.png
else
  echo "No plot: python3-matplotlib is not installed"
fi
build/bin/gradwire report build/demo/compare.json -o build/demo/report.html || true  # plotly may be missing
echo "Records: build/demo/compare.json and build/demo/compare.*.jsonl (docs/formats.md)"
