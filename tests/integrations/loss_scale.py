"""Provides a GradScaler for the host, which some versions of PyTorch lack, and training with it."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from torch import nn


class _HostScaler:
    """torch.amp.GradScaler for tensors on the host."""

    def __init__(self, init_scale: float, growth_interval: int) -> None:
        self._scale, self._interval = init_scale, growth_interval
        self._good = 0
        self._skipped: Dict[int, bool] = {}  # keys: id() of the optimizer

    def get_scale(self) -> float:
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        skip = self._skipped[id(optimizer)] = not all(bool(g.isfinite().all()) for g in gradients)
        if not skip:
            for g in gradients:
                g.div_(self._scale)
            optimizer.step()

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Dict[str, float]:
        return {"cpu": float(self._skipped.get(id(optimizer), False))}

    def update(self, new_scale: Optional[float] = None) -> None:
        skip = any(self._skipped.values())
        self._skipped.clear()
        self._good = 0 if skip else self._good + 1
        if new_scale is not None:
            self._scale = new_scale
        elif skip:
            self._scale *= 0.5
        elif self._good == self._interval:
            self._scale, self._good = self._scale * 2, 0


def scaler(init_scale: float = 65536.0, growth_interval: int = 3) -> Any:
    if hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"):  # PyTorch 2.3
        return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    return _HostScaler(init_scale, growth_interval)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: List[Dict[str, Any]],
          with_scaler: Any = None) -> List[float]:
    """Trains on each batch, {"x": inputs, "overflow": whether its loss is infinite}.

    Without a scaler, skips batches with an infinite loss. Returns the scale after each step.
    """
    scales = []
    for batch in batches:
        if with_scaler is None and batch["overflow"]:
            continue
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        if with_scaler is None:
            loss.backward()
            optimizer.step()
            continue
        with_scaler.scale(loss * (float("inf") if batch["overflow"] else 1.0)).backward()
        with_scaler.step(optimizer)
        with_scaler.update()
        scales.append(with_scaler.get_scale())
    return scales
