#!/usr/bin/env python3
"""Runs the command, a C program and a Python program while the system refuses memory, threads, descriptors or
disk space, at every request in turn, and memory for a while or for good from a random request on (refuse.c).
Each run ends with the correct result or a clean error: never by a signal, in a hang or with GW_INTERNAL.

usage: refusals_test.py GRADWIRE REFUSE_SO [--program PATH] [--package FOLDER --shared LIBGRADWIRE]
                        [--all] [--case NAME] [--kind KIND] [--most N] [--small N] [--bursts N] [--seed N]
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import typing

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integrations"))
from launch import free_port  # noqa: E402

KINDS = ("malloc", "small", "mmap", "thread", "eventfd", "socket", "accept", "open", "write", "sync",
         "rename")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK",
             "PMI_SIZE")
LIMIT_S = 60  # a longer run is a hang: the programs' deadlines are a few seconds
CRASHES = re.compile(
    r"terminate called|Sanitizer|corrupted|runtime error:|GW_INTERNAL|unaligned tcache|free\(\)")
FLAGS = [
    "--data", "synthetic:64", "--batch-size", "8", "--device", "host", "--width", "128", "--depth", "1",
    "--heads", "2", "--mlp", "256", "--steps", "3", "--timeout-s", "3", "--log", "run.jsonl", "--compression",
    "powersgd:rank=2,schedule=ring", "--seed", "3"
]


def last_hash(folder, _):
    """Returns the hash of the final weights in the log, if there is one."""
    records = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    return ([r["parameter_hash"] for r in records if "parameter_hash" in r] or [None])[-1]


def printed(_, outputs):
    return [out for _, out, _ in outputs]


def one_line_errors(outputs):
    """Returns the problem unless a failing process prints the reason in one line, apart from warnings."""
    for code, _, err in outputs:
        lines = err.splitlines()
        if code != 0 and not (lines and lines[-1].startswith("gradwire: ")):
            return f"code {code} without an error's line"
        if any(not line.startswith("gradwire: ") for line in lines):
            return "lines that are not Gradwire's"
    return ""


def refused_or_lost(outputs):
    """As one_line_errors(). The last line must have a status for a refused resource or a lost rank."""
    for code, _, err in outputs:
        last = (err.splitlines() or [""])[-1]
        if code != 0 and not re.search("GW_NO_MEMORY|GW_COMM_FAILED|rank [01]: $", last):
            return f"another status: {last}"
    return one_line_errors(outputs)


class Case(typing.NamedTuple):
    """A program, as the commands of its processes. Requests of the process `victim` are refused.

    Attributes:
        result: (folder, [(code, stdout, stderr)]) -> a value that is equal in every successful run.
        later: requests count from the program's call of refuse_begin().
        clean: returns what is wrong with the outputs of a failed run, or "".
    """
    name: str
    commands: list
    victim: int = 0
    environments: tuple = ({}, {})
    result: typing.Callable = lambda folder, outputs: None
    later: bool = False
    clean: typing.Callable = one_line_errors


def cases(options):
    gradwire, shared = os.path.abspath(options.gradwire), {"later": True, "result": printed}
    single = [gradwire, "train", *FLAGS]
    elastic, checkpoint = [*single, "--elastic", "1:2"], ["--ranks", "2", "--checkpoint", "saved"]
    port, address = str(free_port()), f"tcp://127.0.0.1:{free_port()}"
    ranks = tuple({"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                  for r in range(2))
    yield Case("threads", [[*single, *checkpoint]], result=last_hash)
    yield Case("shard", [[*single, "--shard", "optimizer", *checkpoint]], result=last_hash)
    for victim in (0, 1):
        yield Case(f"processes{victim}", [single, single], victim, ranks, last_hash)
        # The result is not compared, because the surviving rank may train on other data.
        yield Case(f"elastic{victim}", [elastic, elastic], victim, ranks)
    program = os.path.abspath(options.program) if options.program else None
    for name, spec in (("powersgd", "powersgd:rank=2"), ("randk", "randk:ratio=0.1"), ("int8", "int8")):
        if program:
            yield Case(f"c-{name}", [[program, spec, "local"]], clean=refused_or_lost, **shared)
    for victim in (0, 1):
        if program:
            commands = [[program, "powersgd:rank=2", address, str(r)] for r in range(2)]
            yield Case(f"c-process{victim}", commands, victim, clean=refused_or_lost, **shared)
        if options.package:
            environment = {"PYTHONPATH": os.path.abspath(options.package), "PYTHONDONTWRITEBYTECODE": "1",
                           "GRADWIRE_LIBRARY": os.path.abspath(options.shared)}
            yield Case(f"python{victim}", [[sys.executable, str(HERE / "program.py"), address, str(r)]
                                           for r in range(2)], victim, (environment,) * 2, **shared)


class Outcome(typing.NamedTuple):
    """What: right, error, crash, hang, unclean or wrong. Seen: the number of requests by kind."""
    what: str
    detail: str
    refused: bool
    seen: dict
    result: typing.Any


def run(case, library, kind, at):
    """Runs the program once, with request `at` of `kind` refused."""
    with tempfile.TemporaryDirectory(prefix="gradwire-refuse-", ignore_cleanup_errors=True) as name:
        folder, processes = pathlib.Path(name), []
        log = folder / "refused"
        for i, command in enumerate(case.commands):
            environment = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
            environment.update(case.environments[i])
            # Memory of 64 KiB or more is unmapped when it is freed, so that a write after free crashes.
            environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")
            if i == case.victim:
                environment.update(LD_PRELOAD=library, GRADWIRE_REFUSE=f"{kind}:{at}",
                                   GRADWIRE_REFUSE_LOG=str(log),
                                   **({"GRADWIRE_REFUSE_LATER": "1"} if case.later else {}))
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE,
                                              stderr=subprocess.PIPE, text=True, errors="replace"))
        texts = [None] * len(processes)

        def collect(i):
            texts[i] = processes[i].communicate()

        threads = [threading.Thread(target=collect, args=(i,)) for i in range(len(processes))]
        for thread in threads:
            thread.start()
        threads[0].join(LIMIT_S)
        for thread in threads[1:]:
            thread.join(LIMIT_S if not threads[0].is_alive() else 0.1)
        hung = [process for process, thread in zip(processes, threads) if thread.is_alive()]
        for process in hung:
            process.kill()
        for thread in threads:
            thread.join()
        outputs = [(p.returncode, *text) for p, text in zip(processes, texts)]
        lines = log.read_text().splitlines() if log.exists() else []
        what, detail, result = "right", "\n".join(f"[{i}] code {code}: {out[-300:]} | {err[-1500:]}"
                                                  for i, (code, out, err) in enumerate(outputs)), None
        if hung:
            what = "hang"
        elif any(code < 0 or code > 2 or CRASHES.search(out + err) for code, out, err in outputs):
            what = "crash"
        elif any(code != 0 for code, _, _ in outputs):
            wrong = case.clean(outputs)
            what, detail = ("unclean", f"{wrong}: {detail}") if wrong else ("error", detail)
        else:
            result = case.result(folder, outputs)
        return Outcome(what, detail, any(line.startswith("refused") for line in lines),
                       {line.split()[1]: int(line.split()[2]) for line in lines if line.startswith("seen")},
                       result)


def chosen(count, most):
    """Returns at most `most` of 1 .. count, spread evenly, including the first and the last."""
    if count <= most:
        return range(1, count + 1)
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)}) if most > 1 else [1][:most]


def points(kind, count, some, bursts, generator):
    """Returns the requests to refuse: each in one run, and with all later requests in another (+).

    some: if not None, this number of requests, alternately alone and with all later requests. bursts: the
    number of random runs of 5 or more small requests, or of all from a random one on.
    """
    if some is None:
        found = [f"{at}{then}" for at in range(1, count + 1) for then in ("", "+")]
    else:
        found = [f"{at}{'+' if i % 2 else ''}" for i, at in enumerate(chosen(count, some))]
    for _ in range(bursts if kind == "small" and count else 0):
        first = generator.randint(1, count)
        found.append(f"{first}" + generator.choice(
            ["+", f"-{first + 4}", f"-{first + generator.randint(5, 500)}"]))
    return found


def sweep(case, library, most, bursts, generator):
    """Refuses requests of each kind in `most`, which has their numbers. Returns (runs, failures)."""
    first = run(case, library, "none", 0)
    if first.what != "right":
        return 0, [f"{case.name}: fails by itself: {first.detail}"]
    total, failures = 0, []
    for kind, some in most.items():
        count, found = first.seen.get(kind, 0), collections.Counter()
        for at in points(kind, count, some, bursts, generator):
            outcome = run(case, library, kind, at)
            if not outcome.refused:
                continue
            what, detail = outcome.what, outcome.detail
            if what == "right" and outcome.result != first.result:
                what, detail = "wrong", f"{outcome.result} instead of {first.result}"
            found[what] += 1
            if what not in ("right", "error"):
                failures.append(f"{case.name}: {kind} {at} of {count}: {what}: {detail}")
        total += found.total()
        if count > 0:
            print(f"{case.name:12} {kind:8} {found.total():5} of {count:5} " +
                  " ".join(f"{what} {c}" for what, c in sorted(found.items())), flush=True)
    return total, failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gradwire")
    parser.add_argument("library", type=os.path.abspath)
    for option in ("--program", "--package", "--shared", "--case", "--kind"):
        parser.add_argument(option)
    parser.add_argument("--all", action="store_true", default="GRADWIRE_FULL_SWEEPS" in os.environ)
    parser.add_argument("--small", type=int, help="how many small allocations to refuse")
    parser.add_argument("--bursts", type=int, help="how many random bursts to refuse in each case")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--most", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("GRADWIRE_THREADS", "2")
    os.environ.setdefault("GRADWIRE_SECRET", "of the test")
    generator, failures, total = random.Random(options.seed), [], 0
    print(f"seed {options.seed}")
    bursts = options.bursts if options.bursts is not None else 100 if options.all else 1
    for case in cases(options):
        if options.case and case.name != options.case:
            continue
        most = dict.fromkeys([options.kind] if options.kind else KINDS, None if options.all else options.most)
        # There are too many small allocations to refuse each of them. They are not refused in Python, because
        # the interpreter would end the process.
        python = case.name.startswith("python")
        if "small" in most and not options.kind:
            few = options.small if options.small is not None else 150 if options.all else 4
            most["small"] = 0 if python else few
        runs, failed = sweep(case, options.library, most, 0 if python else bursts, generator)
        total, failures = total + runs, failures + failed
    print("\n".join([*failures, f"{total} refusals, {len(failures)} failures"]))
    return 1 if failures or total == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
