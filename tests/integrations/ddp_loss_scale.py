"""The DDP hook with a GradScaler: docs/for-pytorch.md, "Loss scale"."""
from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch import Hook, compress

import loss_scale
from ddp_training import RANK, check, say
from ddp_states import refused

SPECS = ["int4:schedule=ring", "int8:schedule=tree", "bf16:schedule=ring", "powersgd:rank=2,schedule=ring",
         "powersgd:rank=2,alternate=on,wire=int8,schedule=ring", "qsgd:schedule=ring", "randk:ratio=0.25,schedule=ring"]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def _batches(overflows: List[int], steps: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(RANK)
    return [{"x": torch.randn(8, 16, generator=generator), "overflow": i in overflows} for i in range(steps)]


def _trained(spec: str, batches: List[Dict[str, Any]], with_scaler: Any = None, follow: bool = True) -> torch.Tensor:
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
    # Scales are powers of two, which round nothing, so a run whose residuals have the right scale, and are as if skipped steps
    # had never been, computes the same bits.
    for spec in SPECS:
        batches = _batches([2, 3, 9, 17], 20)  # the first step has other buckets than the others
        plain = _trained(spec, batches)
        followed = _trained(spec, batches, loss_scale.scaler())
        worst = float((plain - followed).abs().max())
        check(worst == 0, f"{spec}: parameters differ by {worst:.2e} from a run without a scaler")
        apart = float((plain - _trained(spec, batches, loss_scale.scaler(), follow=False)).abs().max())
        check(apart > 0, f"{spec}: this test would not notice residuals of another scale")
        say(f"{spec}: bit for bit a run without a scaler; without use_scaler() up to {apart:.1e} apart")


def what_does_not_scale_is_refused() -> None:
    hook = Hook("int4")
    refused(lambda: hook.use_scaler(3.0), gradwire.BadArgument, "float", "GradScaler")
    hook.close()
    elastic = Hook("int4", min_ranks=1)
    refused(lambda: elastic.use_scaler(loss_scale.scaler()), gradwire.BadArgument, "min_ranks")
    elastic.close()
    scaler = loss_scale.scaler()
    first, second = Hook("int4"), Hook("int8")
    first.use_scaler(scaler)
    second.use_scaler(scaler)
    first.close()
    scaler.update(4.0)
    second.close()
    scaler.update(8.0)
    check(scaler.get_scale() == 8.0, "update() was not passed on")
    say("hooks of several models share a scaler; what is none is refused")


SCENARIOS = [a_scaled_run_has_the_bits_of_one_without, what_does_not_scale_is_refused]
