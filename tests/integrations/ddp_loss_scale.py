"""Scenarios of the DDP hook with a GradScaler: docs/for-pytorch.md, "Loss scale"."""
from __future__ import annotations

import copy
import pickle
from typing import Any, List

import torch

import gradwire
import gradwire.torch
import laws
import loss_scale
from gradwire._hook_state import follow
from gradwire.torch import Hook, compress
from rank import RANK, check, refused
from scenarios import scenario
from training import closing, ddp_of, flat, residuals, small

SPECS = ["int4:schedule=ring", "int8:schedule=tree", "bf16:schedule=ring", "powersgd:rank=2,schedule=ring",
         "powersgd:rank=2,alternate=on,wire=int8,schedule=ring", "qsgd:schedule=ring",
         "randk:ratio=0.25,schedule=ring"]


@scenario()
def a_scaled_run_has_the_bits_of_one_without() -> None:
    # Scales are powers of two, which cause no rounding errors. So a run computes the same bits if its
    # residuals have the right scale and skipped steps do not change them.
    generator = torch.Generator().manual_seed(RANK)
    batches = [{"x": torch.randn(8, 16, generator=generator), "overflow": i in (2, 3, 9, 17)}
               for i in range(20)]  # the first step has other buckets than later steps
    comm = gradwire.torch.communicator(timeout_s=60)
    for spec in SPECS:
        weights = []
        for scaled, followed in ((False, False), (True, True), (True, False)):
            ddp = ddp_of(small(), bucket_kb=3)
            scaler = loss_scale.scaler() if scaled else None
            with closing(compress(ddp, spec, comm=comm)) as hook:
                if followed:
                    hook.use_scaler(scaler)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
                scales = loss_scale.train(ddp, optimizer, batches, scaler)
            check(not scaled or len(set(scales)) >= 3, f"the scale did not change enough: {scales}")
            weights.append(flat(ddp))
        check(torch.equal(weights[0], weights[1]), f"{spec}: parameters differ from a run without a scaler")
        check(not torch.equal(weights[0], weights[2]), f"{spec}: residuals of another scale are not noticed")
    comm.close()


class OwnScaler:
    scale = 4.0

    def get_scale(self) -> float:
        return self.scale

    def update(self) -> str:
        self.scale /= 2
        return "updated"


class Listener:
    def __init__(self, name: str, told: List[str]) -> None:
        self.name, self.told = name, told

    def hear(self, factor: float, skipped: bool) -> None:
        self.told.append(f"{self.name} {factor} {skipped}")


@scenario(2)
def hooks_share_a_scaler_and_leave_nothing_in_it() -> None:
    scaler, told = OwnScaler(), []  # type: ignore[var-annotated]
    listeners = [Listener(name, told) for name in "abc"]
    ends = [follow(scaler, None, listener.hear) for listener in listeners]
    check(scaler.update() == "updated" and told == ["a 0.5 True", "b 0.5 True", "c 0.5 True"], f"{told}")
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        told.clear()
        other.update()
        check(other.scale == 1 and scaler.scale == 2 and not told, f"a copy of the scaler told {told}")
    ends[2]()
    del listeners[0]
    scaler.update()
    check(told == ["b 0.5 True"], f"after one has ended and one is gone: {told}")
    ends[1]()
    ends[0]()
    check("update" not in vars(scaler), "something is left in the scaler")
    disabled, listener = torch.cuda.amp.GradScaler(enabled=False), Listener("d", told)
    told.clear()
    end = follow(disabled, torch.optim.SGD([torch.zeros(1)], lr=0.1), listener.hear)
    disabled.update()
    check(told == ["d 1.0 False"], f"a disabled GradScaler: {told}")
    end()


class Wrapper:
    """A wrapper like accelerate's: its step() passes the wrapped optimizer to the scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@scenario()
def a_skipped_step_undoes_residuals_of_its_model_only() -> None:
    # Two models under one scaler, as in a GAN: one model's step is skipped, and the other's is not.
    models = [ddp_of(small()) for _ in range(2)]
    hooks = [compress(model, "int4:schedule=ring") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    scaler: Any = loss_scale.scaler(growth_interval=1000)
    hooks[0].use_scaler(scaler, Wrapper(optimizers[0]))
    hooks[1].use_scaler(scaler, optimizers[1])
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 and model is models[0] else 1.0
            scaler.scale(model(torch.ones(8, 16) * (RANK + 1)).square().mean() * factor).backward()
            scaler.step(optimizer)
        before = [{name: r * 0.5 for name, r in residuals(hook).items()} for hook in hooks]
        scaler.update()
    same = [laws.same_bits(residuals(hook), halved) for hook, halved in zip(hooks, before)]
    check(same == [False, True], f"residuals that were only rescaled: {same}")
    for hook in hooks:
        hook.close()


@scenario(2)
def hooks_that_cannot_follow_a_scaler_refuse_it() -> None:
    for hook, scaler, *words in ((Hook("int4"), 3.0, "float", "GradScaler"),
                                 (Hook("int4", min_ranks=1), OwnScaler(), "min_ranks"),
                                 (Hook("int8:max_norm=1"), OwnScaler(), "max_norm")):
        with closing(hook):
            refused(lambda: hook.use_scaler(scaler), gradwire.BadArgument, *words)
