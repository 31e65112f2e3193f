#!/usr/bin/env bash
# Installs the packages of Debian 12 that Gradwire needs (Ubuntu 24.04 was not tried). Does nothing if all are
# installed. If a package cannot be installed, names the feature that the missing package disables and
# continues. On other systems, prints the packages by feature.
#
#   scripts/setup.sh        packages of the build, the demo, the tests and the tools
#   scripts/setup.sh demo   only the packages of the build and of make demo
#
# tools/checks/check_packages.py checks that the lists are complete; scripts/fresh_debian.sh tests them on a
# bare Debian.
set -uo pipefail

# package:feature that needs the package. The build needs the packages of the first group.
required=(
  "g++:the compiler" "cmake:the build" "ninja-build:the build" "make:the commands in README"
  "libopenblas-dev:matrix products on the host" "libfmt-dev:messages" "libcli11-dev:the gradwire command"
  "nlohmann-json3-dev:the gradwire command" "zlib1g-dev:reading data sets" "python3:the scripts"
)
demo=(
  "dataset-fashion-mnist:real images without a download (demo; --data fashion-mnist:DIR still works)"
  "python3-matplotlib:pictures (bench/plots/plot.py)" "python3-plotly:gradwire report" "ccache:fast rebuilds"
)
tests=(
  "libgtest-dev:the tests" "libboost-context-dev:the tests that run CUDA kernels on the CPU"
  "libgloo-dev:gloo's own allreduce in benchmarks"
  "python3-numpy:the oracles" "python3-torch:the oracles" "python3-torchvision:the oracles"
  "mypy:the check of the Python package's types"
  "python3-pip:the test of pip install" "python3-setuptools:the test of pip install" "python3-wheel:the test of pip install"
  "python3-venv:make wheel, make test-frameworks, make build CUDA=pip and the machine-code check"
  "chromium:the test of gradwire report's page" "chromium-driver:the test of gradwire report's page"
  "python3-selenium:the test of gradwire report's page"
  "iproute2:slow links on one machine (bench/harness/shaped_link.sh)"
  "doxygen:the API page of the C header" "git:version control" "xz-utils:make bundle"
  "dpkg-dev:make deb" "file:make deb" "help2man:make deb" "clang-format:the check of the format of C++"
  "universal-ctags:the check of sizes"
)
optional=("${demo[@]}")
case ${1:-} in demo) ;; '') optional+=("${tests[@]}") ;;
  *) echo "setup: '$1' is not a set of packages: demo, or nothing for all" >&2; exit 2 ;; esac

if ! command -v dpkg-query > /dev/null; then
  list() {  # prints one line for each feature
    local entry last=
    for entry in "$@"; do
      [ "${entry#*:}" = "$last" ] || printf '%s  %s:' "${last:+$'\n'}" "${entry#*:}"
      last=${entry#*:}
      printf ' %s' "${entry%%:*}"
    done
    echo
  }
  echo "setup: neither Debian nor Ubuntu, so nothing is installed. The build needs what these Debian packages have:"
  list "${required[@]}"
  echo "Optional, by feature:"
  list "${optional[@]}"
  exit 0
fi

# Ubuntu 24.04 has Chromium as a snap only, which containers cannot install. Without it one test is skipped.
if grep -qs '^ID=ubuntu' /etc/os-release; then
  for i in "${!optional[@]}"; do
    case ${optional[i]} in chromium*) unset "optional[$i]" ;; esac
  done
fi

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2> /dev/null)" = installed ]; }

missing=()
for entry in "${required[@]}" "${optional[@]}"; do
  installed "${entry%%:*}" || missing+=("${entry%%:*}")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "setup: everything is installed"
  exit 0
fi

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo > /dev/null; then
    sudo=(sudo)
  else
    echo "setup: neither root nor sudo, so these cannot be installed: ${missing[*]}"
  fi
fi
if [ "$(id -u)" -eq 0 ] || [ ${#sudo[@]} -gt 0 ]; then
  echo "setup: installing ${missing[*]}"
  apt() {
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 "$@" \
      > /dev/null
  }
  # The package lists may be recent enough, so first try without fetching the lists.
  if ! apt install -y --no-install-recommends "${missing[@]}" 2> /dev/null; then
    apt update || echo "setup: apt-get update failed; using the package lists of the last update"
    if ! apt install -y --no-install-recommends "${missing[@]}" 2> /dev/null; then
      for package in "${missing[@]}"; do  # one package that fails must not affect the others
        installed "$package" || apt install -y --no-install-recommends "$package" 2> /dev/null
      done
    fi
  fi
fi

status=0
for entry in "${required[@]}"; do
  installed "${entry%%:*}" && continue
  # A tool may come from another source, such as the user's compiler, so look for the program. CMake looks for
  # libraries.
  tool=${entry%%:*}
  [ "$tool" = ninja-build ] && tool=ninja
  command -v "$tool" > /dev/null && continue
  echo "setup: ${entry%%:*} could not be installed, and ${entry#*:} needs it"
  status=1
done
for entry in "${optional[@]}"; do
  installed "${entry%%:*}" || echo "setup: ${entry%%:*} could not be installed; off: ${entry#*:}"
done
exit $status
