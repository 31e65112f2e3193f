#!/usr/bin/env python3
"""Tests Ctrl-C in every blocking call.

KeyboardInterrupt is raised within seconds, although other ranks never connect and deadlines are half an hour.
The process then exits without a further signal. Each rank is a fork of this process.
"""
from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List

import gradwire
import launch
import numpy

LONGEST_S = 20  # on a busy machine; the calls wait for half an hour
Start = Callable[[int, str], Callable[[], Any]]  # (rank, folder): prepares, and returns the blocking call


def x(count: int = 1000) -> numpy.ndarray:
    return numpy.ones(count, numpy.float32)


def create(rank: int, meeting: str) -> Start:
    return lambda _, folder: lambda: gradwire.Communicator(
        meeting.format(folder=folder, port=launch.free_port()), rank, 2)


def connected(call: Callable[[gradwire.Communicator], Any], first: int = 0, admit: int = 0) -> Start:
    """Returns a call of rank `first` of 2 connected ranks, of which the other does not make the call."""
    def start(rank: int, folder: str) -> Callable[[], Any]:
        comm = gradwire.Communicator(f"file://{folder}/meeting", rank ^ first, 2, shrinkable=True)
        if admit:
            comm.admit(admit)
        return lambda: call(comm)
    return start


def reducer(rank: int, folder: str) -> Callable[[], Any]:
    comm = gradwire.Communicator(f"file://{folder}/meeting", rank, 2)
    made = gradwire.Reducer(comm, "int8", [("a", 10, 100)])
    return lambda: made.allreduce([x()])


ALONE: Dict[str, Start] = {
    "create_tcp_rank_0": create(0, "tcp://127.0.0.1:{port}"),
    "create_tcp_rank_1": create(1, "tcp://127.0.0.1:{port}"),
    "create_file_rank_0": create(0, "file://{folder}/meeting"),
    "create_file_rank_1": create(1, "file://{folder}/meeting"),
    "create_local": create(0, "local://x"),
}
BOTH: Dict[str, Start] = {
    "allreduce": connected(lambda comm: comm.allreduce_(x())),
    "allreduce_residual": connected(lambda comm: comm.allreduce_(x(), "int8", residual=0 * x(), tag="x")),
    "reduce_scatter": connected(lambda comm: comm.reduce_scatter(x(500), x())),
    "all_gather": connected(lambda comm: comm.all_gather(x(), x(500))),
    "all_gather_update": connected(lambda comm: comm.all_gather_update(x(), x(500))),
    "broadcast": connected(lambda comm: comm.broadcast_(x(), root=1)),
    "request": connected(lambda comm: comm.start(comm.allreduce_, x()).wait()),
    "reducer": connected(lambda comm: gradwire.Reducer(comm, "powersgd:rank=1", [("a", 10, 100)])),
    "reducer_allreduce": reducer,
    "split": connected(lambda comm: comm.split(0)),
    "shrink": connected(lambda comm: comm.shrink(timeout_s=1800)),
    "grow_on_rank_1": connected(lambda comm: comm.grow(), first=1, admit=4),
    "join": connected(lambda comm: gradwire.Communicator.join(comm.invitation()), admit=4),
}


def run_rank(start: Start, rank: int, folder: str) -> None:
    """Makes the call on rank 0, and ends with code 3 after KeyboardInterrupt."""
    call = start(rank, folder)
    open(f"{folder}/ready{rank}", "w").close()
    if rank == 1:
        time.sleep(1800)
    try:
        call()
    except KeyboardInterrupt:
        sys.exit(3)


def main() -> int:
    os.environ.update(GRADWIRE_THREADS="1")
    codes: Dict[str, int] = {}
    running: Dict[str, List[int]] = {}
    folder = tempfile.mkdtemp()
    for case, start in {**ALONE, **BOTH}.items():
        os.mkdir(f"{folder}/{case}")
        running[case] = []
        for rank in range(2 if case in BOTH else 1):
            running[case].append(os.fork())
            if running[case][-1] == 0:
                run_rank(start, rank, f"{folder}/{case}")
                os._exit(0)
    try:
        deadline = time.monotonic() + 100
        while not all(os.path.exists(f"{folder}/{case}/ready{rank}")
                      for case, ranks in running.items() for rank in range(len(ranks))):
            assert time.monotonic() < deadline, "ranks do not connect"
            time.sleep(0.05)
        time.sleep(2)  # time for the ranks to reach the blocking call
        for ranks in running.values():
            os.kill(ranks[0], signal.SIGINT)
        deadline = time.monotonic() + LONGEST_S
        while len(codes) < len(running) and time.monotonic() < deadline:
            for case, ranks in running.items():
                if case not in codes and (ended := os.waitpid(ranks[0], os.WNOHANG))[0]:
                    codes[case] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.02)
    finally:
        for case, ranks in running.items():
            for pid in ranks[1 if case in codes else 0:]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        shutil.rmtree(folder)
    bad = {case: codes.get(case, "still there") for case in running if codes.get(case) != 3}
    print(f"FAILED: {bad}" if bad else f"{len(codes)} calls were interrupted")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
