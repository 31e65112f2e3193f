#!/usr/bin/env bash
# make machine-code: reads the machine code of every CUDA kernel (tests/check_machine_code.py) and writes its table
# into docs/gpu.md. Needs nvcc, no GPU.
#
# Sets up NVIDIA's cuobjdump and nvdisasm (5 MB, Python packages) in build/disassembler, and keeps them: from then on
# make test checks the machine code, too.
set -euo pipefail
cd "$(dirname "$0")/.."
version=13.5.37
base=${PYTHON:-/usr/bin/python3}
folder=build/disassembler
if ! { command -v cuobjdump && command -v nvdisasm; } > /dev/null && ! [ -x $folder/bin/nvdisasm ]; then
  rm -rf $folder
  mkdir -p $folder/bin
  "$base" -m venv $folder/environment
  $folder/environment/bin/pip install --quiet --disable-pip-version-check --no-deps \
    nvidia-cuda-cuobjdump==$version nvidia-cuda-nvdisasm==$version
  for tool in cuobjdump nvdisasm; do
    install "$(find $folder/environment -path "*/bin/$tool" -type f)" $folder/bin/
  done
  rm -rf $folder/environment
fi
scripts/configure.sh release
cmake --build --preset release --target programs
exec "$base" tests/check_machine_code.py . build --write
