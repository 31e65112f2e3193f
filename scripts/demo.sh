#!/usr/bin/env bash
# make demo: builds only the gradwire command, trains a ViT three times and plots the results.
#
# In a fresh checkout on a machine without a GPU, the build omits the CUDA side; make build adds it later.
# Arguments are additional flags for `gradwire compare`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

side=
if ! nvidia-smi -L > /dev/null 2>&1; then side=host; fi
scripts/configure.sh release $side

files=0
for object in $(ninja -C build -t commands gradwire | grep -oE -- '-o [^ ]+\.o ' | cut -d' ' -f2); do
  [ -f "build/$object" ] || files=$((files + 1))
done
if [ "$files" -gt 0 ]; then
  cores=$(nproc)
  minutes=$((1 + files * 4 / cores / 60))  # about 4 core-seconds per file
  echo "demo: compiling $files files on $cores cores: about $minutes minutes, less with a warm compiler cache"
fi
cmake --build --preset release --target gradwire
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
