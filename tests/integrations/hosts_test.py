#!/usr/bin/python3
"""Tests processes on two hosts with different networks: they connect, or report why before the deadline.

    hosts_test.py GRADWIRE

The hosts are network namespaces with a cable between them. Each case gives the hosts other interfaces and
addresses. Exits with 77 (skipped) if this process may not create network namespaces.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Iterator

GRADWIRE = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else ""
TRAIN = (
    "train --data synthetic:256 --batch-size 16 --device host --width 16 --depth 1 --heads 2 --mlp 32".split()
)
PREFIX = f"gw{os.getpid()}"
CABLE = "cable"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI_", "GRADWIRE_",
             "TORCHELASTIC_")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def on(host: str, *arguments: str) -> None:
    ip("-n", PREFIX + host, *arguments)


def interface(host: str, name: str, address: str) -> None:
    """Adds an interface without a connection to other hosts, such as docker0."""
    on(host, "link", "add", name, "type", "veth", "peer", "name", name + "x")
    for end in (name + "x", name):
        on(host, "link", "set", end, "up")
    on(host, "address", "add", address, "dev", name)


def cable(addresses: dict[str, str]) -> None:
    ip("link", "add", CABLE, "netns", PREFIX + "A", "type", "veth", "peer", "name", CABLE, "netns",
       PREFIX + "B")
    for host, address in addresses.items():
        on(host, "address", "add", address, "dev", CABLE, *(["nodad"] if ":" in address else []))
        on(host, "link", "set", CABLE, "up")


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    try:
        for host in "AB":
            ip("netns", "add", PREFIX + host)
            on(host, "link", "set", "lo", "up")
        yield
    finally:
        for host in "AB":
            subprocess.run(["ip", "netns", "delete", PREFIX + host], capture_output=True)
            shutil.rmtree(f"/etc/netns/{PREFIX}{host}", ignore_errors=True)


def start(places: str, folder: str, more: dict[str, str], *flags: str,
          steps: int = 2) -> list[subprocess.Popen[str]]:
    """Starts a rank on each of the hosts in `places`. Their output is in files in `folder`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return [subprocess.Popen(["ip", "netns", "exec", PREFIX + host, GRADWIRE, *TRAIN, "--steps",
                              str(steps), *flags], text=True, env=environment | more
                             | {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "GRADWIRE_THREADS": "1"},
                             stdout=open(f"{folder}/output{rank}", "w"), stderr=subprocess.STDOUT)
            for rank, host in enumerate(places)]


def finish(ranks: list[subprocess.Popen[str]], folder: str) -> list[tuple[int, str]]:
    for rank in ranks:
        try:
            rank.wait(timeout=120)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
    return [(rank.returncode, pathlib.Path(f"{folder}/output{number}").read_text())
            for number, rank in enumerate(ranks)]


def all_right(ended: list[tuple[int, str]]) -> None:
    assert all(code == 0 for code, _ in ended), "\n".join(f"rank {r}: code {code}: {text}"
                                                          for r, (code, text) in enumerate(ended))


def meet(places: str, folder: str, more: dict[str, str] | None = None) -> None:
    all_right(
        finish(
            start(places, folder, more or {}, "--rendezvous", f"file://{folder}/meet", "--timeout-s", "40"),
            folder))


IPV4 = {"A": "10.9.0.1/24", "B": "10.9.0.2/24"}
IPV6 = {"A": "fd00:9::1/64", "B": "fd00:9::2/64"}


def docker0_is_first_on_both_hosts(folder: str) -> None:
    for host in "AB":
        interface(host, "docker0", "172.17.0.1/16")
    cable(IPV4)
    meet("AAB", folder)


def the_same_ports_on_both_hosts_behind_docker0(folder: str) -> None:
    """Checks that ranks on both hosts can have the same ports and the same docker0 address.

    At docker0's address a rank of the same host answers at the port of a rank on the other host.
    """
    for host in "AB":
        interface(host, "docker0", "172.17.0.1/16")
    cable(IPV4)
    meet("ABAB", folder, {"GRADWIRE_PORTS": "20000-20015"})


def a_network_that_only_one_host_has_is_first(folder: str) -> None:
    interface("A", "vpn", "10.8.0.1/24")
    cable(IPV4)
    meet("AAB", folder)


def an_address_that_swallows_what_is_sent_to_it_is_first(folder: str) -> None:
    interface("A", "vpn", "10.8.0.1/24")
    cable(IPV4)
    for which in ("all", CABLE):  # host A does not answer ARP for other interfaces
        subprocess.run(["ip", "netns", "exec", PREFIX + "A", "sh", "-c",
                        f"echo 1 >/proc/sys/net/ipv4/conf/{which}/arp_ignore"], check=True)
    on("B", "route", "add", "10.8.0.0/24", "dev", CABLE)
    meet("AAB", folder)


def hosts_have_ipv6_only(folder: str) -> None:
    cable(IPV6)
    meet("AAB", folder)


def a_name_is_loopback_on_one_host_and_ipv6_on_the_other(folder: str) -> None:
    """Names a host in /etc/hosts as Debian does: 127.0.1.1 on host A."""
    cable(IPV6)
    for host, address in {"A": "127.0.1.1", "B": "fd00:9::1"}.items():
        place = pathlib.Path(f"/etc/netns/{PREFIX}{host}")
        place.mkdir(parents=True)
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{address} nodea\n")
    all_right(
        finish(start("AAB", folder, {"MASTER_ADDR": "nodea", "GRADWIRE_SECRET": "s"}, "--timeout-s", "40"),
               folder))


def listening_ports(host: str) -> set[int]:
    ports = set()
    for table in ("tcp", "tcp6"):
        text = subprocess.run(["ip", "netns", "exec", PREFIX + host, "cat", f"/proc/net/{table}"], check=True,
                              capture_output=True, text=True).stdout
        ports |= {int(words[1].rpartition(":")[2], 16)
                  for line in text.splitlines()[1:] if (words := line.split())[3] == "0A"}
    return ports


def loopback_has_ipv6_only(folder: str) -> None:
    on("A", "address", "delete", "127.0.0.1/8", "dev", "lo")
    for variables, flags in (({}, ["--rendezvous", f"file://{folder}/meet"]),
                             ({}, ["--rendezvous", "tcp://localhost:20001"]),
                             ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "any", "MASTER_PORT": "20002"}, [])):
        all_right(finish(start("AA", folder, variables, *flags, "--timeout-s", "20"), folder))


def only_the_ports_that_a_firewall_permits_are_listened_at(folder: str) -> None:
    cable(IPV4)
    ranks = start("AAB", folder, {"GRADWIRE_PORTS": "20000-20009", "GRADWIRE_INTERFACE": CABLE},
                  "--rendezvous", f"file://{folder}/meet", "--timeout-s", "40", "--elastic", "1:3", steps=500)
    used: set[int] = set()
    while any(rank.poll() is None for rank in ranks):
        used |= listening_ports("A") | listening_ports("B")
    all_right(finish(ranks, folder))
    assert len(used) >= 3, f"the ranks listened at {used} only"
    assert all(20000 <= port <= 20009 for port in used), f"the ranks listened at {sorted(used)}"


def a_cable_that_is_plugged_in_late_is_waited_for(folder: str) -> None:
    cable(IPV4)
    on("B", "link", "set", CABLE, "down")
    ranks = start("ABA", folder, {}, "--rendezvous", f"file://{folder}/meet", "--timeout-s", "40")
    time.sleep(2)
    on("B", "link", "set", CABLE, "up")
    all_right(finish(ranks, folder))


def a_cut_cable_is_an_error_within_the_deadline(folder: str) -> None:
    cable(IPV4)
    on("B", "link", "set", CABLE, "down")
    began = time.monotonic()
    ended = finish(start("AB", folder, {}, "--rendezvous", f"file://{folder}/meet", "--timeout-s", "3"),
                   folder)
    assert time.monotonic() - began < 20, "it took longer than its deadline"
    assert [code for code, _ in ended] == [1, 1], ended
    assert "rank 1" in ended[0][1], ended[0][1]
    assert "did not reach rank 0" in ended[1][1] and "10.9.0.1" in ended[1][1], ended[1][1]


FORWARDER = """
import socket, sys, threading
def copy(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
def serve(listener, address):
    while True:
        near = listener.accept()[0]
        try:
            far = socket.create_connection(address, 5)
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=copy, args=pair, daemon=True).start()
outer, inner, *ports = sys.argv[1:]
listeners = [(socket.create_server((outer, int(port))), (inner, int(port))) for port in ports]
for each in listeners:
    threading.Thread(target=serve, args=each).start()
print("forwards", flush=True)
"""


def in_a_container(folder: str, last: int, *flags: str) -> list[tuple[int, str]]:
    """Runs rank 0 at an address that other hosts cannot reach, as in a container.

    Its host forwards ports 20000 to `last` to that address. Returns the ranks' exit codes and outputs.
    """
    interface("A", "inside", "10.20.0.1/24")
    cable(IPV4)
    for host, address in {"A": "10.20.0.1", "B": "10.9.0.1"}.items():
        place = pathlib.Path(f"/etc/netns/{PREFIX}{host}")
        place.mkdir(parents=True)
        (place / "hosts").write_text(f"127.0.0.1 localhost\n{address} container\n")
    ports = [str(port) for port in range(20000, last + 1)]
    forwarder = subprocess.Popen([
        "ip", "netns", "exec", PREFIX + "A", sys.executable, "-c", FORWARDER, "10.9.0.1", "10.20.0.1", *ports
    ], stdout=subprocess.PIPE, text=True)
    try:
        assert forwarder.stdout and forwarder.stdout.readline() == "forwards\n"
        variables = {"MASTER_ADDR": "container", "MASTER_PORT": "20000", "GRADWIRE_SECRET": "s",
                     "GRADWIRE_PORTS": "20001-20005"}
        return finish(start("AB", folder, variables, *flags), folder)
    finally:
        forwarder.kill()
        forwarder.wait()


def ranks_meet_through_the_forwarded_ports_of_a_container(folder: str) -> None:
    all_right(in_a_container(folder, 20005, "--timeout-s", "40"))


def a_port_that_is_not_forwarded_is_named_within_the_deadline(folder: str) -> None:
    began = time.monotonic()
    ended = in_a_container(folder, 20000, "--timeout-s", "3")
    assert time.monotonic() - began < 20, "it took longer than its deadline"
    assert [code for code, _ in ended] == [1, 1], ended
    for rank, text in ended:
        assert "10.20.0.1 port 20001" in text, f"rank {rank}: {text}"


CASES = [
    ranks_meet_through_the_forwarded_ports_of_a_container,
    a_port_that_is_not_forwarded_is_named_within_the_deadline, docker0_is_first_on_both_hosts,
    the_same_ports_on_both_hosts_behind_docker0, a_network_that_only_one_host_has_is_first,
    an_address_that_swallows_what_is_sent_to_it_is_first, hosts_have_ipv6_only,
    loopback_has_ipv6_only,
    a_name_is_loopback_on_one_host_and_ipv6_on_the_other,
    only_the_ports_that_a_firewall_permits_are_listened_at, a_cable_that_is_plugged_in_late_is_waited_for,
    a_cut_cable_is_an_error_within_the_deadline
]


def main() -> int:
    try:
        with hosts():
            cable(IPV4)
    except (OSError, subprocess.CalledProcessError) as error:
        print("SKIPPED: this machine does not permit network namespaces:"
              f" {getattr(error, 'stderr', None) or error}")
        return 77
    failed = 0
    for case in CASES:
        if len(sys.argv) > 2 and case.__name__ not in sys.argv[2:]:
            continue
        began = time.monotonic()
        try:
            with hosts(), tempfile.TemporaryDirectory() as folder:
                case(folder)
            print(f"ok: {case.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        except (AssertionError, subprocess.CalledProcessError) as error:
            failed += 1
            print(f"FAILED: {case.__name__}: {error} {getattr(error, 'stderr', None) or ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
