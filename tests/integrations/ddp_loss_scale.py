"""Tests the DDP hook with a GradScaler: docs/for-pytorch.md, "Loss scale"."""
from __future__ import annotations

import copy
import pickle
from typing import Any, Dict, List

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._hook_state import follow
from gradwire.torch import Hook, compress

import loss_scale
from rank import RANK, check, refused, say
from ddp_states import equal, residuals

SPECS = [
    "int4:schedule=ring", "int8:schedule=tree", "bf16:schedule=ring", "powersgd:rank=2,schedule=ring",
    "powersgd:rank=2,alternate=on,wire=int8,schedule=ring", "qsgd:schedule=ring",
    "randk:ratio=0.25,schedule=ring"
]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def _batches(overflows: List[int], steps: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(RANK)
    return [{"x": torch.randn(8, 16, generator=generator), "overflow": i in overflows} for i in range(steps)]


def _trained(spec: str, batches: List[Dict[str, Any]], with_scaler: Any = None,
             follow: bool = True) -> torch.Tensor:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.003)
    hook = compress(model, spec)
    if with_scaler is not None and follow:
        hook.use_scaler(with_scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scales = loss_scale.train(model, optimizer, batches, with_scaler)
    if with_scaler is not None:
        check(len(set(scales)) >= 3, f"the scale did not change enough: {scales}")
    hook.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def a_scaled_run_has_the_bits_of_one_without() -> None:
    # Scales are powers of two, which cause no rounding errors. So a run computes the same bits if its
    # residuals have the right scale and skipped steps do not change them.
    for spec in SPECS:
        batches = _batches([2, 3, 9, 17], 20)  # the first step has other buckets than later steps
        plain = _trained(spec, batches)
        followed = _trained(spec, batches, loss_scale.scaler())
        worst = float((plain - followed).abs().max())
        check(worst == 0, f"{spec}: parameters differ by {worst:.2e} from a run without a scaler")
        apart = float((plain - _trained(spec, batches, loss_scale.scaler(), follow=False)).abs().max())
        check(apart > 0, f"{spec}: this test would not notice residuals of another scale")
        say(f"{spec}: bit for bit a run without a scaler; without use_scaler() up to {apart:.1e} apart")


class _OwnScaler:
    scale = 4.0

    def get_scale(self) -> float:
        return self.scale

    def update(self) -> str:
        self.scale /= 2
        return "updated"


def hooks_share_a_scaler() -> None:
    scaler = _OwnScaler()
    told: List[str] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def hear(self, factor: float, skipped: bool) -> None:
            told.append(f"{self.name} {factor} {skipped}")

    listeners = [Listener(name) for name in "abc"]
    ends = [follow(scaler, None, listener.hear) for listener in listeners]
    check(scaler.update() == "updated" and told == ["a 0.5 True", "b 0.5 True", "c 0.5 True"], f"{told}")
    copied, unpickled = copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))
    for other in (copied, unpickled):
        told.clear()
        other.update()
        check(other.scale == 1 and scaler.scale == 2 and not told,
              f"a copy of the scaler told {told}, {other.scale}, {scaler.scale}")
    ends[2]()
    del listeners[0]
    scaler.update()
    check(told == ["b 0.5 True"], f"after one has ended and one is gone: {told}")
    ends[1]()
    ends[0]()
    check("update" not in vars(scaler), "something is left in the scaler")
    disabled, listener = torch.cuda.amp.GradScaler(enabled=False), Listener("d")
    told.clear()
    end = follow(disabled, torch.optim.SGD([torch.zeros(1)], lr=0.1), listener.hear)
    disabled.update()
    check(told == ["d 1.0 False"], f"a disabled GradScaler: {told}")
    end()
    say("hooks follow a scaler, end in any order, and leave nothing in it or its copies")


class Wrapper:
    """A wrapper like accelerate's: its step() passes the wrapped optimizer to the scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def another_optimizers_skip_undoes_nothing() -> None:
    # Two models under one scaler, as in a GAN: one model's step is skipped, and the other's is not.
    models = [DistributedDataParallel(_model()) for _ in range(2)]
    hooks = [compress(model, "int4:schedule=ring") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    scaler = loss_scale.scaler(growth_interval=1000)
    wrapped = Wrapper(optimizers[0])
    for hook, optimizer in zip(hooks, [wrapped, optimizers[1]]):
        hook.use_scaler(scaler, optimizer)
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            overflow = step == 2 and model is models[0]
            scaler.scale(
                model(torch.ones(8, 16) * (RANK + 1)).square().mean() *
                (float("inf") if overflow else 1.0)).backward()
            scaler.step(optimizer)
        before = [residuals(hook.state_dict(gather=False)) for hook in hooks]
        scaler.update()
    after = [residuals(hook.state_dict(gather=False)) for hook in hooks]
    halved = {name: r * 0.5 for name, r in before[1].items()}
    check(equal(after[1], halved), "residuals of the model that has taken its step were set back")
    check(not equal(after[0], {name: r * 0.5
                               for name, r in before[0].items()}), "those of the other were not")
    for hook in hooks:
        hook.close()
    say("a step that one optimizer skips sets back the residuals of its model only")


def what_does_not_scale_is_refused() -> None:
    hook = Hook("int4")
    refused(lambda: hook.use_scaler(3.0), gradwire.BadArgument, "float", "GradScaler")
    hook.close()
    elastic = Hook("int4", min_ranks=1)
    refused(lambda: elastic.use_scaler(loss_scale.scaler()), gradwire.BadArgument, "min_ranks")
    clips = Hook("int8:max_norm=1")
    refused(lambda: clips.use_scaler(loss_scale.scaler()), gradwire.BadArgument, "max_norm")
    clips.close()
    elastic.close()
    say("what is no scaler is refused")


SCENARIOS = [
    a_scaled_run_has_the_bits_of_one_without, another_optimizers_skip_undoes_nothing, hooks_share_a_scaler,
    what_does_not_scale_is_refused
]
