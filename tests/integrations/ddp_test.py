#!/usr/bin/python3
"""The PyTorch hook under DistributedDataParallel: processes on this machine, Gloo process group, CPU.

usage: ddp_test.py WORLD SCENARIO...    (of ddp_ranks.py)
"""
import pathlib
import sys

try:
    import torch  # noqa: F401
    import torchvision  # noqa: F401
except ImportError as error:
    sys.exit(f"FAILED: {error}. This test needs Debian's python3-torch and python3-torchvision, run by /usr/bin/python3; "
             f"this is {sys.executable}.")

import launch


def main() -> int:
    world, scenarios = int(sys.argv[1]), sys.argv[2:]
    script = pathlib.Path(__file__).with_name("ddp_ranks.py")
    codes = launch.run_ranks(script, world, scenarios, timeout_s=500)
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"FAILED: rank {rank} of {world} ended with {code}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
