"""Tests FSDP2 with gradients="auto": docs/for-fsdp.md."""
from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire import _auto
from gradwire.fsdp import compress

from fsdp_training import Run, difference, new_model
from rank import RANK, WORLD, check, refused, say

_LIST = ("bf16", "int8", "int4")
REQUEST = {"gradients": "auto:error=0.03,allow=" + "+".join(_LIST), "weights": "fp32"}
_STEPS = 30


@contextlib.contextmanager
def _chooses_int8() -> Iterator[None]:
    """Makes the library's choice INT8: which format is the fastest depends on the machine."""
    measured = _auto.choose

    def choose(comm: Any, specs: Any, gradients: Any, **options: Any) -> Any:
        int8 = next(spec for spec in specs if spec.startswith("int8"))
        return measured(comm, specs, gradients, **options)._replace(spec=int8)

    _auto.choose = choose
    try:
        yield
    finally:
        _auto.choose = measured


def _chosen_at(run: Run) -> int:
    """Trains until the choice. Returns the number of steps in FP32."""
    for step in range(_STEPS):
        run.step(step)
        if run.handle.choice is not None:
            return step
    raise AssertionError("no choice")


def auto_measures_formats_and_all_ranks_choose_alike() -> None:
    run = Run({"gradients": "auto"})
    check(run.handle.choice is None and run.handle.residual_bytes == 0, "before the first step")
    first = _chosen_at(run)
    check(first >= _auto.OBSERVED + 2, f"chosen before step {first}")
    choice = run.handle.choice
    specs: Any = [None] * WORLD
    dist.all_gather_object(specs, choice["spec"])
    check(len(set(specs)) == 1, f"{specs}")
    rows = {row["spec"]: row["error"] for row in choice["candidates"]}
    check(list(rows) == ["fp32", "bf16", "int8", "int4"], f"{list(rows)}")
    for spec, least, most in (("fp32", 0, 1e-6), ("bf16", 3e-4, 5e-3), ("int8", 5e-4, 4e-2),
                              ("int4", 0.02, 0.6)):
        check(least <= rows[spec] <= most, f"{spec}: error {rows[spec]}")
    run.close()
    say(f"auto on {WORLD} ranks: {specs[0]}, chosen after {first} steps")


def auto_has_the_bits_of_fp32_and_then_of_the_choice() -> None:
    with _chooses_int8():
        run = Run(REQUEST)
        first = _chosen_at(run)
    check(run.handle.choice["spec"] == "int8", f"chose {run.handle.choice}")
    check(run.handle.residual_bytes > 0, "the choice has error feedback")
    for step in range(first + 1, first + 4):
        run.step(step)
    model = new_model()
    other = Run({"gradients": "fp32", "weights": "fp32"}, model=model)
    for step in range(first):
        other.step(step)
    other.handle.close()
    other.handle = compress(model, "int8", "fp32", timeout_s=120)
    for step in range(first, first + 4):
        other.step(step)
    apart = difference(run.parameters(), other.parameters())
    check(apart == 0, f"parameters differ by {apart:.1e}")
    # A state has the choice, which another run takes over with the residuals.
    state = run.handle.state_dict()
    resumed = Run(REQUEST)
    resumed.handle.load_state_dict(state)
    check(resumed.handle.choice == {"spec": "int8", "loaded": True}, f"{resumed.handle.choice}")
    for name, entry in resumed.handle.state_dict()["tensors"].items():
        check(torch.equal(entry["residual"], state["tensors"][name]["residual"]), name)
    for one in (run, other, resumed):
        one.close()


def auto_of_fsdp_refuses_what_it_cannot_choose() -> None:
    for spec, error, *words in (
        ("auto:allow=powersgd:rank=2", gradwire.Unsupported, "powersgd:rank=2", "whole tensors"),
        ("auto:error=x", gradwire.BadArgument, "'error=x'", _auto.GRAMMAR),
        ("auto:allow=int9", gradwire.BadArgument, "int9"),
    ):
        refused(lambda spec=spec: Run({"gradients": spec}), error, *words)
    # Two groups of ranks could choose apart.
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicas", "shards"))
    for each in (mesh, mesh["shards"]):
        refused(lambda each=each: Run({"gradients": "auto"}, mesh=each), gradwire.Unsupported,
                "over all ranks")
