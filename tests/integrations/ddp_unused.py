"""Tests the hook with find_unused_parameters: steps that do not use every parameter."""
from __future__ import annotations

import copy
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import Hook, allreduce_hook

from rank import RANK, WORLD, check, say

SPECS = ["int8", "int4:rotate=hadamard", "fp8", "topk:k=4,of=64", "powersgd:rank=2",
         "powersgd:rank=2,alternate=on", "randk:ratio=0.1", "sign", "int4:residual=bf16"]


class Experts(nn.Module):
    """A common layer, and one of several others."""

    def __init__(self, experts: int, width: int = 48) -> None:
        super().__init__()
        self.common = nn.Linear(width, width, bias=False, dtype=torch.float32, device="cpu")
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.float32, device="cpu")
                                     for _ in range(experts))

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.common(inputs))


def _batch(step: int, rank: int, width: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, width, dtype=torch.float32, generator=generator)


def _residuals(hook: Hook) -> Dict[str, torch.Tensor]:
    return {name: tensor["state"]["residual"]
            for name, tensor in hook.state_dict(gather=False)["tensors"].items()}


def _steps(spec: str, in_place: bool, to_none: bool) -> None:
    torch.manual_seed(5)
    model = Experts(4)
    plain = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=in_place)
    ddp.register_comm_hook(hook := Hook(f"{spec}{',' if ':' in spec else ':'}dense=off,schedule=two_shot",
                                        model=model), allreduce_hook)
    names = [name for name, _ in model.named_parameters()]
    given = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    means = copy.deepcopy(given)
    # Experts of all ranks; None: of this rank, which differ. Then the common layer is frozen.
    plan: List[Any] = [0, 1, 2, 3, 1, 0, None, 2, None, 0, 1]
    for step, one in enumerate(plan):
        expert = RANK % 4 if one is None else one
        used = {f"experts.{e}.weight" for e in (range(WORLD) if one is None else [one])} | {"common.weight"}
        model.common.requires_grad_(step < 8)
        plain.common.requires_grad_(step < 8)
        if step >= 8:
            used.remove("common.weight")
        ddp.zero_grad(set_to_none=to_none)
        plain.zero_grad(set_to_none=True)
        before = _residuals(hook) if step > 1 else {}  # DDP rebuilds its buckets after the first step
        for module in (ddp, plain):
            module(_batch(step, RANK), expert).square().mean().backward()
        after = _residuals(hook)
        for name in names:
            parameter, own = model.get_parameter(name), plain.get_parameter(name).grad
            given[name] += own if own is not None else 0
            if name in used:
                means[name] += parameter.grad
            elif before:
                check(torch.equal(before[name], after[name]), f"{spec}: residual of {name}, step {step}")
                check(parameter.grad is None or not parameter.grad.any(), f"{spec}: gradient of {name}")
    for name in names:
        both = torch.stack([given[name].flatten(), _residuals(hook)[name]])
        dist.all_reduce(both)
        lost = (WORLD * means[name].flatten() + both[1] - both[0]).norm() / both[0].norm()
        most = 2e-2 if "residual=" in spec else 1e-5
        check(float(lost) <= most, f"{spec}: lost {float(lost):.1e} of {name}")
    hook.close()


def unused_parameters_keep_their_state() -> None:
    for spec in SPECS:
        for in_place, to_none in ((False, True), (True, False)):
            _steps(spec, in_place, to_none)


def train_experts(spec: str, steps: int = 240) -> float:
    """Trains 8 experts, of which all ranks use one in a step. Returns the mean loss of the last 40 steps."""
    torch.manual_seed(11)
    model, target = Experts(8, 32), Experts(8, 32)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(hook := Hook(spec, model=model), allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0)
    losses = []
    for step in range(steps):
        inputs, expert = _batch(step, RANK, 32), step % 8
        optimizer.zero_grad(set_to_none=True)
        loss = (ddp(inputs, expert) - target(inputs, expert).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    hook.close()
    return sum(losses[-40:]) / 40


def experts_learn_as_in_fp32() -> None:
    specs = ["int8", "int4", "topk:k=4,of=64", "powersgd:rank=1", "randk:ratio=0.1"]
    losses = {spec: train_experts(spec) for spec in ["fp32"] + specs}
    for spec in specs:  # with means that DDP throws away, the last three have three times the loss of fp32
        check(losses[spec] <= 2 * losses["fp32"], f"{spec}: {losses}")
    say("loss: " + ", ".join(f"{spec} {loss:.4f}" for spec, loss in losses.items()))


SCENARIOS = [unused_parameters_keep_their_state, experts_learn_as_in_fp32]
