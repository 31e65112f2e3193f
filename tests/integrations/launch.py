"""Starts the ranks of a test as processes on this machine, waits for them, and ends them at a deadline."""
from __future__ import annotations

import importlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional

HERE = pathlib.Path(__file__).resolve().parent


def free_port() -> int:
    """Returns a port that is likely to stay free until a rank listens there.

    The port is below the ephemeral ports of Linux, which concurrent tests use.
    """
    handed_out = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10000, max(handed_out, 20000))
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue


def torchrun_obstacle(python: str = sys.executable) -> str:
    """Returns why this PyTorch's torchrun cannot start ranks, or "".

    torchrun's store requires libuv even if USE_LIBUV is 0. Debian 13 builds PyTorch without libuv.
    """
    store = ("from datetime import timedelta; from torch.distributed import TCPStore; "
             "TCPStore('127.0.0.1', 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=20))")
    tried = subprocess.run([python, "-c", store], capture_output=True, text=True, timeout=120)
    return "this PyTorch is built without libuv, which its torchrun needs" if "libuv" in tried.stderr else ""


def _for_ranks(world: int, environment: Optional[Dict[str, str]]) -> Dict[str, str]:
    """Returns the environment that all ranks share."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        # One thread per rank, because the ranks share the machine's cores.
        "OMP_NUM_THREADS": "1",
        "GRADWIRE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **(environment or {})
    }


def run_ranks(script: pathlib.Path, world: int, arguments: List[str], timeout_s: float,
              environment: Optional[Dict[str, str]] = None,
              prefix: Callable[[int], List[str]] = lambda rank: []) -> List[int]:
    """Runs the ranks, and kills them at the deadline. Returns the exit codes by rank, -9 for killed ranks.

    The ranks share this process's output. `prefix` returns the start of a rank's command, such as
    "ip netns exec NAME".
    """
    shared = _for_ranks(world, environment)
    ranks = [
        subprocess.Popen(
            [*prefix(rank), sys.executable, str(script), *arguments], env={**shared, "RANK": str(rank)})
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        while any(r.poll() is None for r in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for r in ranks:
            if r.poll() is None:
                r.kill()
    return [r.wait() for r in ranks]


def import_for_rank(name: str, rank: int, world: int) -> Any:
    """Imports a module of this folder, and the modules that it imports from here, for this rank.

    Modules that were imported for another rank are imported again, because they may depend on RANK.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    for found, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and pathlib.Path(file).parent == HERE and found not in ("__main__", "scenarios", "launch"):
            del sys.modules[found]
    return importlib.import_module(name)


def fork_ranks(world: int, body: Callable[[int], int], timeout_s: float) -> List[int]:
    """Runs body(rank) in forks of this process, which saves a second per rank for the import of PyTorch.

    A fork ends like a program, by SystemExit with the code that body returns, so with and finally blocks
    around this call also end in the forks. Forks are killed at the deadline, and 30 s after the failure of a
    rank, for which others may wait. Returns the exit codes by rank.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    sys.stdout.flush()
    pids: List[int] = []
    for rank in range(world):
        pids.append(os.fork())
        if pids[-1] == 0:
            sys.exit(body(rank))
    codes: Dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < world:
        for rank, pid in enumerate(pids):
            if rank in codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + 30) if codes[rank] else deadline
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[rank] for rank in range(world)]


def report(world: int, codes: List[int]) -> int:
    """Prints the ranks that failed. Returns the test's exit code."""
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"FAILED: rank {rank} of {world} ended with {code}")
    return 1 if any(codes) else 0


def in_a_fork(body: Callable[[], None], deadline_s: float = 20) -> None:
    """Runs `body` in a forked process. Raises AssertionError if it fails or exceeds the deadline."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + deadline_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the forked process ended with status {status}"
            return
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the forked process hung for {deadline_s} s")
        time.sleep(0.02)
