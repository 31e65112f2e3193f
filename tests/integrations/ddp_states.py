"""Tests the hook's state: gathered on rank 0, loaded by name, and rejected for another model."""
from __future__ import annotations

import io
import logging
import os
import pathlib
import pickle
import tempfile
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import _hook_state
from gradwire.torch import Hook, allreduce_hook, compress

from rank import RANK, WORLD, check, refused, say

SPEC = "int4:schedule=ring,dense=off"


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def train(ddp: nn.Module, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()


def residuals(state: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    return {name: t["state"]["residual"] for name, t in state["tensors"].items() if "residual" in t["state"]}


def equal(some: Dict[str, torch.Tensor], others: Dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(value, others[name]) for name, value in some.items())


class Warnings(logging.Handler):
    """Collects Gradwire's warnings in a with block."""

    def __enter__(self) -> List[str]:
        self.texts: List[str] = []
        logging.getLogger("gradwire").addHandler(self)
        return self.texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("gradwire").removeHandler(self)


def rank_0_saves_the_states_of_all() -> None:
    ddp = DistributedDataParallel(model())
    hook = compress(ddp, SPEC)
    train(ddp)
    own = residuals(hook.state_dict(gather=False))
    check(len(own) == 6 and all(float(r.abs().max()) > 0 for r in own.values()), "no residuals")
    folder: List[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = pathlib.Path(folder[0], "state")
    state = hook.state_dict()
    check(len(state.get("others", [])) == (WORLD - 1 if RANK == 0 else 0), "others")
    if RANK == 0:
        torch.save({"hook": state}, path)
    dist.barrier()
    saved = torch.load(path, weights_only=True)["hook"]  # plain dictionaries, texts, numbers and tensors
    other = DistributedDataParallel(model())
    loaded = compress(other, SPEC)
    loaded.load_state_dict(saved)
    check(equal(residuals(loaded.state_dict(gather=False)), own), "another rank's residuals")
    train(other, 1)
    check(loaded.state_dict()["steps"] == 4, "steps")
    if RANK != 0:
        refused(lambda: loaded.load_state_dict({k: v
                                                for k, v in saved.items() if k != "others"}),
                gradwire.BadArgument, "call hook.state_dict() on every rank and save rank 0's result")
    dist.barrier()
    if RANK == 0:
        path.unlink()
        os.rmdir(folder[0])
    loaded.close()
    hook.close()
    say("rank 0 saves what all ranks load, also with weights_only=True")


def a_rank_that_saves_alone_is_told() -> None:
    ddp = DistributedDataParallel(model())
    hook = compress(ddp, SPEC)
    train(ddp)
    patience, _hook_state._PATIENCE_S = _hook_state._PATIENCE_S, 0.2
    if RANK == 0:
        hook._timeout_s = 1.0
        with Warnings() as warnings:
            refused(hook.state_dict, gradwire.CommFailed, "rank 1", "on every rank", "gather=False")
        check(len(warnings) == 1 and "rank 1" in warnings[0], str(warnings))
        hook._timeout_s = 60.0
    dist.barrier()
    _hook_state._PATIENCE_S = patience
    check(len(hook.state_dict().get("others", [])) == (WORLD - 1 if RANK == 0 else 0), "later all ranks can")
    hook.close()
    say("a rank that calls state_dict() alone gets an error, and later calls work")


def frozen_parameters_are_found_by_name() -> None:
    def compressed(frozen: bool) -> Any:
        made = model()
        for parameter in made[0].parameters():
            parameter.requires_grad_(not frozen)
        ddp = DistributedDataParallel(made)
        return ddp, compress(ddp, SPEC)

    for frozen_first in (True, False):
        ddp, hook = compressed(frozen_first)
        train(ddp)
        saved = hook.state_dict(gather=False)
        hook.close()
        other, loaded = compressed(not frozen_first)
        loaded.load_state_dict(saved)
        with Warnings() as warnings:
            train(other, 1)
        check(len(warnings) == (1 if frozen_first else 0), str(warnings))
        check(not frozen_first or ("2 parameters" in warnings[0] and "begin at zero" in warnings[0]),
              str(warnings))
        check(loaded.state_dict(gather=False)["steps"] == 4, "steps")
        train(other, 2)
        loaded.close()
    # One hook serves the model before and after its parameters are unfrozen.
    made = model()
    for parameter in made[0].parameters():
        parameter.requires_grad_(False)
    hook = Hook(SPEC, model=made)
    first = DistributedDataParallel(made)
    first.register_comm_hook(hook, allreduce_hook)
    train(first)
    kept = residuals(hook.state_dict(gather=False))
    for parameter in made[0].parameters():
        parameter.requires_grad_(True)
    second = DistributedDataParallel(made)
    second.register_comm_hook(hook, allreduce_hook)
    train(second, 1)
    now = residuals(hook.state_dict(gather=False))
    check(
        len(kept) == 4 and len(now) == 6 and hook.state_dict(gather=False)["steps"] == 4,
        f"{sorted(kept)} {sorted(now)}")
    hook.close()
    say("states of a model with frozen parameters load without them, and the other way round")


def a_state_of_another_model_is_refused() -> None:
    ddp = DistributedDataParallel(model())
    hook = compress(ddp, SPEC)
    train(ddp)
    state = hook.state_dict(gather=False)
    hook.close()
    other = compress(DistributedDataParallel(nn.ModuleDict({"x": nn.Linear(3, 3)})), SPEC)
    refused(lambda: other.load_state_dict(state), gradwire.BadArgument, "another model", "bias", "x.weight")
    refused(lambda: other.load_state_dict({**state, "tensors": {"parameter 0": {}}}), gradwire.BadArgument,
            "in place of parameter names", "parameter 0", "Hook()")
    other.close()
    wider = DistributedDataParallel(nn.Sequential(nn.Linear(16, 65), nn.Tanh(), nn.Linear(65, 4)))
    hook = compress(wider, SPEC)
    hook.load_state_dict(state)
    refused(lambda: train(wider, 1), RuntimeError, "another model", "64 x 16", "65 x 16")
    hook.close()
    say("states of another model are refused, with names and shapes")


def one_hook_is_for_one_model() -> None:
    for hook in (Hook(SPEC), Hook(SPEC, model=model())):
        made = [model(), model()]
        if hook._names.are_a_models:
            hook = Hook(SPEC, model=made[0])
            refused(lambda: hook.name_parameters(made[1]), gradwire.BadArgument, "0.weight",
                    "a hook for each model")
        models = [DistributedDataParallel(m) for m in made]
        for ddp in models:
            ddp.register_comm_hook(hook, allreduce_hook)
        train(models[0], 2)
        refused(lambda: train(models[1], 1), RuntimeError, "a hook for each model")
        hook.close()
    say("a hook that is given to a second model is refused")


def a_pickled_hook_needs_trust() -> None:
    ddp = DistributedDataParallel(model())
    hook = compress(ddp, SPEC)
    train(ddp)
    file = io.BytesIO()
    torch.save(hook, file)
    file.seek(0)
    refused(lambda: torch.load(file, weights_only=True), pickle.UnpicklingError)
    file.seek(0)
    options = {"weights_only": False} if hasattr(torch, "compile") else {}
    copied = torch.load(file, **options)
    check(equal(residuals(copied.state_dict()), residuals(hook.state_dict(gather=False))), "residuals")
    copied.close()
    hook.close()
    say("a pickled hook loads with weights_only=False, its state_dict() with True")


SCENARIOS: List[Callable[[], None]] = [
    rank_0_saves_the_states_of_all, a_rank_that_saves_alone_is_told, frozen_parameters_are_found_by_name,
    a_state_of_another_model_is_refused, one_hook_is_for_one_model, a_pickled_hook_needs_trust]
