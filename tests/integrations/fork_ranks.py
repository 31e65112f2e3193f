"""Forks the ranks of a test after importing what all of them import; launch.fork_ranks() starts it.

usage: fork_ranks.py MODULE,MODULE... TIMEOUT_S RESULTS SCRIPT ARGUMENT...

RESULTS: a file descriptor for the ranks' exit codes, separated by spaces. Each rank has RANK in its
    environment, and runs Python's exit handlers.
"""
from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import time
from typing import Dict


def wait(pids: Dict[int, int], timeout_s: float) -> Dict[int, int]:
    """Waits for the ranks' processes, and kills them at the deadline. Returns the exit code of each rank."""
    deadline, codes = time.monotonic() + timeout_s, {}
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return codes


def main() -> None:
    modules, timeout_s, results, script, *arguments = sys.argv[1:]
    for module in modules.split(","):
        importlib.import_module(module)
    pids = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            os.close(int(results))
            os.environ["RANK"] = str(rank)
            sys.argv = [script, *arguments]
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
            return
    codes = wait(pids, float(timeout_s))
    os.write(int(results), " ".join(str(codes[rank]) for rank in sorted(codes)).encode())


if __name__ == "__main__":
    main()
