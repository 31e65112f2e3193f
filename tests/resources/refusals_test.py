#!/usr/bin/env python3
"""Runs the command, a C program and a Python program while the system refuses memory, threads, descriptors or
disk space, at every request in turn, and memory for a while or for good from a random request on. Each run
ends with the correct result or a clean error: never by a signal, in a hang or with GW_INTERNAL.

usage: refusals_test.py GRADWIRE REFUSE_SO [--program PATH] [--package FOLDER --shared LIBGRADWIRE]
                        [--all] [--case NAME] [--kind KIND|none] [--most N] [--small N] [--bursts N] [--seed N]
"""
import argparse
import json
import os
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))
from launch import free_port  # noqa: E402
from sweep import bursts, Case, KINDS, one_line_errors, refused_or_lost, sweep  # noqa: E402

FLAGS = [
    "--data", "synthetic:64", "--batch-size", "8", "--device", "host", "--width", "128", "--depth", "1",
    "--heads", "2", "--mlp", "256", "--steps", "3", "--timeout-s", "3", "--log", "run.jsonl", "--compression",
    "powersgd:rank=2,schedule=ring", "--seed", "3"
]


def last_hash(folder, _):
    """Returns the hash of the final weights in the log, if there is one."""
    for line in reversed((folder / "run.jsonl").read_text().splitlines()):
        record = json.loads(line)
        if "parameter_hash" in record:
            return record["parameter_hash"]
    return None


def process_environments(world):
    port = str(free_port())
    return [{"RANK": str(r), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for r in range(world)]


def cases(gradwire):
    threads = [gradwire, "train", *FLAGS, "--ranks", "2", "--checkpoint", "saved"]
    single = [gradwire, "train", *FLAGS]
    elastic = [*single, "--elastic", "1:2"]
    yield Case("threads", [threads], result=last_hash, clean=one_line_errors)
    for victim in (0, 1):
        yield Case(f"processes{victim}", [single, single], victim, process_environments(2), last_hash,
                   clean=one_line_errors)
    yield Case("shard", [[*single, "--ranks", "2", "--shard", "optimizer", "--checkpoint", "saved"]],
               result=last_hash, clean=one_line_errors)
    # The result is not compared, because the surviving rank may train on other data.
    for victim in (0, 1):
        yield Case(f"elastic{victim}", [elastic, elastic], victim, process_environments(2),
                   clean=one_line_errors)


def printed(_, outputs):
    return [out for _, out, _ in outputs]


def program_cases(program):
    for name, spec in (("powersgd", "powersgd:rank=2"), ("randk", "randk:ratio=0.1"), ("int8", "int8")):
        yield Case(f"c-{name}", [[program, spec, "local"]], result=printed, later=True, clean=refused_or_lost)
    for victim in (0, 1):
        address = f"tcp://127.0.0.1:{free_port()}"
        yield Case(f"c-process{victim}",
                   [[program, "powersgd:rank=2", address, str(r)] for r in range(2)], victim, result=printed,
                   later=True, clean=refused_or_lost)


def python_cases(package, shared):
    program = str(pathlib.Path(__file__).resolve().parent / "program.py")
    environment = {"PYTHONPATH": package, "GRADWIRE_LIBRARY": shared, "PYTHONDONTWRITEBYTECODE": "1"}
    address = f"tcp://127.0.0.1:{free_port()}"
    for victim in (0, 1):
        yield Case(f"python{victim}", [[sys.executable, program, address, str(r)] for r in range(2)], victim,
                   [environment] * 2, printed, later=True, clean=one_line_errors)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gradwire")
    parser.add_argument("library")
    parser.add_argument("--program")
    parser.add_argument("--package")
    parser.add_argument("--shared")
    parser.add_argument("--all", action="store_true", default="GRADWIRE_FULL_SWEEPS" in os.environ)
    parser.add_argument("--small", type=int, help="how many small allocations to refuse")
    parser.add_argument("--bursts", type=int, help="how many random bursts to refuse in each case")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--case")
    parser.add_argument("--kind")
    parser.add_argument("--most", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("GRADWIRE_THREADS", "2")
    os.environ.setdefault("GRADWIRE_SECRET", "of the test")
    if options.bursts is None:
        options.bursts = 100 if options.all else 1
    generator = random.Random(options.seed)
    print(f"seed {options.seed}")
    failures, total = [], 0
    all_cases = list(cases(os.path.abspath(options.gradwire)))
    if options.program:
        all_cases += program_cases(os.path.abspath(options.program))
    if options.package:
        all_cases += python_cases(os.path.abspath(options.package), os.path.abspath(options.shared))
    for case in all_cases:
        if options.case and case.name != options.case:
            continue
        # There are too many small allocations to refuse each of them. They are not refused in Python, because
        # the interpreter would end the process.
        most = {
            kind: None if options.all else options.most
            for kind in ([options.kind] if options.kind else KINDS)
        }
        if "small" in most and not options.kind:
            few = 150 if options.all else 4
            most["small"] = 0 if case.name.startswith(
                "python") else options.small if options.small is not None else few
        library = os.path.abspath(options.library)
        results = [sweep(case, library, most)]
        if not case.name.startswith("python"):  # the interpreter would end the process
            results.append(bursts(case, library, options.bursts, generator))
        for counts, failed in results:
            total += sum(counts.values())
            failures += failed
    for failure in failures:
        print(failure)
    print(f"{total} refusals, {len(failures)} failures")
    return 1 if failures or total == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
