#!/usr/bin/env python3
"""Runs random sequences of a training script's operations on groups, models, states and traces.

    stress.py torch|jax [--sequences N] [--first SEED] [--steps N] [--verbose]

A seed determines a sequence, which 2 or 3 processes run. An operation hangs if all ranks are idle for 20 s: a
busy machine is not a hang. Every average is compared with the average in float64 over the gradients of all
ranks, and its bits with the bits of the other ranks. A sequence is

    right     every operation was right
    refused   an operation was refused with the same clear error on every rank, and all others were right
    wrong     an average was wrong, ranks differed, or an error was not clear
    hung      an operation did not end

The program exits with 0 if no sequence is wrong or hung. `--first SEED --sequences 1 --verbose` repeats a
sequence.
"""
from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import glob
import importlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

DEADLINE_S = 20.0  # longest time without use of a processor
LONGEST_S = 200.0  # longest time of an operation
TIMEOUT_S = 12.0  # of Gradwire's calls; less than DEADLINE_S, because a peer's call may be refused


class Wrong(AssertionError):
    """An operation had a wrong result."""


class Refused(Exception):
    """An operation was refused with a clear error."""


# Largest norm of an error, relative to the mean's norm. Larger than the rounding error of two steps, and far
# smaller than the error from a missing or wrong rank.
TOLERANCES = {"fp32": 1e-5, "bf16": 0.01, "fp8": 0.08, "int8": 0.02, "int4": 0.25, "powersgd:rank=2": 1e-3,
              "powersgd:rank=2,wire=bf16": 0.02}
SHAPES: Dict[str, Tuple[int, ...]] = {"matrix": (64, 40), "other": (40, 64), "vector": (70,)}


def gradient(seed: int, step: int, rank: int, name: str, scale: float = 1.0) -> np.ndarray:
    """Returns the gradient of a parameter on a rank: a matrix of rank 1.

    The gradient's size grows with the rank, so that an average over wrong ranks is far off. The seed, step
    and name determine the gradient's direction.
    """
    rng = np.random.default_rng([seed, step, zlib.crc32(name.encode())])
    shape = SHAPES[name]
    columns = rng.uniform(0.5, 1, (shape[0], 1)) * rng.choice([-1, 1], (shape[0], 1))
    rows = rng.uniform(0.5, 1, (1, int(np.prod(shape[1:])))) if len(shape) > 1 else 1.0
    return (scale * (1 + 2 * rank) * (columns * rows)).reshape(shape).astype(np.float32)


class Run:
    """One rank's part of a sequence.

    Attributes:
        draw: random numbers that are the same on every rank, of the current operation.
        part: the ranks of this rank's group, by their numbers among all processes; [] without a group.
        log: a line per operation, whose results must be the same on every rank of a part.
    """

    def __init__(self, seed: int, rank: int, world: int, folder: str) -> None:
        self.seed, self.rank, self.world, self.folder = seed, rank, world, folder
        self.draw = random.Random()
        self.part: List[int] = []
        self.log: List[str] = []
        self.refusals: List[str] = []
        self.meetings = 0
        self.current = ""

    def parts(self) -> List[List[int]]:
        """Draws one group of all processes, two groups (the last process alone), or a group per process."""
        everyone = list(range(self.world))
        return self.draw.choice([[everyone], [everyone], [everyone[:-1], everyone[-1:]],
                                 [[rank] for rank in everyone]])

    def meeting(self, part: List[int]) -> str:
        """Returns a new file for the rendezvous of a part's ranks."""
        self.meetings += 1
        return f"{self.folder}/{self.meetings}-{part[0]}"

    def check(self, what: str, got: np.ndarray, name: str, step: int, spec: str, scale: float = 1.0,
              ranks: Optional[List[int]] = None, floor: float = 1e-6) -> None:
        """Compares a result with the average in float64, and logs the result's bits.

        floor: the smallest tolerance, for the array's type.
        """
        members = self.part if ranks is None else ranks
        expected = np.mean(
            [gradient(self.seed, step, rank, name, scale).astype(np.float64) for rank in members], 0)
        error = float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))
        bits = zlib.crc32(np.ascontiguousarray(got).tobytes())
        self.log.append(f"{self.current}: ranks {members}: {what} {name} {bits:08x}")
        tolerance = max(floor, TOLERANCES[spec] if len(members) > 1 else 0)
        if not error <= tolerance:
            raise Wrong(
                f"{what}: {name} in {spec} over ranks {members} is {error:.3g} off, more than {tolerance:g}")

    def clear(self, error: BaseException, *kinds: type) -> None:
        """Counts a refusal. Raises Wrong if the error has another type or a text of under 20 characters."""
        text = str(error)
        if not isinstance(error, kinds) or len(text) < 20:
            raise Wrong(f"{self.current}: {type(error).__name__}: {text}") from error
        self.refusals.append(f"{self.current}: {text.splitlines()[0][:160]}")
        self.log.append(f"{self.current}: ranks {self.part}: refused")


def run_rank(kind: str, seed: int, rank: int, world: int, folder: str, steps: int) -> Dict[str, Any]:
    module = importlib.import_module(f"stress_{kind}")
    run = Run(seed, rank, world, folder)
    outcome, detail = "right", ""
    try:
        subject = module.Subject(run)
        for number in range(steps):
            # Each operation has a new generator, because ranks of other groups may draw more or fewer
            # numbers.
            run.draw = random.Random(f"{seed} {number}")
            name, operation = subject.choose()
            run.current = f"{number} {name}"
            mark(folder, rank, run.current)
            operation()
        run.current, run.draw = "end", random.Random(seed)
        mark(folder, rank, run.current)
        subject.end()
        outcome = "refused" if run.refusals else "right"
    except BaseException as error:
        outcome, detail = "wrong", f"{run.current}: {type(error).__name__}: {error}"
        if not isinstance(error, Wrong):
            detail += "\n" + "".join(traceback.format_exc().splitlines(True)[-8:])
    return {"outcome": outcome, "detail": detail, "log": run.log, "refusals": run.refusals, "part": run.part}


def mark(folder: str, rank: int, text: str) -> None:
    with open(f"{folder}/operations-{rank}", "a") as file:
        file.write(text + "\n")


# ---- The parent
# ------------------------------------------------------------------------------------------------


def fork_rank(kind: str, seed: int, rank: int, world: int, folder: str, steps: int) -> int:
    process = os.fork()
    if process:
        return process
    os.setpgid(0, 0)
    descriptor = os.open(f"{folder}/output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        result = run_rank(kind, seed, rank, world, folder, steps)
        pathlib.Path(folder, f"result-{rank}.part").write_text(json.dumps(result))
        os.replace(f"{folder}/result-{rank}.part", f"{folder}/result-{rank}")
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    sys.exit(0)  # runs exit handlers, like the end of a program


def processor_s(pids: List[int]) -> float:
    """Returns the processor time in seconds of the running processes in these process groups."""
    total = 0
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = pathlib.Path(path).read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[2]) in pids:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def run_sequence(kind: str, seed: int, steps: int, verbose: bool, folder: str) -> Tuple[str, str, List[str]]:
    """Runs a sequence. Returns (outcome, detail, refusals).

    The forked ranks also leave this function, by SystemExit, so it must not clean up.
    """
    world = random.Random(f"world {seed}").choice([2, 2, 3])
    pids = [fork_rank(kind, seed, rank, world, folder, steps) for rank in range(world)]
    codes: Dict[int, int] = {}
    idle, used, sizes = 0.0, 0.0, 0
    begun = sampled = time.monotonic()
    while len(codes) < world and idle < DEADLINE_S and time.monotonic() - begun < LONGEST_S:
        time.sleep(0.05)
        now, size = time.monotonic(), sum(
            os.path.getsize(path) for path in glob.glob(f"{folder}/operations-*"))
        if size != sizes:  # another operation has begun
            idle, sizes, begun = 0.0, size, now
        if now - sampled > 0.5:
            using = processor_s(pids)
            idle += now - sampled if using - used < 0.02 * (now - sampled) else 0
            used, sampled = using, now
        for rank, pid in enumerate(pids):
            if rank not in codes and os.waitpid(pid, os.WNOHANG)[0] == pid:
                codes[rank] = 1
    late = [rank for rank in range(world) if rank not in codes]
    for rank in late:
        os.kill(pids[rank], signal.SIGUSR1)
    time.sleep(0.3 if late else 0)
    for rank in range(world):
        try:
            os.killpg(pids[rank], signal.SIGKILL)
        except ProcessLookupError:
            pass
        if rank in late:
            os.waitpid(pids[rank], 0)

    def text(name: str) -> str:
        path = pathlib.Path(folder, name)
        return path.read_text(errors="replace") if path.exists() else ""

    if verbose:
        for rank in range(world):
            print(f"-- rank {rank} of {world}\n{text(f'operations-{rank}')}{text(f'output-{rank}')[-6000:]}")
    results = [json.loads(text(f"result-{rank}") or "null") for rank in range(world)]
    refusals = [line for result in results if result for line in result["refusals"]]
    wrong = [f"rank {rank}: {result['detail']}" for rank, result in enumerate(results)
             if result and result["outcome"] == "wrong"]
    if late and not wrong:
        where = "; ".join(f"rank {r} in '{(text(f'operations-{r}').splitlines() or ['start'])[-1]}'"
                          for r in late)
        return "hung", f"{where}\n{text(f'output-{late[0]}')[-1500:]}", refusals
    if wrong:
        return "wrong", "\n".join(wrong), refusals
    for rank, result in enumerate(results):
        if result is None:
            return "wrong", f"rank {rank} died: {text(f'output-{rank}')[-1500:]}", refusals
    problem = differences(results)
    if problem:
        return "wrong", problem, refusals
    return ("refused" if refusals else "right"), "", refusals


def differences(results: List[Dict[str, Any]]) -> str:
    """Returns the first difference between two ranks' logs of the same operation and ranks; "" if none."""
    seen: Dict[str, Tuple[int, str]] = {}
    for rank, result in enumerate(results):
        for line in result["log"]:
            key, _, bits = line.rpartition(" ")
            first = seen.setdefault(key, (rank, bits))
            if first[1] != bits:
                return f"ranks {first[0]} and {rank} differ: {key}: {first[1]} and {bits}"
    return ""


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("kind", choices=["torch", "jax"])
    arguments.add_argument("--sequences", type=int, default=10)
    arguments.add_argument("--first", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=14)
    arguments.add_argument("--verbose", action="store_true")
    given = arguments.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GRADWIRE_THREADS", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"
    importlib.import_module(f"stress_{given.kind}")  # forked ranks inherit the imported modules
    gc.freeze()  # forked ranks do not collect the modules' objects
    counts: "collections.Counter[str]" = collections.Counter()
    refused: "collections.Counter[str]" = collections.Counter()
    begin = time.monotonic()
    for seed in range(given.first, given.first + given.sequences):
        folder = tempfile.mkdtemp()
        outcome, detail, refusals = run_sequence(given.kind, seed, given.steps, given.verbose, folder)
        shutil.rmtree(folder)
        counts[outcome] += 1
        refused.update({line.partition(" ")[2] for line in refusals})
        if outcome in ("wrong", "hung"):
            print(f"seed {seed}: {outcome}: {detail}", flush=True)
    for line, count in refused.most_common():
        print(f"refused in {count} sequences: {line}")
    print(f"{given.sequences} sequences of {given.kind} in {time.monotonic() - begin:.0f} s: " +
          ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("right", "refused", "wrong", "hung")))
    return 0 if counts["wrong"] + counts["hung"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
