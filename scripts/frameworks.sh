#!/usr/bin/env bash
# make test-frameworks: runs tests/integrations on today's PyTorch, with the frameworks of
# docs/for-trainers.md, and JAX. make test runs them on Debian's PyTorch 1.13.
#
#   scripts/frameworks.sh [install]   install: only sets up the environment, also for make experiments
#   scripts/frameworks.sh --smoke     installs and runs nothing: checks pip's options and the tests' label
#
# Sets up a virtual environment in build/frameworks (2.8 GB, about six minutes). Afterwards make test also
# runs these tests.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=2.15.0 torchvision=0.29.2
. scripts/smoke.sh
base=${PYTHON:-/usr/bin/python3}
folder=$PWD/$place/frameworks
if [ -n "$smoke" ]; then
  # Replaces Python by a script whose virtual environments have a pip that only parses its arguments.
  rm -rf "$folder" && mkdir -p "$folder"
  cat > "$folder/base" << END
#!/bin/sh
mkdir -p "\$3/bin"
printf '#!/bin/sh\nexec "$base" -m pip "\$@" --help > /dev/null\n' > "\$3/bin/pip"
printf '#!/bin/sh\n' > "\$3/bin/python"
chmod +x "\$3/bin/pip" "\$3/bin/python"
END
  chmod +x "$folder/base"
  base=$folder/base
fi
version=$("$folder/python" -c 'import torch; print(torch.__version__.split("+")[0])' 2> /dev/null || true)

if [ "$version" != "$torch" ]; then
  echo "frameworks: installing torch $torch (2.2 GB, about five minutes)"
  rm -rf "$folder/environment"
  "$base" -m venv "$folder/environment"
  pip=("$folder/environment/bin/pip" install --quiet --disable-pip-version-check)
  cuda=/usr/local/cuda/lib64
  if [ -e $cuda/libcublas.so.13 ]; then
    # Installs only the modules that torch imports without a GPU. The toolkit replaces the rest of CUDA, which
    # saves 3 GB.
    "${pip[@]}" --no-deps torch==$torch torchvision==$torchvision typing_extensions sympy mpmath networkx jinja2 \
      markupsafe fsspec filelock numpy pillow 'setuptools>=70.1' expecttest
    "${pip[@]}" --no-deps nvidia-cufile nvidia-cusparselt-cu13 nvidia-nvshmem-cu13 nvidia-nccl-cu13==2.30.7
  else
    "${pip[@]}" torch==$torch torchvision==$torchvision numpy 'setuptools>=70.1' expecttest
  fi
  libraries=$(printf '%s:' "$folder"/environment/lib/python*/site-packages/nvidia/*/lib)$cuda
  cat > "$folder/python" << END
#!/bin/sh
LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} exec "$folder/environment/bin/python" "\$@"
END
  chmod +x "$folder/python"
  "$folder/python" -c 'import torch, torchvision; print("frameworks: torch", torch.__version__)'
fi

lightning=2.6.6
version=$("$folder/python" -c 'from importlib.metadata import version; print(version("lightning"))' 2> /dev/null || true)
if [ "$version" != "$lightning" ]; then
  echo "frameworks: installing lightning $lightning, accelerate and transformers (250 MB)"
  pip=("$folder/environment/bin/pip" install --quiet --disable-pip-version-check)
  # Those that depend on torch, whose dependencies would install all of CUDA.
  "${pip[@]}" --no-deps lightning==$lightning pytorch-lightning==$lightning torchmetrics==1.9.0 \
    accelerate==1.15.0 transformers==5.24.0
  "${pip[@]}" lightning-utilities pyyaml tqdm huggingface-hub regex tokenizers safetensors psutil aiohttp typer
fi

ray=2.60.0
version=$("$folder/python" -c 'from importlib.metadata import version; print(version("ray"))' 2> /dev/null || true)
if [ "$version" != "$ray" ]; then
  echo "frameworks: installing ray $ray, deepspeed, torchtitan and megatron-core (550 MB)"
  pip=("$folder/environment/bin/pip" install --quiet --disable-pip-version-check)
  "${pip[@]}" ray==$ray pyarrow pandas einops hjson msgpack ninja py-cpuinfo docstring_parser typeguard wheel
  # DeepSpeed's setup.py imports torch.
  LD_LIBRARY_PATH=$(sed -n 's/^LD_LIBRARY_PATH=\([^$]*\).*/\1/p' "$folder/python" 2> /dev/null) \
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "${pip[@]}" --no-deps --no-build-isolation deepspeed==0.19.8
  "${pip[@]}" --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro megatron-core==0.16.1
fi

jax=0.10.2
version=$("$folder/python-jax" -c 'import jax; print(jax.__version__)' 2> /dev/null || true)
if [ "$version" != "$jax" ]; then
  echo "frameworks: installing jax $jax (350 MB, half a minute)"
  rm -rf "$folder/jax"
  "$base" -m venv "$folder/jax"
  "$folder/jax/bin/pip" install --quiet --disable-pip-version-check jax==$jax optax==0.2.8
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$folder/jax/bin/python" > "$folder/python-jax"
  chmod +x "$folder/python-jax"
fi

[ "${1:-}" = install ] && exit 0
if [ -n "$smoke" ]; then
  ctest --test-dir build -N -L "^debian$" | grep -q '^Total Tests: [1-9]' && exit 0
  echo "frameworks: no test has the label debian" >&2
  exit 1
fi
scripts/configure.sh release
cmake --build --preset release
ctest --test-dir build --output-on-failure -L "debian|frameworks"
