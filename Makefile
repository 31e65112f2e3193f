# Common tasks. On Debian 12, `make demo` and `make test` need only this checkout.
#
#   make demo     train a ViT on 4 ranks with FP32, INT8 and PowerSGD gradients, between threads and
#                 over emulated slow links: a table, build/demo/report.png and report.html
#   make demo-readme  the same, and write the table and the picture into README.md and docs/
#   make check    the checks that take seconds: format, text, paths, layers, tables; FILE=path: of one file
#   make test     build and run every test; PART=system, root or code: some of them (scripts/test.sh)
#   make test-sanitizers  a selection of the tests under ASan and UBSan, and under ThreadSanitizer
#   make test-full  both with every sweep at full length, which takes hours
#   make build    the optimized build of everything but the tests, in build/
#   make build CUDA=pip   the same with nvcc from PyPI, for machines without a CUDA toolkit: installs it in
#                 build/cuda-pip (1.1 GB); all later builds use it
#   make test-cuda-host   the CUDA side's host code on pretended GPUs: all tests of tests/standin
#   make test-frameworks   the Python tests on today's PyTorch as well as on Debian's; installs it in build/
#   make test-pytorch-suite   the distributed tests of PyTorch's wheel on the backend and the hook, in fp32
#                 and int8: what passed, what failed and why, what was left out
#   make faults   the fault matrix (docs/results/elastic.md), and 200 runs with a killed rank
#   make soak     random faults of every kind for 10 minutes; SOAK="faults SECONDS SEED"; SOAK=elastic: runs
#                 whose ranks are killed, stopped and joined; SOAK=fuzz: libFuzzer on the parsers of files and
#                 messages, a minute each, or SOAK="fuzz SECONDS TARGET..."
#   make bench    benchmarks
#   make bench-check  compare this build with the goals and the published numbers in
#                 docs/results/baselines.jsonl, in five minutes; BENCH_CHECK_FLAGS="--only REGEX" for some
#   make host-check  speed without a GPU, compared with hardware limits, PyTorch and gloo; into docs/results/
#   make experiments  training steps over slow links with each compression and with PyTorch's
#                 (docs/results/slow-links.md), Debian's and, where it is installed, 2.15; needs root
#   make plan-check  is --compression auto right? Predictions and choices compared with runs of every spec, in
#                 15 minutes (docs/results/auto.md); needs root for shaped links
#   make gpu-check   GPU tests, compute-sanitizer and benches on a machine with a GPU; into docs/results/
#   make machine-code   compare the kernels' machine code with tools/checks/kernel_budgets.tsv, and write
#                 docs/results/machine-code.md
#   make bundle   pack the build for a GPU machine that cannot build it: build/gradwire-bundle.tar.xz
#   make wheel    a source archive of the Python package, and from it a wheel with the library; in dist/
#   make deb      Debian packages of the C library and of the programs; in dist/
#   make docs     the documentation as a site with search, in build/site; installs mkdocs-material in build/
#   make format   clang-format over the sources
#   make clean    remove every build folder

PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
DEMO_FLAGS ?=
BENCH_CHECK_FLAGS ?=
PART ?=
FILE ?=
SOAK ?= faults

.PHONY: build build-tests check demo demo-readme test test-sanitizers test-full test-cuda-host test-frameworks \
  test-pytorch-suite faults soak bench bench-check host-check experiments plan-check gpu-check machine-code \
  bundle wheel deb docs setup format clean

build: setup
	@scripts/configure.sh release
	@cmake --build --preset release --target programs

build-tests: setup
	@scripts/configure.sh release
	@cmake --build --preset release

check:
	@$(PYTHON) tools/checks/check.py $(FILE)

demo:
	@scripts/setup.sh demo
	@PYTHON=$(PYTHON) scripts/demo.sh $(DEMO_FLAGS)

demo-readme: demo
	@$(PYTHON) bench/harness/demo.py --readme

test: setup
	@scripts/test.sh $(PART)

test-sanitizers: setup
	@scripts/test.sh sanitizers

test-full: setup
	@export GRADWIRE_FULL_SWEEPS=1; scripts/test.sh; release=$$?; scripts/test.sh sanitizers && exit $$release

test-cuda-host: setup
	@PYTHON=$(PYTHON) scripts/test_cuda_host.sh

test-frameworks: setup
	@scripts/frameworks.sh

test-pytorch-suite: setup
	@scripts/frameworks.sh install
	@scripts/configure.sh release
	@cmake --build --preset release --target gradwire_shared
	@ctest --test-dir build --verbose -L suite > build/pytorch-suite.log; status=$$?; \
	  grep -E ": (failed|left out|passed|PyTorch [0-9])|% tests" build/pytorch-suite.log; exit $$status

faults: setup
	@scripts/configure.sh release
	@cmake --build --preset release --target processes_tests
	@GRADWIRE_FULL_SWEEPS=1 build/bin/processes_tests --gtest_filter='*FaultMatrix*:TcpFaults.*:Shrink.*:Elastic.*' --gtest_brief=1

machine-code: setup
	@PYTHON=$(PYTHON) scripts/machine_code.sh

soak: setup
	@scripts/soak.sh $(SOAK)

bench: build
	@build/bin/gradwire-bench kernels --stop 50ms --json build/kernels.json

bench-check: build
	@$(PYTHON) bench/harness/check.py run $(BENCH_CHECK_FLAGS)

host-check: build
	@scripts/host_check.sh

experiments: build
	@$(PYTHON) bench/experiments/run.py slow_links
	@if [ -x build/frameworks/python ]; then \
	  $(PYTHON) bench/experiments/run.py slow_links --python build/frameworks/python --no-sweep --no-fast \
	    --json build/experiments-today.json; \
	else \
	  echo "Not compared with PyTorch 2.15: scripts/frameworks.sh install sets it up (2.2 GB)"; \
	fi

plan-check: build
	@$(PYTHON) bench/experiments/run.py plan_check --json build/plan-check.json
	@$(PYTHON) bench/experiments/run.py plan_check --render build/plan-check.json

gpu-check: build-tests
	@scripts/gpu_check.sh

bundle: build-tests
	@scripts/bundle.sh
	@scripts/bundle_check.sh || [ $$? -eq 77 ]

deb: setup
	@scripts/deb.sh

wheel: setup
	@PYTHON=$(PYTHON) scripts/wheel.sh

docs:
	@PYTHON=$(PYTHON) scripts/docs.sh

setup:
	@scripts/setup.sh
ifeq ($(CUDA),pip)
	@PYTHON=$(PYTHON) scripts/cuda_pip.sh toolkit
else ifeq ($(origin CUDA),command line)
$(error CUDA must be pip, not '$(CUDA)')
endif

format:
	@git ls-files '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	@rm -rf build build-debug build-asan build-tsan build-fuzz
