"""Tests FSDP2 with a GradScaler: docs/for-fsdp.md, "Loss scale"."""
from __future__ import annotations

import gc
import weakref
from typing import Any, Dict, List

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.fsdp import compress

import loss_scale
from rank import RANK, WORLD, check, refused, say


def _trained(batches: List[Dict[str, Any]], residual: str, options: Dict[str, Any], with_scaler: Any = None,
             follow: bool = True) -> torch.Tensor:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    handle = compress(model, "int4", "fp32", residual, dense=False, timeout_s=60)
    if with_scaler is not None and follow:
        handle.use_scaler(with_scaler)
    closing = weakref.WeakMethod(handle.close)
    del handle  # training continues without the handle
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scales = loss_scale.train(model, optimizer, batches, with_scaler)
    check(with_scaler is None or len(set(scales)) >= 3, f"the scale did not change enough: {scales}")
    close = closing()
    check(close is not None, "the handle is gone")
    close()
    return torch.cat([p.detach().full_tensor().flatten() if isinstance(p, DTensor) else p.detach().flatten()
                      for p in model.parameters()])


def a_scaled_run_has_the_bits_of_one_without() -> None:
    # See ddp_loss_scale.py.
    generator = torch.Generator().manual_seed(RANK)
    batches = [{"x": torch.randn(8, 16, generator=generator), "overflow": i in (0, 3, 9, 17)}
               for i in range(20)]
    meshes: List[Dict[str, Any]] = [{}]
    if WORLD == 4:
        meshes.append({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))})
    for options in meshes:
        for residual in ("fp32", "bf16", "int8"):
            what = f"residual={residual}{', replicas' if options else ''}"
            plain = _trained(batches, residual, options)
            worst = float((plain - _trained(batches, residual, options, loss_scale.scaler())).abs().max())
            check(worst == 0, f"{what}: parameters differ by {worst:.2e} from a run without a scaler")
            apart = float(
                (plain - _trained(batches, residual, options, loss_scale.scaler(), follow=False)).abs().max())
            check(apart > 0, f"{what}: this test would not notice residuals of another scale")
            say(f"{what}: bit for bit a run without a scaler; without use_scaler() up to {apart:.1e} apart")


def half_precision_trains_with_a_scaler() -> None:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(RANK)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16))
    handle = compress(model, "int4", "fp32", timeout_s=60)
    scaler = loss_scale.scaler(init_scale=2.0 ** 24, growth_interval=5)  # first gradients are infinite
    handle.use_scaler(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(64, 16, generator=generator).half()
    losses, scales = [], [scaler.get_scale()]
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :4].float()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    check(losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}")
    skipped = sum(after < before for before, after in zip(scales, scales[1:]))
    check(skipped > 1 and max(scales[-5:]) > min(scales),
          f"steps were skipped {skipped} times, with scales {scales}")
    handle.close()
    refused(lambda: handle.use_scaler(scaler), gradwire.BadHandle)
    say(f"float16: loss {losses[0]:.3f} to {losses[-1]:.3f}, {skipped} steps skipped")
