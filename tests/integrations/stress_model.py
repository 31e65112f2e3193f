"""Defines the models of stress_torch.py."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch
from stress import SHAPES, TIMEOUT_S


class Module(torch.nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, given: Dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * values).sum() for name, values in given.items())


class Scaler:
    """A loss scale that the sequence chooses."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get_scale(self) -> float:
        return self.scale

    def update(self, new_scale: Optional[float] = None) -> None:
        """Sets the scale. Without `new_scale` halves the scale, as after a skipped step."""
        self.scale = self.scale / 2 if new_scale is None else new_scale


class Model:
    """A module. On the members of a group, it is in a DistributedDataParallel over the group."""

    def __init__(self, number: int, spec: str, group: Any, part: List[int]) -> None:
        self.number, self.spec, self.group, self.part = number, spec, group, part
        self.module = Module()
        self.names = list(SHAPES)
        self.scaler = Scaler()
        self.ddp: Optional[DistributedDataParallel] = None
        self.hook: Any = None
        self.closed = False
        self.dead = False  # backward() has raised, so PyTorch's reducer is unusable
        self.may_refuse = False  # the next backward may raise, for a state of another model
        self.saved: Any = None
        self.entry: Any = None  # an entry of Subject.groups

    @property
    def scale(self) -> float:
        return self.scaler.scale

    def wrap(self) -> None:
        for name in SHAPES:
            getattr(self.module, name).requires_grad_(name in self.names)
        self.ddp = DistributedDataParallel(self.module, process_group=self.group, bucket_cap_mb=0.012)

    def compress(self) -> None:
        self.use(gradwire.torch.compress(self.ddp, self.spec, timeout_s=TIMEOUT_S))
        self.closed = False

    def use(self, hook: Any) -> None:
        self.hook = hook
        hook.use_scaler(self.scaler)
