#!/usr/bin/env bash
# make deb: two Debian packages, in dist/: libgradwire-dev with libgradwire.so, its header, and its CMake and
# pkg-config files; gradwire with the programs and, by help2man, their man pages.
#
#   scripts/deb.sh [--smoke]    --smoke: packs what is built, in build/smoke
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
umask 022  # cpack makes ./usr
if ! command -v help2man > /dev/null; then
  [ -z "$smoke" ] || not_checked "help2man is not installed"
  echo "deb: help2man, which writes the man pages, is not installed: apt-get install help2man" >&2
  exit 1
fi
build_targets programs
# cpack takes the man pages from build/man.
trap 'rm -rf build/man' EXIT
mkdir -p build/man
help2man --no-info --name "train vision transformers with compressed gradients" \
  --output build/man/gradwire.1 build/bin/gradwire
help2man --no-info --name "measure and prove Gradwire's parts" \
  --output build/man/gradwire-bench.1 build/bin/gradwire-bench
folder=$place/deb
rm -rf "$folder" && mkdir -p "$folder"
cpack --config build/CPackConfig.cmake -B "$folder" > "$folder/cpack.log" || {
  cat "$folder/cpack.log" >&2
  exit 1
}
# check PACKAGE FILE...: fails unless the package has each file.
check() {
  local packed
  packed=$(dpkg-deb --contents "$folder/$1"_*.deb)
  for file in "${@:2}"; do
    grep -q "/$file\( ->.*\)\?$" <<< "$packed" || { echo "deb: the package $1 has no $file" >&2; exit 1; }
  done
}
# Messages name these pages.
pages=$(grep -rhoE "docs/[a-z-]+\.md" include runtime kernels collectives trainer bench | sort -u)
# shellcheck disable=SC2086
check libgradwire-dev doc/libgradwire-dev/copyright ${pages//docs\//doc/libgradwire-dev/}
# shellcheck disable=SC2086
check gradwire doc/gradwire/copyright ${pages//docs\//doc/gradwire/}
check libgradwire-dev libgradwire.so "$(readlink build/lib/libgradwire.so)" gradwire.h gradwire.pc gradwireConfig.cmake
check gradwire bin/gradwire bin/gradwire-bench gradwire/libgradwire_blas.so report/report.py \
  man/man1/gradwire.1 man/man1/gradwire-bench.1
[ -n "$smoke" ] || { mkdir -p dist && cp -v "$folder"/*.deb dist; }
