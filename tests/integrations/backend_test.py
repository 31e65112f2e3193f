#!/usr/bin/python3
"""torch.distributed on gradwire.torch.Backend: processes on this machine, CPU.

usage: backend_test.py WORLD SCENARIO...    scenarios of backend_ranks.py
       backend_test.py old                  the error on a PyTorch without process groups in Python
"""
from __future__ import annotations

import pathlib
import sys

import launch


def main() -> int:
    if sys.argv[1] == "old":
        from gradwire.torch import register_backend
        return launch.needs_newer_pytorch(register_backend)
    world = int(sys.argv[1])
    script = pathlib.Path(__file__).with_name("backend_ranks.py")
    return launch.report(world, launch.run_ranks(script, world, sys.argv[2:], timeout_s=400))


if __name__ == "__main__":
    sys.exit(main())
