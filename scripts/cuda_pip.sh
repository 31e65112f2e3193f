#!/usr/bin/env bash
# Installs NVIDIA's compiler and tools from PyPI in build/. Needs neither a GPU nor root.
#
#   scripts/cuda_pip.sh toolkit        nvcc and CUDA's libraries, in build/cuda-pip: make build CUDA=pip
#   scripts/cuda_pip.sh disassembler   cuobjdump and nvdisasm, in build/disassembler: make test, machine-code
#
# toolkit: downloads 720 MB and stores 1.1 GB. CMake uses this nvcc in every build folder that is not
# configured with another one (cmake/GradwireCuda.cmake), until build/cuda-pip is removed.
# disassembler: downloads 5 MB. Does nothing if both programs are on PATH, or if build/ is configured without
# nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${PYTHON:-/usr/bin/python3}
# CUDA 13.0. tools/checks/kernel_budgets.tsv has the budgets for this compiler's machine code.
toolkit=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-profiler-api==13.0.85 nvidia-nvtx==13.0.85 nvidia-cublas==13.1.0.3
  nvidia-nccl-cu13==2.28.9)
disassembler=13.5.37  # reads the code of every CUDA 13; PyPI has no version of CUDA 13.0

# Installs packages in a new virtual environment, $new/environment. On failure, prints the reason in one line.
install_packages() {
  rm -rf "$new"
  mkdir -p "$new"
  if ! { "$base" -m venv "$new/environment" && "$new/environment/bin/pip" install --quiet --disable-pip-version-check \
    --retries 1 --no-deps "$@"; } > "$new/log" 2>&1; then
    echo "cuda_pip: cannot install $1 from PyPI: $(grep ERROR "$new/log" | tail -1 || tail -1 "$new/log")" >&2
    rm -rf "$new"
    return 1
  fi
  site=$(echo "$new"/environment/lib/python*/site-packages/nvidia)
}

# Replaces $folder by $new, so that an interrupted installation leaves no incomplete folder.
finish() {
  rm -rf "$new/environment" "$new/log" "$folder"
  mv "$new" "$folder"
}

# The build's nvcc; "" if build/ is not configured or CMake found no nvcc (NOTFOUND).
nvcc=$(sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=\(.*nvcc.*\)/\1/p' build/CMakeCache.txt 2> /dev/null || true)
case ${1:-} in
  toolkit)
    folder=$PWD/build/cuda-pip
    new=$folder.new
    if [ -n "$nvcc" ] && [ "$nvcc" != "$folder/bin/nvcc" ]; then
      echo "cuda_pip: build/ is configured with $nvcc; to use nvcc from PyPI, remove build/CMakeCache.txt" >&2
      exit 1
    fi
    [ "$(cat "$folder/packages" 2> /dev/null)" = "${toolkit[*]}" ] && exit 0
    echo "cuda_pip: installing nvcc and libraries of CUDA 13.0 from PyPI in build/cuda-pip (1.1 GB)"
    install_packages "${toolkit[@]}"
    mv "$site"/cu13/* "$new"
    mv "$site"/nccl/include/* "$new/include"
    mv "$site"/nccl/lib/* "$new/lib"
    ln -s lib "$new/lib64"
    for library in "$new"/lib/*.so.*; do  # the linker searches for names without a version
      ln -s "${library##*/}" "${library%%.so.*}.so"
    done
    echo "${toolkit[*]}" > "$new/packages"
    finish
    ;;
  disassembler)
    folder=$PWD/build/disassembler
    new=$folder.new
    [ -n "$nvcc" ] || exit 0
    PATH=$PATH:$folder/bin
    { command -v cuobjdump && command -v nvdisasm; } > /dev/null && exit 0
    major=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    [ "$major" = "${disassembler%%.*}" ] || disassembler="$major.*"
    install_packages "nvidia-cuda-cuobjdump==$disassembler" "nvidia-cuda-nvdisasm==$disassembler"
    mkdir "$new/bin"
    mv "$site"/cu*/bin/{cuobjdump,nvdisasm} "$new/bin"
    finish
    echo "cuda_pip: installed cuobjdump and nvdisasm from PyPI in build/disassembler"
    ;;
  *)
    echo "cuda_pip: expected toolkit or disassembler, not '${1:-}'" >&2
    exit 2
    ;;
esac
