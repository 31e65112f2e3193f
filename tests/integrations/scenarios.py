#!/usr/bin/env python3
"""Runs a suite of scenarios: functions that every rank of a group runs, as processes on this machine.

usage: scenarios.py SUITE [GROUP...] [SCENARIO...]    by default all scenarios in all their groups
       scenarios.py SUITE --list

SUITE is a module of this folder, such as ddp, with begin() and end() of a rank; SUITE_ranks if SUITE.py would
hide a package. It and the modules SUITE_*.py have scenarios: functions with the decorator @scenario. A group
is a number of ranks, or "ends" for the scenarios whose ranks end or change their process group.

Importing PyTorch takes longer than most scenarios. So this process imports it once, forks the ranks of each
group, and these run all scenarios of the group. After a failure the group's other scenarios run in new ranks.
"""
from __future__ import annotations

import faulthandler
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from launch import HERE, fork_ranks, import_for_rank

DEADLINE_S = 1000  # of the scenarios of a group, on a busy machine


class Scenario(NamedTuple):
    """A scenario, the numbers of ranks that run it, and whether these ranks run no other scenario."""

    run: Callable[[], None]
    worlds: Tuple[int, ...]
    ends: bool


FOUND: Dict[str, Scenario] = {}


def scenario(*worlds: int, ends: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Makes a function a scenario of these numbers of ranks, by default 2 and 4.

    ends: the scenario has ranks of its own, one set after another in the order of `worlds`. They share the
        folder SCENARIO_FOLDER.
    """
    def add(run: Callable[[], None]) -> Callable[[], None]:
        FOUND[run.__name__] = Scenario(run, worlds or (2, 4), ends)
        return run

    return add


def load(suite: str, rank: int, world: int) -> Any:
    """Imports the suite's modules for this rank."""
    FOUND.clear()
    module = import_for_rank(suite if (HERE / f"{suite}.py").exists() else f"{suite}_ranks", rank, world)
    for path in sorted(HERE.glob(f"{suite}_*.py")):
        importlib.import_module(path.stem)
    return module


def run_rank(suite: str, names: List[str], rank: int, world: int, done: int) -> int:
    """Runs the scenarios on this rank, and reports each to `done`. Returns the exit code."""
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)  # shows where a hang occurs
    module = load(suite, rank, world)
    try:
        module.begin()
        for name in names:
            begin = time.monotonic()
            FOUND[name].run()
            os.write(done, f"{name}\n".encode())
            if rank == 0:
                print(f"[{name} on {world} ranks: {time.monotonic() - begin:.1f} s]", flush=True)
        module.end()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks may never come to the end of the process group
    return 0


def run_ranks(suite: str, names: List[str], world: int) -> List[str]:
    """Runs the scenarios on new ranks. Returns what failed, and runs the rest on further ranks."""
    reading, writing = os.pipe()
    codes = fork_ranks(world, lambda rank: run_rank(suite, names, rank, world, writing), DEADLINE_S)
    os.close(writing)
    with os.fdopen(reading) as results:
        reports = results.read().split()
    unfinished = [name for name in names if reports.count(name) < world]
    if not any(codes) and (not unfinished or FOUND[names[-1]].ends):  # ranks may end in their scenario
        return []
    failures = [f"{(unfinished or ['the end'])[0]} on {world} ranks, which ended with {codes}"]
    return failures + (run_ranks(suite, unfinished[1:], world) if unfinished[1:] else [])


def main() -> int:
    suite, *chosen = sys.argv[1:]
    os.environ.update(OMP_NUM_THREADS="1", GRADWIRE_THREADS="1")  # per rank, because ranks share the cores
    sys.modules["scenarios"] = sys.modules["__main__"]
    load(suite, 0, 1)
    scenarios = dict(FOUND)
    if chosen == ["--list"]:
        for name, (_, worlds, ends) in scenarios.items():
            print(f"{name}: {worlds}{' ends' if ends else ''}")
        return 0
    groups = {*(str(world) for _, worlds, ends in scenarios.values() for world in worlds if not ends), "ends"}
    unknown = [name for name in chosen if name not in scenarios and name not in groups]
    if unknown:
        sys.exit(f"{suite} has no scenarios or groups {unknown}: see --list")
    failures: List[str] = []

    def runs(name: str, group: str) -> bool:
        return all(one in chosen or not any(each in chosen for each in kind)
                   for one, kind in ((name, scenarios), (group, groups)))

    for world in sorted({int(group) for group in groups - {"ends"}}):
        names = [name for name, (_, worlds, ends) in scenarios.items()
                 if world in worlds and not ends and runs(name, str(world))]
        failures += run_ranks(suite, names, world) if names else []
    for name, (_, worlds, ends) in scenarios.items():
        if ends and runs(name, "ends"):
            os.environ["SCENARIO_FOLDER"] = tempfile.mkdtemp()
            for world in worlds:
                failures += run_ranks(suite, [name], world)
            shutil.rmtree(os.environ["SCENARIO_FOLDER"])
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
