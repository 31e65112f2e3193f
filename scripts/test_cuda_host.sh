#!/usr/bin/env bash
# Tests the host code of the CUDA side on simulated GPUs (tests/standin): the tests of all layers on 1, 2 and
# 4 GPUs, training compared with the host, and a failure of each call of the CUDA runtime. Needs nvcc's
# headers, but not a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/configure.sh release
if [ ! -d build/tests/standin ]; then
  echo "test-cuda-host: this build has no standin_tests; they need CUDA's headers and nvcc"
  exit 1
fi
cmake --build --preset release --target standin_tests gradwire_standin gradwire_standin_shared
python=${PYTHON:-python3}
failed=0
jobs=$(nproc)
tests=(build/bin/standin_tests --gtest_filter='*cuda*:Standin*:CublasRules.*')
for gpus in 1 2 4; do
  # A test's instance for a device uses this device only: the last one, which is not the thread's default.
  others=
  for ((device = 0; device + 1 < gpus; ++device)); do others+=":*cuda${device}*:*cuda_${device}_*"; done
  echo "== standin_tests on $gpus pretended GPUs, in $jobs processes"
  pids=()
  for ((job = 0; job < jobs; ++job)); do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$job GRADWIRE_STANDIN_GPUS=$gpus \
      "${tests[@]}${others:+-${others#:}}" --gtest_brief=1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
done
echo "== the NCCL interposer"
ctest --test-dir build -R '^standin_interposer$' --output-on-failure || failed=1
for seed in 1 2 3 4; do
  echo "== the Python package, seed $seed"
  GRADWIRE_TEST_SEED=$seed ctest --test-dir build -R '^standin_python$' --output-on-failure || failed=1
done
echo "== training, compared with the host"
"$python" tests/standin/train_test.py build/standin/gradwire || failed=1
echo "== each call of the CUDA runtime made to fail"
"$python" tests/standin/fail_test.py build/standin/gradwire --jobs "$jobs" || failed=1
exit $failed
