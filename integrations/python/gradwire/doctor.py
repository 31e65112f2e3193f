"""python -m gradwire.doctor: shows what is installed, and tests it; or predicts whether compression pays.

    python -m gradwire.doctor --model FILE.py:BUILD --link 1Gbit [--ranks 4] [--spec auto:error=0.1]

With --model it measures a PyTorch model on this machine, and predicts the milliseconds of a step over such
links without and with compression. BUILD() returns (model, loss): a torch.nn.Module, and a function without
arguments that runs one batch through the model and returns the loss.

Without --model it exits with 1 and prints a remedy if the library cannot be loaded or two ranks cannot
average. A framework that is not installed or broken, or a missing GPU, is not an error.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import platform
import sys
import threading
from array import array
from typing import Any, Callable, List, Optional, Tuple

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


def on_two_ranks(body: Callable[[gradwire.Communicator], Any], timeout_s: float = 600) -> List[Any]:
    """Calls body(communicator) on two threads of this process. Returns both results. Raises CommFailed."""
    results: List[Any] = [None, None]
    problems: List[str] = []

    def rank(number: int, port: int) -> None:
        try:
            with gradwire.Communicator(f"tcp://localhost:{port}", number, 2, timeout_s=timeout_s) as comm:
                results[number] = body(comm)
        except Exception as error:  # raised in the caller's thread
            problems.append(f"rank {number}: {error}")

    with contextlib.ExitStack() as stack:
        port = reserve_port(stack)
        threads = [threading.Thread(target=rank, args=(number, port)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if problems:
        raise _native.CommFailed("; ".join(problems))
    return results


def average(comm: gradwire.Communicator) -> float:
    """Averages 1 and 2 over two ranks. Returns the largest difference to the mean."""
    values = array("f", [float(comm.rank + 1)] * 1000)  # numpy may be missing
    address, count = values.buffer_info()
    _native.call("gw_allreduce", comm._handle, address, count, _native.FLOAT32, _native.AVG, b"int8", None,
                 None)
    return max(abs(value - 1.5) for value in values)


def cuda() -> str:
    """Returns a line about CUDA and NCCL."""
    try:
        gradwire.Communicator(device=0).close()
        missing = ""
    except gradwire.Error as error:
        missing = str(error).partition("device 0: ")[2] or str(error)
    if "no CUDA side" in missing:
        return ("CUDA: the library has no CUDA side. For CUDA tensors install it with nvcc on PATH and "
                "CMAKE_ARGS=-DGRADWIRE_CUDA=ON")
    nccl = load_nccl()
    found = (f"NCCL {nccl}" if nccl
             else "no NCCL (needed for ranks with a GPU each: pip install 'gradwire[cuda]')")
    return f"CUDA: the library has a CUDA side; {missing or 'device 0 works'}; {found}"


def predicts(arguments: argparse.Namespace) -> int:
    """Prints the report about --model."""
    try:
        if arguments.model is None or arguments.link is None:
            raise _native.BadArgument("--model FILE.py:BUILD and --link RATE belong together")
        from gradwire import _predict
        print(_predict.report(arguments.model, arguments.link, arguments.ranks, arguments.spec))
    except (ImportError, _native.Error) as error:
        print(f"gradwire.doctor: {error}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gradwire.doctor", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE.py:BUILD", help="the model to measure")
    parser.add_argument("--link", metavar="RATE[,DELAY]", help="each rank's: 1Gbit, 100Mbps, 10Gbit,50us")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--spec", default="auto", metavar="auto[:error=E][,allow=SPEC+SPEC...]",
                        help="the largest error of one encode (0.1), and the specs to compare")
    arguments = parser.parse_args()
    if arguments.model is not None or arguments.link is not None:
        return predicts(arguments)
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
    try:
        wrong = max(on_two_ranks(average, 20))
        problem = f"the mean of 1 and 2 is wrong by {wrong:.3g}, more than 0.01" if wrong > 0.01 else ""
    except _native.CommFailed as error:
        problem = str(error)
    if problem:
        print(f"Two ranks over TCP on this machine: FAILED: {problem}. Possible causes: a firewall on the "
              "loopback interface, or an interposed library")
        return 1
    print("Two ranks over TCP on this machine: the mean is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
