#!/usr/bin/env bash
# Runs the programs of a bundle (scripts/bundle.sh) in an empty root with a /proc, a few devices and, from
# this machine, only the libraries that the target machine provides: glibc, libstdc++, libgcc and NVIDIA's
# cuBLAS. This check detects missing libraries, files and tools of the bundle without a machine with a GPU. No
# program uses a GPU.
#
#   scripts/bundle_check.sh [--smoke] [BUNDLE.tar.xz]    --smoke: without gradwire doctor, which measures
#
# Default: build/gradwire-bundle.tar.xz. `make bundle` runs it last.
#
# Needs user namespaces, but no privileges. Without user namespaces, prints a message and exits with 77.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
bundle=$(realpath -- "${1:-build/gradwire-bundle.tar.xz}")
system=(libc.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0 libresolv.so.2 libstdc++.so.6 libgcc_s.so.1)
loader=/lib64/ld-linux-x86-64.so.2
change_root=$(PATH=$PATH:/usr/sbin command -v chroot)
programs=(runtime_tests kernels_tests collectives_tests trainer_tests capi_tests processes_tests)

if [ ! -f "$bundle" ]; then
  echo "bundle-check: $bundle does not exist; run make bundle" >&2
  exit 1
fi

# Prints this machine's file of a library, from the loader's cache.
path_of() {
  ldconfig -p | sed -nE "s|^\s+$(sed 's/[+.]/\\&/g' <<< "$1") \(.*x86-64.*\) => (.*)|\1|p" | head -n 1
}

# Runs in the namespaces. $1: an empty folder.
inside() {
  local root=$1 name path
  mount -t tmpfs none "$root"
  mkdir -p "$root"/{proc,dev/shm,tmp,lib,lib64,nvidia,there}
  mount -t proc none "$root/proc"
  show() { # binds a file of this machine to that path
    touch "$2"
    mount --bind "$1" "$2"
  }
  for name in null zero urandom; do show /dev/$name "$root/dev/$name"; done
  show "$(realpath $loader)" "$root$loader"
  for name in "${system[@]}"; do
    path=$(path_of "$name")
    [ -z "$path" ] || show "$(realpath "$path")" "$root/lib/$name"
  done
  tar -C "$root/there" -xf "$bundle"
  # Lists the dependencies of NVIDIA's libraries, which the system provides. The target has NVIDIA's libraries
  # from Python's packages.
  LD_LIBRARY_PATH=/usr/local/cuda/lib64:/usr/local/cuda/lib ldd "$root"/there/bundle/{bin/*,lib/*.so} 2> /dev/null |
    sed -nE 's/^\s+(libcu\S+|libnv\S+) => (\/\S+) .*/\1 \2/p' | sort -u > "$root/tmp/nvidia"
  while read -r name path; do show "$(realpath "$path")" "$root/nvidia/$name"; done < "$root/tmp/nvidia"

  local failed=0 through=()  # how the program starts, for example by the loader with its options
  try() { # DESCRIPTION PROGRAM ARGUMENT...
    local what=$1 program=$2 output status=0
    output=$(cd / && env -i LD_LIBRARY_PATH=/nvidia LD_BIND_NOW=1 HOME=/tmp TMPDIR=/tmp CUDA_VISIBLE_DEVICES= \
      timeout 120 "$change_root" "$root" ${through[@]+"${through[@]}"} "/there/bundle/bin/$program" "${@:3}" 2>&1) || status=$?
    [[ $output != *"cannot be preloaded"* ]] || status="a library that does not load"
    [ "$program $status" != "overlap 77" ] || status=0  # 77: this machine has no GPU
    if [ "$status" = 0 ] && [[ $* == *--gtest_filter=* ]]; then
      grep -q '^\[  PASSED  \] [1-9]' <<< "$output" || status="no test of that name"
    fi
    if [ "$status" = 0 ]; then
      echo "bundle-check: $what: fine"
    else
      echo "bundle-check: $what: $program ${*:3} ended with $status:" >&2
      tail -n 5 <<< "$output" >&2
      failed=1
    fi
  }
  try "the command starts" gradwire --version
  try "it trains, two ranks" gradwire train --data synthetic --model vit_tiny --device host --ranks 2 --steps 2 \
    --batch-size 8 --compression bf16 --log /tmp/run.jsonl
  try "it examines the machine" gradwire doctor ${smoke:+--help}
  try "the benches start" gradwire-bench schedules --check --max-ranks 8
  for name in "${programs[@]}"; do try "$name load" "$name" --gtest_list_tests; done
  [ ! -e "$root/there/bundle/bin/overlap" ] || try "overlap starts" overlap
  for name in libgradwire_nccl.so libgraph_trace.so newer/libnccl.so.2; do
    through=("$loader" --preload "/there/bundle/lib/$name")
    [ ! -e "$root/there/bundle/lib/$name" ] || try "$name loads" gradwire --version
  done
  through=()
  try "products of matrices" kernels_tests --gtest_brief=1 "--gtest_filter=*Gemm*host*:*Blas*"
  try "ranks as processes" processes_tests --gtest_brief=1 "--gtest_filter=StoreTest.*"
  try "the C library" capi_tests --gtest_brief=1 "--gtest_filter=CApiErrors.*"
  return $failed
}

if ! unshare --map-root-user --mount --pid --fork true 2> /dev/null; then
  echo "bundle-check: not checked: this machine allows no user namespaces (unshare --map-root-user)" >&2
  exit 77
fi
root=$(mktemp -d)
trap 'rmdir "$root"' EXIT
export -f inside path_of
export bundle loader change_root smoke
unshare --map-root-user --mount --pid --fork bash -euo pipefail -c "
  $(declare -p system programs)
  inside '$root'"
echo "bundle-check: $(basename "$bundle") needs nothing but glibc, libstdc++ and NVIDIA's libraries"
