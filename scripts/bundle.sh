#!/usr/bin/env bash
# Packs the release build into build/gradwire-bundle.tar.xz, for a machine that has a GPU and Python's nvidia
# packages but not the libraries that Gradwire is built with (GoogleTest, OpenBLAS, ...).
#
#   bin/   gradwire, gradwire-bench and the test programs, stripped
#   lib/   libgradwire.so, and every other required library except glibc, libstdc++ and NVIDIA's
#   share/ the Python programs of gradwire report and export
#
# and, where this machine has them: bin/overlap, libgradwire_nccl.so, libgraph_trace.so, the wheel of dist/
# (CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=90 make wheel: a third of the size), and in lib/newer the NCCL that
# the build compiles with, for a machine with an older one: its code for compute capability 9.0 (34 MB).
#
#   scripts/bundle.sh [--smoke]    --smoke: not compressed, in build/smoke; ends with scripts/bundle_check.sh
#
# Unpack it anywhere; scripts/gpu_check.sh looks in build/bundle, and for NVIDIA's libraries in Python's
# packages.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
limit_mb=60  # the wheel takes up to 30
bundle=$place/bundle archive=$place/gradwire-bundle.tar.xz
extras=()
programs=(gradwire gradwire-bench runtime_tests kernels_tests collectives_tests trainer_tests capi_tests
  processes_tests)
for extra in bin/overlap lib/libgradwire_nccl.so lib/libgraph_trace.so; do
  [ -e "build/$extra" ] && extras+=("$extra") || echo "bundle: without $extra, which this build lacks"
done

rm -rf "$bundle" "$archive"
mkdir -p "$bundle/bin" "$bundle/lib"
needed=()
for program in "${programs[@]}"; do
  if [ ! -x "build/bin/$program" ]; then
    echo "bundle: build/bin/$program is not built; run make build-tests (it needs libgtest-dev)" >&2
    exit 1
  fi
  strip --strip-debug -o "$bundle/bin/$program" "build/bin/$program"  # so that a stack trace names functions
  needed+=("build/bin/$program")
done
soname=$(readlink build/lib/libgradwire.so)
strip -o "$bundle/lib/$soname" "build/lib/$soname"
ln -s "$soname" "$bundle/lib/libgradwire.so"
needed+=("build/lib/$soname")
for extra in ${extras[@]+"${extras[@]}"}; do
  strip --strip-debug -o "$bundle/$extra" "build/$extra"
  needed+=("build/$extra")
done
# Overwrites the code for other GPUs with zeros, which xz removes; the CUDA driver reads only the headers of
# such code. A fat binary is a header of 16 bytes (magic, version, size of the header, size of the rest) and
# entries: kind, version, size of the header and of the code, and at byte 28 the compute capability.
headers=$(sed -n 's/^NCCL_INCLUDE_DIR:PATH=//p' build/CMakeCache.txt)
nccl=$(compgen -G "$headers/../lib*/libnccl.so.2" | head -n 1) ||
  echo "bundle: without NCCL, which this machine lacks"
if [ -n "$nccl" ]; then
  mkdir "$bundle/lib/newer"
  python3 - "$nccl" "$bundle/lib/newer/libnccl.so.2" << 'PYTHON'
import struct, sys

library = bytearray(open(sys.argv[1], "rb").read())
at, kept = 0, 0
while (at := library.find(struct.pack("<IHH", 0xBA55ED50, 1, 16), at)) >= 0:
    entry = at + 16
    end = at = entry + struct.unpack_from("<Q", library, at + 8)[0]
    while entry < end:
        header, code = struct.unpack_from("<IQ", library, entry + 4)
        start, entry = entry + header, entry + header + code
        if struct.unpack_from("<I", library, start - header + 28)[0] == 90:
            kept += code
        else:
            library[start:entry] = bytes(code)
print(f"bundle: NCCL with {kept / 1e6:.0f} of {len(library) / 1e6:.0f} MB")
assert kept, "no code for compute capability 9.0"
open(sys.argv[2], "wb").write(library)
PYTHON
fi
wheel=$(compgen -G 'dist/gradwire-*.whl') && cp "$wheel" "$bundle" || echo "bundle: without a wheel (make wheel)"
mkdir -p "$bundle/share/gradwire"
cp -r trainer/report "$bundle/share/gradwire/report"

# The target machine provides glibc (2.36 or later), libstdc++ (GCC 12 or later) and NVIDIA's libraries (from
# the driver and Python packages).
system='linux-vdso|ld-linux|libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s'
theirs="^($system|libcu[a-zA-Z]*|libnccl|libnv[a-zA-Z-]*|libgradwire)[.-]"
ldd "${needed[@]}" | sed -nE 's/^\s+(\S+) => (\/\S+) .*/\1 \2/p' | sort -u | while read -r name path; do
  [[ $name =~ $theirs ]] && continue
  cp -L "$path" "$bundle/lib/$name"
  strip --strip-unneeded "$bundle/lib/$name" 2> /dev/null || true
done

git rev-parse HEAD > "$bundle/commit" 2> /dev/null || echo unknown > "$bundle/commit"
git diff --quiet HEAD 2> /dev/null || echo "with local changes" >> "$bundle/commit"
# Each program contains all kernels. With a dictionary larger than a program, xz finds the kernels in the
# previous program.
compress=(xz --lzma2=preset=1,dict=96MiB)
[ -z "$smoke" ] || compress=(cat)
tar -C "$place" -c bundle | "${compress[@]}" > "$archive"
bytes=$(stat -c %s "$archive")
unpacked_mb=$(du -sm "$bundle" | cut -f1)
echo "bundle: $archive, $((bytes / 1000000)) MB; $unpacked_mb MB unpacked"
if [ -n "$smoke" ]; then
  rm -rf "$bundle"
  status=0
  scripts/bundle_check.sh --smoke "$archive" || status=$?
  rm "$archive"
  exit $status
fi
if [ "$bytes" -gt $((limit_mb * 1000000)) ]; then
  echo "bundle: larger than the limit of $limit_mb MB" >&2
  exit 1
fi
