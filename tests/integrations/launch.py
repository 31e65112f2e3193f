"""Starts the ranks of a test as processes on this machine, waits for them, and ends them at a deadline."""
from __future__ import annotations

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Callable, Dict, List, Optional


def free_port() -> int:
    """A port that stays free until a rank listens there: below those that Linux gives to whoever asks for any,
    which concurrent tests do all the time."""
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
    """Returns why this PyTorch's torchrun cannot start anything, or "". Its own store asks for libuv,
    whatever USE_LIBUV says, and Debian 13's PyTorch is built without it."""
    store = ("from datetime import timedelta; from torch.distributed import TCPStore; "
             "TCPStore('127.0.0.1', 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=20))")
    tried = subprocess.run([python, "-c", store], capture_output=True, text=True, timeout=120)
    return "this PyTorch is built without libuv, which its torchrun needs" if "libuv" in tried.stderr else ""


def _for_ranks(world: int, environment: Optional[Dict[str, str]]) -> Dict[str, str]:
    """The environment that all ranks share."""
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
    """Exit codes by rank, -9 for those that had to be killed. The ranks share this process's output.
    prefix: what the command of a rank begins with, such as "ip netns exec NAME"."""
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


def fork_ranks(script: pathlib.Path, world: int, arguments: List[str], timeout_s: float, modules: List[str],
               environment: Optional[Dict[str, str]] = None) -> List[int]:
    """Like run_ranks(), but the ranks are forks of one process that has imported these modules before:
    importing PyTorch costs each rank a second otherwise."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as results:
        try:
            server = subprocess.Popen([
                sys.executable,
                str(pathlib.Path(__file__).with_name("fork_ranks.py")), ",".join(modules),
                str(timeout_s),
                str(writing),
                str(script), *arguments
            ], env=_for_ranks(world, environment), pass_fds=[writing])
        finally:
            os.close(writing)
        codes = [int(code) for code in results.read().split()]
    return codes if server.wait() == 0 and len(codes) == world else [-1] * world


def report(world: int, codes: List[int]) -> int:
    """Prints the ranks that failed. Returns the test's exit code."""
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"FAILED: rank {rank} of {world} ended with {code}")
    return 1 if any(codes) else 0


def needs_newer_pytorch(call: Callable[[], object]) -> int:
    """Expects gradwire.Unsupported, with the required version of PyTorch and this one. Returns the test's exit
    code."""
    import gradwire
    import torch
    try:
        call()
    except gradwire.Unsupported as error:
        missing = [text for text in ("2.9", torch.__version__) if text not in str(error)]
        print(f"FAILED: {missing} not in: {error}" if missing else f"PASSED: {error}")
        return 1 if missing else 0
    print(f"FAILED: PyTorch {torch.__version__} was accepted")
    return 1


def in_a_fork(body: Callable[[], None], deadline_s: float = 20) -> None:
    """Runs `body` in a forked process, which must end within the deadline. Raises AssertionError."""
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


def chosen(scenarios: List[Callable[[], None]]) -> List[Callable[[], None]]:
    """Those that the command line names, in the order of the list."""
    unknown = set(sys.argv[1:]) - {scenario.__name__ for scenario in scenarios}
    assert not unknown, f"no such scenario: {unknown}"
    return [scenario for scenario in scenarios if scenario.__name__ in sys.argv[1:]]
