#!/usr/bin/env python3
"""Tests Ctrl-C in every blocking call.

KeyboardInterrupt is raised within seconds, although other ranks never connect and deadlines are half an hour.
The process then exits without a further signal.
"""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

LONGEST_S = 20  # on a busy machine; the calls wait for half an hour

# The setup of both ranks, for calls that only rank 0 of two ranks makes.
MEET = (
    "comm = gradwire.Communicator(meeting, rank, 2, shrinkable=True)\nx = numpy.ones(1000, numpy.float32)\n"
)
CASES = {
    "create_tcp_rank_0": ("", "gradwire.Communicator(meeting_tcp, 0, 2)"),
    "create_tcp_rank_1": ("", "gradwire.Communicator(meeting_tcp, 1, 2)"),
    "create_file_rank_0": ("", "gradwire.Communicator(meeting, 0, 2)"),
    "create_file_rank_1": ("", "gradwire.Communicator(meeting, 1, 2)"),
    "create_local": ("", "gradwire.Communicator('local://x', 0, 2)"),
    "allreduce": (MEET, "comm.allreduce_(x)"),
    "allreduce_residual": (MEET,
                           "comm.allreduce_(x, 'int8', residual=numpy.zeros(1000, numpy.float32), tag='x')"),
    "reduce_scatter": (MEET, "comm.reduce_scatter(x[:500].copy(), x)"),
    "all_gather": (MEET, "comm.all_gather(x, x[:500].copy())"),
    "all_gather_update": (MEET, "comm.all_gather_update(x, x[:500].copy())"),
    "broadcast": (MEET, "comm.broadcast_(x, root=1)"),
    "request": (MEET, "comm.start(comm.allreduce_, x).wait()"),
    "reducer": (MEET, "gradwire.Reducer(comm, 'powersgd:rank=1', [('a', 10, 100)])"),
    "reducer_allreduce": (MEET + "r = gradwire.Reducer(comm, 'int8', [('a', 10, 100)])\n",
                          "r.allreduce([x])"),
    "split": (MEET, "comm.split(0)"),
    "shrink": (MEET, "comm.shrink(timeout_s=1800)"),
    "grow_on_rank_1": (MEET.replace("rank, 2", "1 - rank, 2") + "comm.admit(4)\n", "comm.grow()"),
    "join": (MEET + "comm.admit(4)\n", "gradwire.Communicator.join(comm.invitation())"),
}


def rank_program(case: str, rank: int, folder: str) -> str:
    both, alone = CASES[case]
    return f"""
import os, sys, time, numpy, gradwire
rank, meeting, meeting_tcp = {rank}, "file://{folder}/meeting", "tcp://127.0.0.1:{port()}"
{both}
print("ready", flush=True)
if rank == 1:
    time.sleep(1800)
try:
    {alone}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(3)
print("returned", flush=True)
"""


def port() -> int:
    import launch
    return launch.free_port()


def main() -> int:
    failures, running = [], []
    environment = {**os.environ, "GRADWIRE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for case, (both, _) in CASES.items():
            own = pathlib.Path(folder) / case
            own.mkdir()
            ranks = [
                subprocess.Popen([sys.executable, "-c", rank_program(case, r, str(own))], env=environment,
                                 text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for r in range(2 if both else 1)
            ]
            running.append((case, ranks))
        try:
            for case, ranks in running:
                for r in ranks:
                    assert r.stdout.readline() == "ready\n", r.stderr.read()
            time.sleep(1)  # time for the ranks to reach the blocking call
            for case, ranks in running:
                if ranks[0].poll() is not None:
                    failures.append(f"{case}: did not wait: {ranks[0].stderr.read()[-500:]}")
                ranks[0].send_signal(signal.SIGINT)
            begin = time.monotonic()
            for case, ranks in running:
                try:
                    out, error = ranks[0].communicate(timeout=max(1, begin + LONGEST_S - time.monotonic()))
                except subprocess.TimeoutExpired:
                    failures.append(f"{case}: still there {LONGEST_S} s after the signal")
                    continue
                print(f"{case}: ended {time.monotonic() - begin:.1f} s after the first signal")
                if out != "interrupted\n" or ranks[0].returncode != 3:
                    failures.append(f"{case}: code {ranks[0].returncode}, {out!r}, {error[-500:]}")
        finally:
            for _, ranks in running:
                for r in ranks:
                    r.kill()
                    r.communicate()
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
