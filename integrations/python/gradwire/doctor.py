"""python -m gradwire.doctor: what is installed, and whether it works here.

Ends with 1 and a remedy if the library cannot be loaded or two ranks cannot average. Frameworks that are not installed
are no error, nor is a missing GPU.
"""
from __future__ import annotations

import contextlib
import importlib
import platform
import sys
import threading
from array import array
from typing import List, Optional, Tuple

import gradwire
from gradwire import _native
from gradwire._port import reserve_port

# Of each framework: the oldest version that the tests run with, and what it is for.
FRAMEWORKS: List[Tuple[str, Tuple[int, ...], str]] = [
    ("numpy", (1, 20), "arrays, and formats of your own"),
    ("torch", (1, 13), "gradwire.torch: DistributedDataParallel; gradwire.fsdp and register_backend() from 2.9 on"),
    ("jax", (0, 8), "gradwire.jax: pmean() and compress()"),
]


def version_of(name: str) -> Optional[str]:
    """None where it is not installed."""
    try:
        version = getattr(importlib.import_module(name), "__version__", None)
    except ImportError:
        return None
    return None if version is None else str(version)  # a folder of that name is no framework


def numbers(version: str) -> Tuple[int, ...]:
    parts = []
    for part in version.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)


def average() -> str:
    """What is wrong when two ranks of this process average; "" for nothing."""
    problems: List[str] = []

    def rank(number: int, port: int) -> None:
        try:
            values = array("f", [float(number + 1)] * 1000)  # numpy need not be there
            address, count = values.buffer_info()
            with gradwire.Communicator(f"tcp://127.0.0.1:{port}", number, 2, timeout_s=20) as comm:
                _native.call("gw_allreduce", comm._handle, address, count, _native.FLOAT32, _native.AVG, b"int8", None)
            if max(abs(value - 1.5) for value in values) > 0.01:
                problems.append(f"rank {number} got {values[0]} as the mean of 1 and 2")
        except Exception as error:  # said by main()
            problems.append(f"rank {number}: {error}")

    with contextlib.ExitStack() as stack:
        port = reserve_port(stack)
        threads = [threading.Thread(target=rank, args=(number, port)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return "; ".join(problems)


def cuda() -> str:
    """What of CUDA is here."""
    try:
        gradwire.Communicator(device=0).close()
        missing = ""
    except gradwire.Error as error:
        missing = str(error).partition("device 0: ")[2] or str(error)
    if "no CUDA side" in missing:
        return "CUDA: the library has no CUDA side; for CUDA tensors build it, or its wheel, with nvcc"
    nccl = _native.load_nccl()
    found = f"NCCL {nccl}" if nccl else "no NCCL, which ranks with a GPU each need: pip install 'gradwire[cuda]'"
    return f"CUDA: the library has a CUDA side; {missing or 'device 0 works'}; {found}"


def main() -> int:
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    try:
        gradwire.Communicator().close()  # loads the library
    except ImportError as error:
        print(f"gradwire {_native.__version__}: {error}")
        return 1
    print(f"gradwire {_native.__version__}; library {_native.library_version}: {_native.library_path}")
    for name, oldest, use in FRAMEWORKS:
        version = version_of(name)
        if version is None:
            print(f"{name}: not installed ({use})")
        elif numbers(version) < oldest:
            print(f"{name} {version}: older than {'.'.join(map(str, oldest))}, the oldest that is tested ({use})")
        else:
            print(f"{name} {version}: {use}")
    print(cuda())
    problem = average()
    if problem:
        print(f"Two ranks over TCP on this machine: FAILED: {problem}. A firewall on the loopback interface, or an "
              "interposed library, can cause this")
        return 1
    print("Two ranks over TCP on this machine: the mean is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
