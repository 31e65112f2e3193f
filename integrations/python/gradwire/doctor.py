"""python -m gradwire.doctor: shows what is installed, and tests it.

Exits with 1 and prints a remedy if the library cannot be loaded or two ranks cannot average. A framework that
is not installed or broken, or a missing GPU, is not an error.
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
from gradwire._communicator import load_nccl
from gradwire._port import reserve_port

# For each framework: the oldest tested version, and its use.
FRAMEWORKS: List[Tuple[str, Tuple[int, ...], str]] = [
    ("numpy", (1, 20), "arrays, and custom formats"),
    ("torch", (1, 13),
     "gradwire.torch: DistributedDataParallel; gradwire.fsdp and register_backend() need 2.9"),
    ("jax", (0, 8), "gradwire.jax: pmean() and compress()"),
]


def version_of(name: str) -> Optional[str]:
    """Returns a framework's version, or "broken: " with the reason; None if it is not installed."""
    try:
        version = getattr(importlib.import_module(name), "__version__", None)
    except (Exception, SystemExit) as error:  # a damaged installation can raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        return f"broken: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None if version is None else str(version)  # a folder of that name has no version


def numbers(version: str) -> Tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


def average() -> str:
    """Averages over two ranks of this process. Returns the problems; "" if there are none."""
    problems: List[str] = []

    def rank(number: int, port: int) -> None:
        try:
            values = array("f", [float(number + 1)] * 1000)  # numpy may be missing
            address, count = values.buffer_info()
            with gradwire.Communicator(f"tcp://localhost:{port}", number, 2, timeout_s=20) as comm:
                _native.call("gw_allreduce", comm._handle, address, count, _native.FLOAT32, _native.AVG,
                             b"int8", None, None)
            if max(abs(value - 1.5) for value in values) > 0.01:
                problems.append(f"rank {number}: the mean of 1 and 2 is {values[0]}, expected 1.5 within "
                                "0.01")
        except Exception as error:  # printed by main()
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
    """Returns a line about CUDA and NCCL."""
    try:
        gradwire.Communicator(device=0).close()
        missing = ""
    except gradwire.Error as error:
        missing = str(error).partition("device 0: ")[2] or str(error)
    if "no CUDA side" in missing:
        return "CUDA: the library has no CUDA side. For CUDA tensors build it, or its wheel, with nvcc"
    nccl = load_nccl()
    found = (f"NCCL {nccl}" if nccl
             else "no NCCL (needed for ranks with a GPU each: pip install 'gradwire[cuda]')")
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
        elif version.startswith("broken"):
            print(f"{name}: {version}")
        elif numbers(version) < oldest:
            print(f"{name} {version}: older than {'.'.join(map(str, oldest))}, the oldest tested version "
                  f"({use})")
        else:
            print(f"{name} {version}: {use}")
    print(cuda())
    problem = average()
    if problem:
        print(f"Two ranks over TCP on this machine: FAILED: {problem}. Possible causes: a firewall on the "
              "loopback interface, or an interposed library")
        return 1
    print("Two ranks over TCP on this machine: the mean is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
