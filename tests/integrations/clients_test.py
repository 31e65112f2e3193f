#!/usr/bin/env python3
"""Tests Gradwire in the frameworks of docs/for-trainers.md: processes on this machine, CPU.

usage: clients_test.py FRAMEWORK WORLD SCENARIO...

Scenarios are functions of clients_ranks.py; of this file for frameworks that train once per process. With
the_example_trains as the only scenario, runs examples/frameworks.py as its documentation says.
"""
from __future__ import annotations

import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Callable, List, Tuple

import launch
import laws

MODULES = {"fsdp2": "accelerate", "deepspeed1": "deepspeed", "deepspeed2": "deepspeed",
           "deepspeed3": "deepspeed"}
ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAINING = ROOT / "bench/harness/client_training.py"
EXAMPLE = ROOT / "integrations/python/examples/frameworks.py"
# Frameworks that train once per process, and the spec for a checkpoint: one whose bits do not depend on DDP's
# buckets.
ONCE = {"ray": "powersgd:rank=1,schedule=ring", "torchtitan": "int4", "deepspeed1": "int8",
        "deepspeed2": "int8", "deepspeed3": "int8", "megatron": ""}


Result = Tuple[List[float], List[Any]]  # the loss of each step, and the weights
Train = Callable[..., Result]  # (spec, epochs, name of the run, whether to resume after half of the epochs)


def in_new_processes(framework: str, world: int, folder: str) -> Train:
    """Returns a function that trains with new processes. Ranks must agree; the result is rank 0's."""
    numbers = itertools.count()

    def train(spec: str, epochs: int, name: str = "", resume: bool = False) -> Result:
        import torch
        output = f"{folder}/record{next(numbers)}"
        problem = "tiny" if framework in ("torchtitan", "deepspeed3") else "regression"
        job = {"problem": problem, "spec": spec, "epochs": epochs, "resume": resume,
               "folder": f"{folder}/{name}" if name else ""}
        codes = launch.run_ranks(TRAINING, world, [framework, json.dumps(job), output], 600)
        assert not any(codes), f"{job}: the ranks ended with {codes}"
        records = [torch.load(f"{output}-{rank}.pt") for rank in range(world)]
        assert all(laws.same_bits(r["weights"], records[0]["weights"]) for r in records), f"{job}: differ"
        return records[0]["losses"], records[0]["weights"]

    return train


def losses_are_those_without_compression(train: Train, _: str) -> None:
    plain, weights = train("", 3)
    for spec, most in (("fp32", 1e-5), ("int8", 0.02)):
        losses, compressed = train(spec, 3)
        apart = max(abs(a - b) for a, b in zip(plain, losses))
        assert len(losses) == len(plain) and apart < most, f"{spec}: losses differ by {apart:.3g}"
    assert not laws.same_bits(weights, compressed), "int8 was not in use"


def a_checkpoint_continues_bit_for_bit(train: Train, spec: str) -> None:
    losses, weights = train(spec, 2, "resumed")
    again, resumed = train(spec, 2, "resumed", True)
    assert again == losses[len(losses) // 2:], f"losses {again}, expected the end of {losses}"
    assert laws.same_bits(weights, resumed), "weights differ after the checkpoint"


def the_example_trains(framework: str, world: int) -> int:
    """Returns the exit status of the example, started by torchrun or, for Ray, by itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *([] if framework == "ray" else torchrun), str(EXAMPLE), framework]
    return subprocess.run(command, timeout=280).returncode


def main() -> int:
    framework, world = sys.argv[1], int(sys.argv[2])
    module = MODULES.get(framework, framework)
    if importlib.util.find_spec(module) is None:
        print(f"SKIPPED: {module} is not installed: scripts/frameworks.sh install")
        return 77
    if sys.argv[3:] == [the_example_trains.__name__]:
        return the_example_trains(framework, world)
    with tempfile.TemporaryDirectory() as folder:
        if framework in ONCE:
            for scenario in sys.argv[3:]:
                globals()[scenario](in_new_processes(framework, world, folder), ONCE[framework])
            return 0
        script = pathlib.Path(__file__).with_name("clients_ranks.py")
        arguments = [framework, folder, *sys.argv[3:]]
        return launch.report(world, launch.run_ranks(script, world, arguments, 300))


if __name__ == "__main__":
    sys.exit(main())
