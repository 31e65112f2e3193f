#!/usr/bin/python3
"""torch.distributed on gradwire.torch.Backend: processes on this machine, CPU.

usage: backend_test.py WORLD SCENARIO...    scenarios of backend_ranks.py
       backend_test.py old                  the error on a PyTorch that takes no process groups in Python
"""
from __future__ import annotations

import pathlib
import sys

try:
    import torch
except ImportError as error:
    sys.exit(f"FAILED: {error}. This test needs PyTorch; this is {sys.executable}.")

import launch


def old() -> int:
    import gradwire
    from gradwire.torch import register_backend
    try:
        register_backend()
    except gradwire.Unsupported as error:
        missing = [text for text in ("2.9", torch.__version__) if text not in str(error)]
        print(f"FAILED: {missing} not in: {error}" if missing else f"PASSED: {error}")
        return 1 if missing else 0
    print(f"FAILED: PyTorch {torch.__version__} was accepted")
    return 1


def main() -> int:
    if sys.argv[1] == "old":
        return old()
    world = int(sys.argv[1])
    codes = launch.run_ranks(
        pathlib.Path(__file__).with_name("backend_ranks.py"), world, sys.argv[2:], timeout_s=400)
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"FAILED: rank {rank} of {world} ended with {code}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
