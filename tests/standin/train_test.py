#!/usr/bin/env python3
"""Tests that `gradwire train --device cuda` on pretended GPUs has the losses of the host, to 1e-6 in FP32 and
to 1e-4 in BF16.

train_test.py GRADWIRE [few]

GRADWIRE is the command linked with the stand-in. `few` selects the variants that ctest runs.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

SMALL = ["--data", "synthetic:64", "--batch-size", "8", "--width", "16", "--depth", "2",
         "--heads", "2", "--mlp", "32", "--steps", "3"]
# Two ranks of this model need more memory than a pretended GPU has.
LARGE = ["--data", "synthetic:1024", "--batch-size", "512", "--width", "256", "--depth", "48", "--steps", "1"]
# Each variant is (ranks, flags, whether ctest runs the variant).
VARIANTS = [(1, "", True),
            (1, "--graph", True),
            (1, "--accumulate 2", False),
            (1, "--gelu tanh", False),
            (1, "--optimizer adamw", False),
            (1, "--precision bf16", True),
            (1, "--precision bf16 --gelu tanh --graph", False),
            (2, "", True),
            (2, "--compression bf16", False),
            (2, "--compression fp8", False),
            (2, "--compression int8", True),
            (2, "--compression powersgd:rank=2", True),
            (2, "--compression topk", False),
            (2, "--compression randk", False),
            (2, "--shard optimizer", True),
            (2, "--overlap-forward", False),
            (2, "--precision bf16 --compression bf16", False),
            (4, "", False),
            (4, "--compression int8:schedule=two_shot", True),
            (4, "--compression fp32:schedule=hierarchical --ranks-per-node 2", False),
            (4, "--precision bf16", False)]
REFUSED = [(2, "--graph", "GPU ranks of one process synchronize on the host"),
           (2, "--elastic 1:2", "--elastic")]


def start(gradwire, device, ranks, flags, log, model=SMALL, **variables):
    gpus = {"GRADWIRE_STANDIN_GPUS": str(ranks if device == "cuda" else 0)}
    environment = {**os.environ, **gpus, **variables}
    return subprocess.run(
        [gradwire, "train", *model, "--device", device, "--ranks",
         str(ranks), *flags.split(), *(["--log", log] if log else [])], env=environment, capture_output=True,
        text=True, timeout=300)


def losses(gradwire, device, ranks, flags, folder):
    log = pathlib.Path(folder) / f"{device}.jsonl"
    result = start(gradwire, device, ranks, flags, str(log))
    if result.returncode != 0:
        raise AssertionError(
            f"--device {device} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [r["loss"] for r in records if r["type"] == "step"
            ] + [r["test_loss"] for r in records if r["type"] == "eval"]


def difference(gradwire, ranks, flags):
    with tempfile.TemporaryDirectory() as folder:
        host, cuda = (losses(gradwire, device, ranks, flags, folder) for device in ("host", "cuda"))
    if len(host) != len(cuda) or len(host) < 3:
        raise AssertionError(f"losses of the host {host}, of the pretended GPUs {cuda}")
    return max(abs(a - b) / abs(a) for a, b in zip(host, cuda))


def host_run_problem(gradwire):
    """Returns why a host run on a machine with GPUs is wrong: it must not call CUDA, which makes a context."""
    with tempfile.TemporaryDirectory() as folder:
        calls = pathlib.Path(folder) / "calls"
        result = start(gradwire, "host", 2, "", f"{folder}/log.jsonl", GRADWIRE_STANDIN_GPUS="2",
                       GRADWIRE_TEST_LOG=str(calls))
        if result.returncode != 0:
            return result.stdout + result.stderr
        return calls.read_text() if calls.exists() else ""


def memory_problem(gradwire):
    """Returns the dry run's text if it does not say that two ranks on one GPU lack memory."""
    result = start(gradwire, "cuda", 2, "--dry-run", "", LARGE, GRADWIRE_STANDIN_GPUS="1")
    line = "Free on cuda:0: 4.29 GB per rank, which is not enough"
    return "" if line in result.stdout else result.stdout + result.stderr


def tuning_problem(gradwire):
    """Returns what is wrong with a run that times algorithms of products, and with a second that reads them."""
    with tempfile.TemporaryDirectory() as folder:
        choices = pathlib.Path(folder) / "tuning"
        text = []
        for flags in ("", "--graph"):
            result = start(gradwire, "cuda", 1, flags, "", GRADWIRE_TUNING=str(choices))
            if result.returncode != 0:
                return result.stdout + result.stderr
            text.append(choices.read_text())
        timed = text[0].count("\n") - 1
        return "" if timed > 8 and text[0] == text[1] else f"{timed} products timed, then {text[1]}"


def main():
    gradwire, few = sys.argv[1], sys.argv[2:] == ["few"]
    failures = 0
    for ranks, flags, in_ctest in VARIANTS:
        if few and not in_ctest:
            continue
        limit = 1e-4 if "--precision bf16" in flags else 1e-6
        try:
            found = difference(gradwire, ranks, flags)
            verdict = "ok" if found <= limit else f"FAILED: at most {limit} is allowed"
        except (AssertionError, subprocess.TimeoutExpired) as error:
            found, verdict = float("nan"), f"FAILED: {error}"
        failures += verdict != "ok"
        print(f"{ranks} ranks {flags or '(plain)'}: relative difference {found:.1e}: {verdict}", flush=True)
    for ranks, flags, text in REFUSED:
        with tempfile.TemporaryDirectory() as folder:
            result = start(gradwire, "cuda", ranks, flags, f"{folder}/log.jsonl")
        refused = result.returncode != 0 and text in result.stderr
        failures += not refused
        print(f"{ranks} ranks {flags}:"
              f" {'refused: ok' if refused else 'FAILED: not refused: ' + result.stdout + result.stderr}")
    for text, problem in (("a host run makes no CUDA call", host_run_problem),
                          ("a dry run compares its memory with the GPU's", memory_problem),
                          ("algorithms of products are timed once", tuning_problem)):
        found = problem(gradwire)
        failures += found != ""
        print(f"{text}: {'FAILED: ' + found if found else 'ok'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
