#!/usr/bin/env bash
# make deb: a Debian package of libgradwire.so, its header, and its CMake and pkg-config files; in dist/.
#
#   scripts/deb.sh [--smoke]    --smoke: packs what is built, in build/smoke
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
build_targets programs
folder=$place/deb
rm -rf "$folder" && mkdir -p "$folder"
cpack --config build/CPackConfig.cmake -B "$folder" > "$folder/cpack.log" || {
  cat "$folder/cpack.log" >&2
  exit 1
}
packed=$(dpkg-deb --contents "$folder"/*.deb)
for file in libgradwire.so libgradwire.so.0 gradwire.h gradwire.pc gradwireConfig.cmake; do
  grep -q "/$file\( ->.*\)\?$" <<< "$packed" || { echo "deb: the package has no $file" >&2; exit 1; }
done
[ -n "$smoke" ] || { mkdir -p dist && cp -v "$folder"/*.deb dist; }
