#!/usr/bin/env bash
# make demo: builds only the gradwire command, then runs bench/harness/demo.py.
#
# In a fresh checkout on a machine without a GPU, the build omits the CUDA side; make build adds it later.
# Arguments are additional flags for `gradwire compare`.
set -euo pipefail
cd "$(dirname "$0")/.."

# Builds a target. Shows the share of finished build steps and an estimate of the remaining time: one line
# that changes on a terminal, otherwise a line per 10 %. Other output, such as errors, passes through.
build() {
  local line text begin=$SECONDS passed left percent shown=0
  NINJA_STATUS='@%f/%t ' ninja -C build "$1" | while IFS= read -r line; do
    if [[ $line =~ ^@([0-9]+)/([0-9]+)\  ]]; then
      percent=$((100 * BASH_REMATCH[1] / BASH_REMATCH[2])) passed=$((SECONDS - begin))
      text="demo: build: $percent %"
      if [ "$percent" -lt 100 ] && [ "$passed" -ge 5 ]; then
        left=$((passed * (100 - percent) / percent))
        text+=$(printf ', about %d:%02d min left' $((left / 60)) $((left % 60)))
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
exec "${PYTHON:-python3}" bench/harness/demo.py "$@"
