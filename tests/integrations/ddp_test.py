#!/usr/bin/python3
"""Tests the PyTorch hook under DistributedDataParallel: processes on this machine, Gloo process group, CPU.

usage: ddp_test.py WORLD SCENARIO...              (of ddp_ranks.py)
       ddp_test.py checkpoint WORLD LOADING...    saved by WORLD ranks, loaded by others
"""
import importlib.util
import pathlib
import sys
import tempfile
from typing import List

import launch

MODULES = ["torch", "torchvision"]


def ranks(world: int, scenarios: List[str], **environment: str) -> int:
    script = pathlib.Path(__file__).with_name("ddp_ranks.py")
    return launch.report(world, launch.fork_ranks(script, world, scenarios, 500, MODULES, environment))


def checkpoint(world: int, loading: List[int]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        failed = ranks(world, ["saves"], DDP_FOLDER=folder)
        for other in loading:
            failed = failed or ranks(other, ["loads"], DDP_FOLDER=folder)
    return failed


def main() -> int:
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            sys.exit(
                f"FAILED: no module named {module}. This test needs Debian's python3-torch and"
                f" python3-torchvision, run by /usr/bin/python3; this is {sys.executable}."
            )
    if sys.argv[1] == "checkpoint":
        return checkpoint(int(sys.argv[2]), [int(world) for world in sys.argv[3:]])
    return ranks(int(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
