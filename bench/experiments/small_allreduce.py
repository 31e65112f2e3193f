#!/usr/bin/env python3
"""A small allreduce with more ranks than cores: latency and CPU time of Gradwire and gloo, in turns.

    small_allreduce.py [--ranks N] [--kib SIZE] [--json FILE]     N processes on this machine, one thread each
"""
import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from harness import smoke  # noqa: E402

PAUSE_S = 3


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(call, calls=300):
    for _ in range(20):
        call()
    times, before = [], cpu_s()
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    cpu = (cpu_s() - before) / calls
    times.sort()
    return {
        "median_ms": statistics.median(times) * 1e3, "p95_ms": times[int(0.95 * calls)] * 1e3,
        "cpu_ms": cpu * 1e3
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2 * len(os.sched_getaffinity(0)))
    parser.add_argument("--kib", type=int, default=64, help="of FP32 per rank")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    smoke.add(parser, ranks=2, repetitions=1)
    arguments = parser.parse_args()
    smoke.need(arguments, "torch")
    if "RANK" not in os.environ:
        sys.path.insert(0, str(ROOT / "tests/integrations"))
        from launch import run_ranks
        return max(map(abs, run_ranks(pathlib.Path(__file__), arguments.ranks, sys.argv[1:], 300)))

    import torch
    import torch.distributed as dist

    import gradwire
    from gradwire.torch import communicator

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    comm = communicator()
    values = torch.ones(arguments.kib * 256)
    calls = {
        "gloo": lambda: dist.all_reduce(values), "gradwire": lambda: comm.allreduce_(values, "fp32", "avg")
    }
    found = {name: [] for name in calls}
    for _ in range(arguments.repetitions):
        for name, call in calls.items():
            dist.barrier()
            found[name].append(measure(call))
    idle = {}
    for name, call in calls.items():
        dist.barrier()
        before = cpu_s()
        if rank == 0:
            time.sleep(PAUSE_S)
        call()
        idle[name] = cpu_s() - before
    if rank == arguments.ranks - 1:
        for name, runs in found.items():
            median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(
                f"{name:9} {median['median_ms']:6.2f} ms, 95 % within {median['p95_ms']:6.2f} ms,"
                f" {median['cpu_ms']:5.2f} ms of CPU per call; waiting takes {100 * idle[name] / PAUSE_S:.1f}"
                " % of a core"
            )
        if arguments.json:
            facts = {
                "ranks": arguments.ranks, "cores": len(os.sched_getaffinity(0)), "kib": arguments.kib,
                "torch": torch.__version__, "gradwire": gradwire.__version__,
                "python": platform.python_version(),
                "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True,
                                         text=True, check=False).stdout.strip(), "repetitions": found,
                "waiting_cpu_s": {**idle, "of": PAUSE_S}
            }
            arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    dist.barrier()
    comm.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
