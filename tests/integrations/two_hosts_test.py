#!/usr/bin/python3
"""Tests ranks on two hosts, and a process group of some ranks: all ranks connect, also without MASTER_ADDR.

The hosts are two network namespaces with a cable between them, in which the machine's name resolves to an
address that leads nowhere, as 127.0.1.1 does on Debian. Exits with 77 (skipped) if this process may not
create network namespaces.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import hosts_test
import launch

HOST_OF_RANK = "ABA"
ADDRESS = {"A": "10.213.77.1", "B": "10.213.77.2"}


def rank(number: int) -> None:
    import socket
    import torch
    import torch.distributed as dist
    import gradwire
    from gradwire.torch import communicator

    # the interface for Gloo
    os.environ.update(GLOO_SOCKET_IFNAME=next(name for _, name in socket.if_nameindex() if name != "lo"))
    socket.gethostname = lambda: "localhost"  # the name of both hosts, with a different address on each
    if sys.argv[1] == "env://":
        dist.init_process_group("gloo")
    else:
        os.environ.pop("MASTER_ADDR")
        dist.init_process_group("gloo", init_method=sys.argv[1], rank=number, world_size=3)
    everybody = communicator(timeout_s=20)
    assert float(gradwire.allreduce_(torch.full((3,), float(number)), comm=everybody)[0]) == 1
    group = dist.new_group([1, 2])  # the group's rank 0 is not at MASTER_ADDR
    if number > 0:
        part = communicator(group, timeout_s=20)
        assert (part.rank, part.world) == (number - 1, 2)
        assert float(gradwire.allreduce_(torch.full((3,), float(number)), comm=part)[0]) == 1.5
        part.close()
    dist.barrier()
    everybody.close()
    dist.destroy_process_group()


def main() -> int:
    if "RANK" in os.environ:
        rank(int(os.environ["RANK"]))
        return 0
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hosts_test.hosts())
            hosts_test.cable({host: f"{address}/24" for host, address in ADDRESS.items()})
        except (OSError, subprocess.CalledProcessError) as error:
            print("SKIPPED: this machine does not permit network namespaces:"
                  f" {getattr(error, 'stderr', None) or error}")
            return 77
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for init in ("env://", f"tcp://{ADDRESS['A']}:{launch.free_port()}", f"file://{folder}/store"):
            codes = launch.run_ranks(pathlib.Path(__file__), 3, [init], 60, {"MASTER_ADDR": ADDRESS["A"]},
                                     lambda r: ["ip", "netns", "exec", hosts_test.PREFIX + HOST_OF_RANK[r]])
            if any(codes):
                print(f"FAILED: the ranks of {init} ended with {codes}")
                return 1
    print("3 ranks on 2 hosts, and a group without global rank 0: each found the others")
    return 0


if __name__ == "__main__":
    sys.exit(main())
