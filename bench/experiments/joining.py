#!/usr/bin/env python3
"""Time for ranks to join, with and without a secret, in turns in one run.

    joining.py [--ranks N] [--repetitions N] [--json FILE]     N processes on this machine
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from harness import smoke  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--ports", help=argparse.SUPPRESS)
    smoke.add(parser, ranks=2, repetitions=1)
    arguments = parser.parse_args()
    smoke.need(arguments, "numpy")
    sys.path.insert(0, str(ROOT / "tests/integrations"))
    from launch import free_port, run_ranks
    if "RANK" not in os.environ:
        ports = ",".join(str(free_port()) for _ in range(2 * arguments.repetitions + 1))
        return max(
            map(abs, run_ranks(pathlib.Path(__file__), arguments.ranks, [*sys.argv[1:], "--ports", ports],
                               300)))

    import gradwire

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first, *ports = arguments.ports.split(",")
    took = {"with": [], "without": []}
    with gradwire.Communicator(f"tcp://127.0.0.1:{first}", rank, world) as everyone:
        for i, port in enumerate(ports):
            which = ("with", "without")[i % 2]
            # One start time for all ranks, after the last group's processes have become idle.
            now = everyone.broadcast_(_float64(time.time() + 0.3))
            time.sleep(max(0.0, _value(now) - time.time()))
            begin = time.perf_counter()
            group = gradwire.Communicator(f"tcp://127.0.0.1:{port}", rank, world,
                                          secret="of this run alone" if which == "with" else "")
            longest = _longest(everyone, time.perf_counter() - begin, rank, world)
            group.close()
            took[which].append(longest * 1e3)
    if rank == 0:
        for which, times in took.items():
            print(
                f"{which:7} a secret: {statistics.median(times):6.1f} ms, from {min(times):.1f} to"
                f" {max(times):.1f}"
            )
        print(f"difference: {statistics.median(took['with']) - statistics.median(took['without']):.1f} ms")
        if arguments.json:
            commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                                    check=False)
            arguments.json.write_text(json.dumps({
                "ranks": world, "cores": len(os.sched_getaffinity(0)), "commit": commit.stdout.strip(),
                "slowest_rank_ms": took}, indent=1) + "\n")
    return 0


def _float64(value):
    """Returns two float32 whose sum is the value within a millisecond."""
    import numpy as np
    high = np.float32(value)
    return np.array([high, value - float(high)], np.float32)


def _value(pair):
    return float(pair[0]) + float(pair[1])


def _longest(comm, seconds, rank, world):
    import numpy as np
    all_ranks = np.zeros(world, np.float32)
    all_ranks[rank] = seconds
    return float(comm.allreduce_(all_ranks, op="sum").max())


if __name__ == "__main__":
    sys.exit(main())
