#!/usr/bin/env python3
"""Makes the N-th call of the CUDA runtime fail, for every N, in short runs of `gradwire train --device cuda`.

fail_test.py GRADWIRE [--every K] [--jobs J] [--run NAME] [--first N] [--last N]

GRADWIRE is the command linked with the stand-in. Each run must end within its deadline. A run must fail with
a message that names the failing call. If the failing call matches IGNORED, the run may instead end with the
losses of a run without a failure. --every K tests only every K-th call, from a start that differs between
runs. --first and --last limit the calls, so that a long sweep can be done in parts.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

DEADLINE_S = 60
SMALL = ["--data", "synthetic:16", "--batch-size", "4", "--width", "16", "--depth", "1",
         "--heads", "2", "--mlp", "16", "--steps", "2", "--timeout-s", "10"]
# name: (ranks, flags, error)
RUNS = {
    "plain": (1, "", "cudaErrorIllegalAddress:sticky"),
    "graph": (1, "--graph", "cudaErrorInvalidValue"),
    "memory": (1, "--precision bf16", "cudaErrorMemoryAllocation"),
    "ranks": (2, "", "cudaErrorIllegalAddress:sticky"),
    "shards": (2, "--shard optimizer --gather-weights int8", "cudaErrorMemoryAllocation"),
    "powersgd": (2, "--compression powersgd:rank=2", "cudaErrorInvalidValue"),
}
# Calls whose failures may be ignored, as "call < its callers".
IGNORED = re.compile("|".join([
    # These failures lose the resource but do not change the result.
    r"^cuda(Free|FreeHost|EventDestroy|StreamDestroy|GraphDestroy|GraphExecDestroy) ",
    # A destructor cannot throw.
    r"^cuda(SetDevice|StreamSynchronize) .*::~",
    # The loader reads batches ahead for steps that the run does not have.
    r" gradwire::Loader::load_batches ",
]))


def callers(gradwire, offsets):
    """Returns the functions that led to the failed call, innermost first."""
    if shutil.which("addr2line") is None or not offsets:
        return ""
    out = subprocess.run(["addr2line", "-Cfe", gradwire, *offsets[3:9]], capture_output=True,
                         text=True).stdout
    return " < ".join(name.split("(")[0] for name in out.splitlines()[::2])


def run(gradwire, name, number, folder):
    """Runs the command. Returns (number of calls, failed call, callers of the failed call, exit status or
    None after the deadline, stderr, losses)."""
    ranks, flags, error = RUNS[name]
    log, records = pathlib.Path(folder) / f"{name}-{number}", pathlib.Path(folder) / f"{name}-{number}.jsonl"
    environment = dict(os.environ, GRADWIRE_STANDIN_GPUS=str(ranks), GRADWIRE_TEST_LOG=str(log))
    if number:
        environment["GRADWIRE_STANDIN_FAIL"] = f"{number}:{error}"
    try:
        command = [gradwire, "train", *SMALL, "--device", "cuda", "--ranks", str(ranks), "--log",
                   str(records)]
        result = subprocess.run(command + flags.split(), env=environment, capture_output=True, text=True,
                                timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return 0, "", "", None, "", []
    if not log.exists():
        return 0, "", "", result.returncode, result.stderr, []
    losses = []
    if result.returncode == 0:
        for record in map(json.loads, records.read_text().splitlines()):
            losses += [record[key] for key in ("loss", "test_loss") if key in record]
    records.unlink(missing_ok=True)
    lines = dict((line + " ").split(" ", 1) for line in log.read_text().splitlines())
    log.unlink()
    stack = callers(gradwire, lines["stack"].split())
    return int(lines["calls"]), lines["failed"].strip(), stack, result.returncode, result.stderr, losses


def problem(gradwire, name, number, folder, expected_losses):
    _, failed, stack, status, text, losses = run(gradwire, name, number, folder)
    where = f"{name}, call {number} ({failed} < {stack})"
    if status is None:
        return f"{where}: no end within {DEADLINE_S} s"
    if status < 0:
        return f"{where}: ended by signal {-status}: {text[-400:]}"
    if status == 0 and losses != expected_losses:
        return f"{where}: the failure was ignored, and the losses are {losses} instead of {expected_losses}"
    if status == 0:
        may_ignore = not failed or IGNORED.search(f"{failed} < {stack} ")
        return None if may_ignore else f"{where}: the failure was ignored"
    # After a sticky error, every call fails. Another thread may be the first to report the error.
    error = RUNS[name][2]
    expected = error.split(":")[0] if error.endswith(":sticky") else failed
    if (expected not in text and failed not in text and "CUBLAS_STATUS" not in text
        and "a status of the stand-in" not in text):
        return f"{where}: the message does not name {expected}: {text[-400:]}"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gradwire")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--run", default=None, choices=sorted(RUNS))
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=sys.maxsize)
    options = parser.parse_args()
    symbols = subprocess.run(["nm", "-C", options.gradwire], capture_output=True, text=True).stdout
    for name in re.findall(r"gradwire::[\w:]+", IGNORED.pattern):
        if symbols and f" {name}(" not in symbols:
            sys.exit(f"{options.gradwire} has no function {name}, which IGNORED names")
    failures = 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for index, name in enumerate([options.run] if options.run else RUNS):
            calls, _, _, status, text, losses = run(options.gradwire, name, 0, folder)
            if status != 0 or calls == 0 or len(losses) < 3:
                print(f"{name}: fails without a planted failure: {text}")
                return 1
            numbers = range(options.first + index % options.every,
                            min(calls, options.last) + 1, options.every)
            problems = [
                p for p in pool.map(lambda n: problem(options.gradwire, name, n, folder, losses), numbers)
                if p]
            failures += len(problems)
            print(f"{name}: {calls} calls, {len(numbers)} of them made to fail, {len(problems)} problems",
                  flush=True)
            for text in problems[:40]:
                print("  " + text.replace("\n", " | "))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
