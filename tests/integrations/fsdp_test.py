#!/usr/bin/python3
"""Tests gradwire.fsdp on models sharded with FSDP2: processes on this machine, Gloo process group, CPU.

usage: fsdp_test.py WORLD SCENARIO...    scenarios of fsdp_ranks.py
       fsdp_test.py reshape              saved by 4 ranks, loaded by 2, 8 and 4 with another mesh
       fsdp_test.py low_rank_meshes      PowerSGD's state, saved by 2 x 2 ranks, loaded by other meshes
       fsdp_test.py old                  the error on a PyTorch without FSDP2
"""
from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Dict, List

try:
    import torch
except ImportError as error:
    sys.exit(f"FAILED: {error}. This test needs PyTorch; this is {sys.executable}.")

import launch


def ranks(world: int, scenarios: List[str], **environment: str) -> int:
    script = pathlib.Path(__file__).with_name("fsdp_ranks.py")
    return launch.report(world, launch.run_ranks(script, world, scenarios, 500, environment))


def low_rank_meshes() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        failed |= ranks(4, ["saves_low_rank_for_another_mesh"], FSDP_FOLDER=folder, FSDP_REPLICAS="2")
        for world, replicas in ((2, 2), (2, 1), (4, 4), (8, 4)):
            failed = failed or ranks(world, ["loads_low_rank_from_another_mesh"], FSDP_FOLDER=folder,
                                     FSDP_REPLICAS=str(replicas))
    return failed


def reshape() -> int:
    failed = 0
    for mesh, worlds in (("", (2, 8)), ("hsdp", (2, 4))):
        with tempfile.TemporaryDirectory() as folder:
            environment: Dict[str, str] = {"FSDP_FOLDER": folder, "FSDP_MESH": mesh}
            failed |= ranks(4, ["saves_for_another_number_of_ranks"], **environment)
            for world in worlds:
                failed = failed or ranks(world, ["loads_from_another_number_of_ranks"], **environment)
    return failed


def main() -> int:
    if sys.argv[1] == "old":
        from gradwire.fsdp import compress
        return launch.needs_newer_pytorch(lambda: compress(torch.nn.Linear(2, 2)))
    if sys.argv[1] == "reshape":
        return reshape()
    if sys.argv[1] == "low_rank_meshes":
        return low_rank_meshes()
    return ranks(int(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
