#!/usr/bin/env bash
# make machine-code: reads the machine code of every CUDA kernel (tools/checks/check_machine_code.py) and
# writes the table of docs/results/machine-code.md. Needs nvcc, but not a GPU.
#
#   scripts/machine_code.sh [--smoke]    --smoke: reads the existing build, and only compares the table
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
base=${PYTHON:-/usr/bin/python3}
build_targets programs
[ -n "$smoke" ] || PYTHON=$base scripts/cuda_pip.sh disassembler
write=(--write)
[ -z "$smoke" ] || write=()
exec "$base" tools/checks/check_machine_code.py . build "${write[@]}"
