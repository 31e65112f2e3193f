#!/usr/bin/env bash
# Runs a command on several hosts that are connected by slow links, all on this machine.
#
#   shaped_link.sh [--hosts 4] [--rate 1gbit] [--delay 100us] [--port 29500] -- COMMAND [ARGUMENT...]
#
# A host is a network namespace with one Ethernet port; a cable (veth pair) leads from it to a switch (a
# bridge in a separate namespace). Both ends of each cable send at most --rate (tc tbf), so a link is full
# duplex. Each host adds --delay to the data it sends. COMMAND runs once per host, with RANK, WORLD_SIZE,
# LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set as by torchrun. GRADWIRE_THREADS and
# OMP_NUM_THREADS, unless set, are set so that all hosts together use this machine's cores. Host 0 uses the
# terminal; the output of another host is shown if it fails.
#
# Needs root, but only for its namespaces: the machine's network is not touched. Removes everything at the
# end, even after Ctrl-C; the next run removes the remains of a killed run.
# Exit code: of the first host that failed; 2 if the links cannot be created.
set -uo pipefail

stop() {
  echo "shaped_link: $*" >&2
  exit 2
}

hosts=4 rate=1gbit delay="" port=29500
while [ $# -gt 0 ]; do
  case $1 in
    --hosts | --rate | --delay | --port)
      [ $# -ge 2 ] || stop "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    --)
      shift
      break
      ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit 0
      ;;
    *) stop "unknown argument '$1'; see --help" ;;
  esac
done
[ $# -gt 0 ] || stop "no command; give one after --"
case $hosts in
  '' | *[!0-9]*) stop "--hosts $hosts is not a number" ;;
esac
[ "$hosts" -ge 1 ] && [ "$hosts" -le 200 ] || stop "--hosts $hosts: must be from 1 to 200"
for tool in ip tc; do
  command -v $tool > /dev/null || stop "'$tool' is missing; install the package iproute2"
done
[ "$(id -u)" -eq 0 ] || stop "network namespaces need root; run it with sudo"

prefix=gwlink-
me=$prefix$$-
pids=()

# Removes the namespaces whose names begin with $1, with their processes, veths and bridges.
remove() {
  local space inside
  for space in $(ip netns list 2> /dev/null | awk '{print $1}' | grep "^$1"); do
    inside=$(ip netns pids "$space" 2> /dev/null)
    # shellcheck disable=SC2086
    [ -z "$inside" ] || kill -KILL $inside 2> /dev/null
    ip netns del "$space"
  done
}

logs=$(mktemp -d)
finish() {
  trap '' INT TERM HUP
  remove "$me"
  wait 2> /dev/null  # otherwise bash reports each killed process
  rm -rf "$logs"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Removes the remains of killed runs.
for space in $(ip netns list 2> /dev/null | awk '{print $1}' | grep "^$prefix"); do
  owner=${space#"$prefix"}
  owner=${owner%%-*}
  kill -0 "$owner" 2> /dev/null || remove "$prefix$owner-"
done

why=$(ip netns add "${me}switch" 2>&1) || stop "this machine does not permit network namespaces: $why"
run() { "$@" || stop "failed: $*"; }
on_switch() { run ip -n "${me}switch" "$@"; }

# The burst is two of the largest packets that a veth carries (64 KiB), for the smoothest possible rate.
shape() { # namespace, device
  run tc -n "$1" qdisc add dev "$2" root handle 1: tbf rate "$rate" burst 128k latency 50ms
}

on_switch link add bridge type bridge
on_switch link set bridge up
for ((i = 0; i < hosts; ++i)); do
  host=${me}host$i
  run ip netns add "$host"
  on_switch link add port$i type veth peer name eth0 netns "$host"
  on_switch link set port$i master bridge
  on_switch link set port$i up
  run ip -n "$host" link set lo up
  run ip -n "$host" addr add 10.77.0.$((i + 1))/24 dev eth0
  run ip -n "$host" link set eth0 up
  shape "${me}switch" port$i
  shape "$host" eth0
  if [ -n "$delay" ]; then
    run tc -n "$host" qdisc add dev eth0 parent 1:1 handle 10: netem delay "$delay" limit 100000
  fi
done

threads=$(($(nproc) / hosts))
[ $threads -ge 1 ] || threads=1
export WORLD_SIZE=$hosts LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=$port
export GRADWIRE_SECRET=${GRADWIRE_SECRET:-$(head -c 16 /dev/urandom | base64)}
export GRADWIRE_THREADS=${GRADWIRE_THREADS:-$threads} OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export GLOO_SOCKET_IFNAME=eth0
for ((i = 0; i < hosts; ++i)); do
  if [ $i -eq 0 ]; then
    RANK=$i ip netns exec "${me}host$i" "$@" &
  else
    RANK=$i ip netns exec "${me}host$i" "$@" > "$logs/$i" 2>&1 < /dev/null &
  fi
  pids+=($!)
done

status=0
for ((i = 0; i < hosts; ++i)); do
  wait "${pids[$i]}"
  code=$?
  [ $code -eq 0 ] && continue
  [ $status -ne 0 ] || status=$code
  [ $i -eq 0 ] || sed "s/^/[host $i] /" "$logs/$i" >&2
done
exit $status
