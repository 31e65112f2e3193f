"""Does losing ranks cost accuracy? The demo's model on Fashion-MNIST, 4 processes, `--elastic 3:4`:

    undisturbed  no rank is lost
    4 -> 3       a random rank, possibly rank 0, is killed at a random step
    4 -> 3 -> 4  then a new rank joins at a later random step

A run takes about 20 core-seconds. Skips runs that the result has already, so it can be interrupted.
"""
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import time

from experiments.table import Experiment
from harness import report
from harness.ranks import GRADWIRE

WORLD = 4
FATES = {"undisturbed": (0, 0), "4 -> 3": (1, 0), "4 -> 3 -> 4": (1, 1)}  # counts of lost and joined ranks
SPECS = ("powersgd:rank=4", "int8")


class Run:
    """One training run, in which a rank may be killed and another may join."""

    def __init__(self, gradwire, folder, spec, fate, seed, steps, data="fashion-mnist"):
        self.folder, self.fate = folder, fate
        draw = random.Random(f"{spec} {fate} {seed}")  # equal draws in each repetition
        self.rank = draw.randrange(WORLD)
        self.loss_at = draw.randrange(steps // 10, steps // 2)
        self.join_at = draw.randrange(self.loss_at + steps // 20, steps * 3 // 4)
        self.words = [
            gradwire, "train", "--model", "vit_tiny", "--data", data, "--batch-size", "64", "--optimizer",
            "adamw", "--lr", "2e-3", "--steps", str(steps), "--log-every", "10", "--log", "run.jsonl",
            "--seed", str(seed), "--compression", spec, "--elastic", f"{WORLD - 1}:{WORLD}", "--device",
            "host", "--timeout-s", "120"]

    def records(self):
        path = self.folder / "run.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def start(self, *more, **environment):
        """Starts a process. `more`: the process's flags for finding the other ranks."""
        output = open(self.folder / f"rank-{len(list(self.folder.glob('rank-*')))}", "w", encoding="utf-8")
        return subprocess.Popen([*self.words, *more], cwd=self.folder, stdout=output,
                                stderr=subprocess.STDOUT,
                                env={**os.environ, "GRADWIRE_THREADS": "1", **environment})

    def wait_for(self, step, ranks):
        while not any(r["type"] == "step" and r["step"] >= step for r in self.records()):
            if any(r.poll() is not None for r in ranks):
                raise RuntimeError(f"a rank ended before step {step}: {self.output()}")
            time.sleep(0.05)

    def output(self):
        return " | ".join(p.read_text()[-300:] for p in sorted(self.folder.glob("rank-*")))

    def check_join(self):
        """Checks that --join takes a file. A smoke run is too short to lose and admit ranks."""
        code = self.start("--join", "missing").wait(timeout=60)
        if code != 2 or "gradwire: missing: " not in self.output():
            raise RuntimeError(f"--join missing: code {code}: {self.output()}")

    def run(self):
        """Runs the training. Returns the accuracy, and the records of lost and admitted ranks."""
        ranks = [
            self.start("--rendezvous", f"file://{self.folder}/meeting", "--members", "members", RANK=str(r),
                       WORLD_SIZE=str(WORLD)) for r in range(WORLD)]
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
            raise RuntimeError(f"codes {codes}: {self.output()}")
        records = self.records()
        found = {"test_accuracy": records[-1]["test_accuracy"],
                 **{kind: [{key: r[key] for key in ("step", who, "ranks")} for r in records
                           if r["type"] == kind] for kind, who in (("shrink", "lost"), ("grow", "joined"))}}
        if (len(found["shrink"]), len(found["grow"])) != FATES[self.fate]:
            raise RuntimeError(f"{found}: {self.output()}")
        return found


def measure(options):
    done = {(i["compression"], i["fate"], i["seed"], i["steps"]) for i in options.done}
    for seed in range(1, options.seeds + 1):
        for spec in options.compression:
            for fate in options.fates:
                if (spec, fate, seed, options.steps) in done:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    run = Run(options.gradwire, pathlib.Path(folder), spec, fate, seed, options.steps,
                              options.data)
                    found = run.run()
                    if options.smoke:
                        run.check_join()
                yield {"compression": spec, "fate": fate, "seed": seed, "steps": options.steps, **found}


def tables(document):
    """Returns tables of the accuracies in percent, with their mean and standard deviation."""
    rows = [["compression", "ranks", "accuracy by seed (%)", "mean", "spread", "minus undisturbed"]]
    for spec in dict.fromkeys(i["compression"] for i in document["items"]):
        base = None
        for fate in FATES:
            seeds = sorted((i for i in document["items"] if (i["compression"], i["fate"]) == (spec, fate)),
                           key=lambda i: i["seed"])
            if not seeds:
                continue
            percent = [100 * i["test_accuracy"] for i in seeds]
            mean = statistics.mean(percent)
            base = mean if fate == "undisturbed" else base
            rows.append([f"`{spec}`", fate, ", ".join(f"{p:.2f}" for p in percent), f"{mean:.2f}",
                         f"{statistics.stdev(percent):.2f}" if len(percent) > 1 else "-",
                         "-" if base is None or fate == "undisturbed" else f"{mean - base:+.2f}"])
    return report.markdown(rows)


EXPERIMENT = Experiment(
    __doc__,
    {"steps": 200, "seeds": 3, "compression": SPECS, "fates": tuple(FATES), "data": "fashion-mnist",
     "gradwire": GRADWIRE},
    {"steps": 4, "seeds": 1, "compression": SPECS[:1], "fates": ("undisturbed",), "data": "synthetic:256"},
    measure, tables, resumes=True,
    line=lambda i: f"{i['compression']}, {i['fate']}, seed {i['seed']}: {100 * i['test_accuracy']:.2f} %")
