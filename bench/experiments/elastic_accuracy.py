#!/usr/bin/env python3
"""Does losing ranks cost accuracy? The demo's model on Fashion-MNIST, 4 processes, `--elastic 3:4`:

    undisturbed  no rank is lost
    4 -> 3       a random rank, possibly rank 0, is killed at a random step
    4 -> 3 -> 4  then a new rank joins at a later random step

    elastic_accuracy.py [--results FILE] [--steps N] [--seeds N] [--compression SPEC]...

Skips runs that are in FILE, so it can be interrupted. Prints the table of FILE. A run takes about
20 core-seconds.
"""
import argparse
import json
import os
import pathlib
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from harness import smoke  # noqa: E402

WORLD = 4
FATES = ("undisturbed", "4 -> 3", "4 -> 3 -> 4")
SPECS = ("powersgd:rank=4", "int8")


class Run:
    """One training run, and the fate of its ranks."""

    def __init__(self, gradwire, folder, spec, fate, seed, steps, data="fashion-mnist"):
        self.folder, self.fate, self.steps = folder, fate, steps
        draw = random.Random(f"{spec} {fate} {seed}")  # the same in each repetition
        self.rank = draw.randrange(WORLD)
        self.loss_at = draw.randrange(steps // 10, steps // 2)
        self.join_at = draw.randrange(self.loss_at + steps // 20, steps * 3 // 4)
        self.words = [
            gradwire, "train", "--model", "vit_tiny", "--data", data, "--batch-size", "64", "--optimizer",
            "adamw", "--lr", "2e-3", "--steps",
            str(steps), "--log-every", "10", "--log", "run.jsonl", "--seed",
            str(seed), "--compression", spec, "--elastic", f"{WORLD - 1}:{WORLD}", "--device", "host",
            "--timeout-s", "120"
        ]

    def records(self):
        path = self.folder / "run.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def start(self, *more, **environment):
        """Starts a process. `more`: its flags for finding the other ranks."""
        output = open(self.folder / f"rank-{len(list(self.folder.glob('rank-*')))}", "w", encoding="utf-8")
        return subprocess.Popen([*self.words, *more], cwd=self.folder, stdout=output,
                                stderr=subprocess.STDOUT,
                                env={**os.environ, "GRADWIRE_THREADS": "1", **environment})

    def wait_for(self, step, ranks):
        while not any(r["type"] == "step" and r["step"] >= step for r in self.records()):
            if any(r.poll() is not None for r in ranks):
                raise RuntimeError(f"a rank ended before step {step}: {self.said()}")
            time.sleep(0.05)

    def said(self):
        return " | ".join(p.read_text()[-300:] for p in sorted(self.folder.glob("rank-*")))

    def check_join(self):
        """Checks that --join is a flag that takes a file. A smoke run has no time to lose and take ranks."""
        code = self.start("--join", "nobody").wait(timeout=60)
        if code != 2 or "gradwire: nobody: " not in self.said():
            raise RuntimeError(f"--join nobody: code {code}: {self.said()}")

    def run(self):
        ranks = [
            self.start("--rendezvous", f"file://{self.folder}/meeting", "--members", "members", RANK=str(r),
                       WORLD_SIZE=str(WORLD)) for r in range(WORLD)
        ]
        try:
            if self.fate != "undisturbed":
                self.wait_for(self.loss_at, ranks)
                dead = ranks.pop(self.rank)
                dead.kill()
                dead.wait()
            if self.fate == "4 -> 3 -> 4":
                self.wait_for(self.join_at, ranks)
                ranks.append(self.start("--join", "members"))
            codes = [r.wait(timeout=1200) for r in ranks]
        finally:
            for r in ranks:
                r.kill()
                r.wait()
        if any(codes):
            raise RuntimeError(f"codes {codes}: {self.said()}")
        records = self.records()
        found = {
            "test_accuracy": records[-1]["test_accuracy"], "steps": self.steps,
            "shrink": [{k: r[k]
                        for k in ("step", "lost", "ranks")} for r in records
                       if r["type"] == "shrink"], "grow": [{k: r[k]
                                                            for k in ("step", "joined", "ranks")}
                                                           for r in records if r["type"] == "grow"]
        }
        expected = {"undisturbed": (0, 0), "4 -> 3": (1, 0), "4 -> 3 -> 4": (1, 1)}[self.fate]
        if (len(found["shrink"]), len(found["grow"])) != expected:
            raise RuntimeError(f"{found}: {self.said()}")
        return found


def table(runs):
    """Returns lines of Markdown: accuracies in percent, their mean and standard deviation."""
    lines = [
        "| compression | ranks | accuracy by seed (%) | mean | spread | minus undisturbed |",
        "|---|---|---|---|---|---|"
    ]
    for spec in dict.fromkeys(r["compression"] for r in runs):
        base = None
        for fate in FATES:
            all_seeds = sorted((r for r in runs if (r["compression"], r["fate"]) == (spec, fate)),
                               key=lambda r: r["seed"])
            if not all_seeds:
                continue
            percent = [100 * r["test_accuracy"] for r in all_seeds]
            mean = statistics.mean(percent)
            base = mean if fate == "undisturbed" else base
            spread = f"{statistics.stdev(percent):.2f}" if len(percent) > 1 else "-"
            difference = "-" if base is None or fate == "undisturbed" else f"{mean - base:+.2f}"
            lines.append(
                f"| `{spec}` | {fate} | {', '.join(f'{p:.2f}' for p in percent)} | {mean:.2f} | {spread} |"
                f" {difference} |"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "build/elastic-accuracy.json")
    parser.add_argument("--gradwire", default=str(ROOT / "build/bin/gradwire"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compression", action="append")
    smoke.add(parser, steps=4, seeds=1, compression=SPECS[:1], results=pathlib.Path(os.devnull))
    arguments = parser.parse_args()
    smoke.need(arguments, specs=SPECS)
    fates, data = (FATES[:1], "synthetic:256") if arguments.smoke else (FATES, "fashion-mnist")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks end
    result = json.loads(arguments.results.read_text()) if arguments.results.is_file() else {"runs": []}
    runs = result["runs"]
    done = {(r["compression"], r["fate"], r["seed"], r["steps"]) for r in runs}
    for seed in range(1, arguments.seeds + 1):
        for spec in arguments.compression or SPECS:
            for fate in fates:
                if (spec, fate, seed, arguments.steps) in done:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    run = Run(arguments.gradwire, pathlib.Path(folder), spec, fate, seed, arguments.steps,
                              data)
                    found = run.run()
                    if arguments.smoke:
                        run.check_join()
                runs.append({"compression": spec, "fate": fate, "seed": seed, **found})
                print(f"{spec}, {fate}, seed {seed}: {100 * found['test_accuracy']:.2f} %", flush=True)
                commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True,
                                        text=True, check=False)
                result.update({
                    "commit": commit.stdout.strip(), "cores": len(os.sched_getaffinity(0)),
                    "machine": platform.machine(), "command": "bench/experiments/elastic_accuracy.py",
                    "model": "vit_tiny", "data": "fashion-mnist"
                })
                arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
