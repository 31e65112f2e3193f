#!/usr/bin/env python3
"""Kills training runs with SIGKILL at random moments, again and again, and resumes the runs with the same
command. The losses must agree to the last digit with the losses of an uninterrupted run.

usage: kill_test.py PATH_TO_gradwire [--kills N] [--seed S]
"""
import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "integrations"))
from launch import free_port  # noqa: E402

MODEL = ["--device", "host", "--width", "16", "--depth", "1", "--heads", "2", "--mlp", "32", "--data",
         "synthetic:512", "--batch-size", "8", "--seed", "4", "--log-every", "1000"]
# Each kind is (kind of ranks, number of ranks, flags). Ranks are threads or processes.
KINDS = [
    ("threads", 3, ["--compression", "powersgd:rank=2,wire=bf16", "--augment", "flip,crop"]),
    # The spec names a schedule, because auto measures links and may choose another schedule in each run.
    ("processes", 3, ["--compression", "bf16:round=stochastic,schedule=ring"]),
]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK",
             "PMI_SIZE")


def start(gradwire: str, kind: str, ranks: int, flags: list[str],
          folder: pathlib.Path) -> list[subprocess.Popen]:
    clean = {k: v
             for k, v in os.environ.items() if k not in LAUNCHERS and not k.startswith(("SLURM_", "OMPI_"))}
    command = [gradwire, "train", *MODEL, *flags]
    quiet = dict(cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if kind == "threads":
        return [subprocess.Popen([*command, "--ranks", str(ranks)], env=clean, **quiet)]
    port = str(free_port())
    return [
        subprocess.Popen(
            command, env={
                **clean, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port,
                "MASTER_ADDR": "127.0.0.1"
            }, **quiet) for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen]) -> list[int]:
    for process in processes:
        errors = process.communicate(timeout=120)[1]
        if process.returncode not in (0, -signal.SIGKILL, 1):
            sys.exit(f"FAILED: a rank ended with {process.returncode}: {errors}")
    return [process.returncode for process in processes]


def losses(log: pathlib.Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records if r["type"] == "step"]


def evaluations(log: pathlib.Path) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [(r["step"], r["test_loss"], r["test_accuracy"]) for r in records if r["type"] == "eval"]


def torture(gradwire: str, kind: str, ranks: int, flags: list[str], kills: int, steps: int,
            chance: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="gradwire-kill-") as name:
        folder = pathlib.Path(name)
        flags = [*flags, "--steps", str(steps)]
        begin = time.monotonic()
        codes = finish(start(gradwire, kind, ranks, [*flags, "--log", "whole.jsonl"], folder))
        assert codes == [0] * ranks if kind == "processes" else codes == [0], codes
        whole_s = time.monotonic() - begin
        again = [
            *flags, "--log", "killed.jsonl", "--checkpoint", "saved", "--checkpoint-every", "7", "--resume",
            "saved", "--timeout-s", "20"]
        killed = ended = 0
        while killed < kills:
            processes = start(gradwire, kind, ranks, again, folder)
            # The kill happens at any moment, including start and end. The factor allows for checkpoints,
            # which make this run longer than the uninterrupted run.
            time.sleep(chance.uniform(0, 1.2) * whole_s)
            if any(process.poll() is None for process in processes):
                killed += 1
            else:
                ended += 1
            for process in chance.sample(processes, chance.randint(1, len(processes))):
                process.kill()
            deadline = time.monotonic() + 3
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                time.sleep(0.01)
            for process in processes:  # ends surviving processes
                process.kill()
            finish(processes)
            if ended > 0:  # the run has finished; start again
                check(folder, steps)
                ended = 0
                for path in sorted((folder / "saved").rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                (folder / "killed.jsonl").unlink()
        codes = finish(start(gradwire, kind, ranks, again, folder))
        assert set(codes) == {0}, codes
        check(folder, steps)
        left = sorted(path.name for path in (folder / "saved").glob("step-*"))
        assert len(left) <= 3 and left[-1] == f"step-{steps:09d}", left
        print(f"ranks are {kind}: killed {killed} times, {steps} losses each time as if uninterrupted",
              flush=True)


def check(folder: pathlib.Path, steps: int) -> None:
    whole, resumed = losses(folder / "whole.jsonl"), losses(folder / "killed.jsonl")
    assert [step for step, _ in resumed] == list(range(steps)), [step for step, _ in resumed]
    different = [(a, b) for a, b in zip(whole, resumed) if a != b]
    assert not different, f"{len(different)} losses differ, first {different[0]}"
    assert evaluations(folder / "whole.jsonl") == evaluations(folder / "killed.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gradwire")
    parser.add_argument("--kills", type=int, default=4, help="kills per kind of run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    chance = random.Random(arguments.seed)
    for kind, ranks, flags in KINDS:
        torture(os.path.abspath(arguments.gradwire), kind, ranks, flags, arguments.kills, arguments.steps,
                chance)


if __name__ == "__main__":
    main()
