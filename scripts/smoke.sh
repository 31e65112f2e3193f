# Sourced by scripts that take minutes, root, a network or a GPU. With --smoke as its first argument such a
# script runs its code in seconds, with the programs in build/, and fails when a target, flag, op or test that
# it names does not exist. `make test` runs each script this way. Sets $smoke, and $place, the folder for
# results: build or build/smoke.
# shellcheck shell=bash
smoke='' place=build
if [ "${1:-}" = --smoke ]; then
  smoke=1 place=build/smoke
  mkdir -p $place
  shift
fi

# build_targets TARGET...: configures and builds the release build. A smoke run only checks the names.
build_targets() {
  if [ -n "$smoke" ]; then
    ninja -C build -t query "$@" > /dev/null
  else
    scripts/configure.sh release
    cmake --build --preset release --target "$@"
  fi
}

# not_checked REASON: ends a smoke run that this machine cannot complete. ctest counts it as skipped.
not_checked() {
  echo "NOT CHECKED: $*"
  exit 77
}
