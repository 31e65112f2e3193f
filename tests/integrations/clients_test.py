#!/usr/bin/env python3
"""Tests Gradwire in the frameworks of docs/for-trainers.md: processes on this machine, CPU.

usage: clients_test.py FRAMEWORK WORLD SCENARIO...

Scenarios are functions of clients_ranks.py; of this file for frameworks that train once per process. With
the_example_trains as the only scenario, runs examples/frameworks.py as its documentation says.
"""
from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Dict, List

import launch

MODULES = {"fsdp2": "accelerate", "deepspeed1": "deepspeed", "deepspeed2": "deepspeed",
           "deepspeed3": "deepspeed"}
ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAINING = ROOT / "bench/harness/client_training.py"
EXAMPLE = ROOT / "integrations/python/examples/frameworks.py"
# Frameworks that train once per process, and the spec for a checkpoint: one whose bits do not depend on DDP's
# buckets.
ONCE = {"ray": "powersgd:rank=1,schedule=ring", "torchtitan": "int4", "deepspeed1": "int8",
        "deepspeed2": "int8", "deepspeed3": "int8", "megatron": ""}


class Runs:
    """Runs of a framework, each with new processes."""

    def __init__(self, framework: str, world: int, folder: str) -> None:
        self.framework, self.world, self.folder = framework, world, pathlib.Path(folder)
        self.number = 0

    def train(self, spec: str, epochs: int, name: str = "", resume: bool = False) -> Dict[str, Any]:
        """Returns the record of rank 0. Checks that all ranks have the same weights."""
        import torch
        self.number += 1
        output = self.folder / f"record{self.number}"
        problem = "tiny" if self.framework in ("torchtitan", "deepspeed3") else "regression"
        job = {"problem": problem, "spec": spec, "epochs": epochs, "resume": resume,
               "folder": str(self.folder / name) if name else ""}
        codes = launch.run_ranks(TRAINING, self.world, [self.framework, json.dumps(job), str(output)], 600)
        assert not any(codes), f"{job}: the ranks ended with {codes}"
        records: List[Dict[str, Any]] = [torch.load(f"{output}-{rank}.pt") for rank in range(self.world)]
        assert all(same(record, records[0]) for record in records), f"{job}: ranks have different weights"
        return records[0]


def same(a: Dict[str, Any], b: Dict[str, Any]) -> bool:
    import torch
    return all(torch.equal(p, q) for p, q in zip(a["weights"], b["weights"]))


def losses_are_those_without_compression(runs: Runs) -> None:
    plain = runs.train("", 3)
    for spec, most in (("fp32", 1e-5), ("int8", 0.02)):
        compressed = runs.train(spec, 3)
        apart = max(abs(a - b) for a, b in zip(plain["losses"], compressed["losses"]))
        assert len(compressed["losses"]) == len(plain["losses"]) and apart < most, f"{spec}: {apart:.3g}"
        print(f"  {spec}: losses differ by at most {apart:.2g}, from {plain['losses'][0]:.3f} to "
              f"{plain['losses'][-1]:.3f}", flush=True)
    assert not same(plain, compressed), "int8 was not in use"


def a_checkpoint_continues_bit_for_bit(runs: Runs) -> None:
    spec = ONCE[runs.framework]
    whole = runs.train(spec, 2, "resumed")
    resumed = runs.train(spec, 2, "resumed", resume=True)
    expected = whole["losses"][len(whole["losses"]) // 2:]
    assert resumed["losses"] == expected, f"losses {resumed['losses']}, expected {expected}"
    assert same(whole, resumed), "weights differ after the checkpoint"


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
                print(f"{framework}: {scenario}", flush=True)
                globals()[scenario](Runs(framework, world, folder))
            return 0
        script = pathlib.Path(__file__).with_name("clients_ranks.py")
        arguments = [framework, folder, *sys.argv[3:]]
        return launch.report(world, launch.run_ranks(script, world, arguments, 300))


if __name__ == "__main__":
    sys.exit(main())
