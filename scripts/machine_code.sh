#!/usr/bin/env bash
# make machine-code: reads the machine code of every CUDA kernel (tests/check_machine_code.py) and writes its
# table into docs/gpu.md. Needs nvcc, but no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${PYTHON:-/usr/bin/python3}
scripts/configure.sh release
PYTHON=$base scripts/cuda_pip.sh disassembler
cmake --build --preset release --target programs
exec "$base" tests/check_machine_code.py . build --write
