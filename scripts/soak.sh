#!/usr/bin/env bash
# make soak: random tests for a given time.
#
#   scripts/soak.sh faults [SECONDS [SEED]]     faults of every kind between ranks; 600 seconds, seed 1
#   scripts/soak.sh elastic [SECONDS [SEED]]    runs that lose, stop and admit ranks; the same defaults
#   scripts/soak.sh fuzz [SECONDS [TARGET...]]  scripts/fuzz.sh
#   scripts/soak.sh --smoke                     a second of faults and of elastic
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/smoke.sh

soak() { # KIND [SECONDS [SEED]]
  local filter
  case $1 in
    faults) filter='TcpFaults.AnyFault*' ;;
    elastic) filter='Elastic.LossesMatchUnder*' ;;
    *)
      echo "soak: expected faults, elastic or fuzz, not '$1'" >&2
      exit 2
      ;;
  esac
  build_targets processes_tests
  GRADWIRE_SOAK_S=${2:-600} GRADWIRE_TEST_SEED=${3:-1} build/bin/processes_tests --gtest_brief=1 \
    --gtest_filter="$filter" | tee "$place/soak.log"
  grep -q '^\[  PASSED  \] [1-9]' "$place/soak.log" && return
  echo "soak: no test has the name $filter" >&2
  exit 1
}

if [ -n "$smoke" ]; then
  soak faults 1
  soak elastic 1
elif [ "${1:-}" = fuzz ]; then
  exec scripts/fuzz.sh "${@:2}"
else
  soak "${@:-}"
fi
