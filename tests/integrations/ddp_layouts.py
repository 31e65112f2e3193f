"""Tests every type and layout of a parameter under the hook. docs/for-pytorch.md has the table."""
from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch import Hook, compress

from rank import RANK, WORLD, check, refused, say

TODAY = hasattr(torch, "compile")


class Of(nn.Module):
    """Parameters whose gradients differ between ranks and between elements."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, factor: float) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for p in self.values:
            weights = torch.arange(p.numel(), dtype=torch.float64).view(p.shape).remainder(7) + factor
            value = p.to(torch.complex128) * (1 + 0.5j) if p.is_complex() else p.to(torch.float64)
            loss = loss + ((value.real + 2 * value.imag if p.is_complex() else value) * weights).sum()
        return loss


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6, bias=False)
        self.other = nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight

    def forward(self, factor: float) -> torch.Tensor:
        return self.other(self.one(torch.full((2, 6), factor))).sum()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=True)
        self.linear = nn.Linear(3, 2)

    def forward(self, factor: float) -> torch.Tensor:
        return (self.linear(self.embedding(torch.tensor([RANK, 9, 9]))) * factor).sum()


def uneven(dtype: torch.dtype) -> nn.Module:
    """Returns a module with several parameters in one bucket, so that a wrong offset shows."""
    return Of(torch.ones(5, 3, dtype=dtype), torch.ones(7, dtype=dtype), torch.ones(2, 3, 4, dtype=dtype))


CELLS: Dict[str, Callable[[], nn.Module]] = {
    **{str(dtype): lambda dtype=dtype: uneven(dtype)  # type: ignore[misc]
       for dtype in (torch.float32, torch.float64, torch.float16)},
    "float32 and float64": lambda: Of(torch.ones(5, 3), torch.ones(4, dtype=torch.float64), torch.ones(3)),
    "frozen integers": lambda: with_integers(),
    "transposed": lambda: Of(torch.ones(4, 6).t(), torch.ones(3)),
    "channels_last": lambda: Of(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.ones(3)),
    "strided": lambda: Of(torch.ones(8, 6)[::2, ::3], torch.ones(3)),
    "0-dim": lambda: Of(torch.tensor(2.0), torch.ones(3), torch.tensor(1.0)),
    "tied": Tied,
    "sparse": Sparse,
}
# Without a hook, DDP on Gloo also rejects empty parameters in PyTorch 1.13, and other types in PyTorch 2.6.
if TODAY:
    CELLS["empty"] = lambda: Of(torch.ones(3), torch.ones(0, 4), torch.ones(5), torch.ones(0))
if torch.__version__ >= (2, 9):
    for dtype in (torch.bfloat16, torch.complex64, torch.complex128):
        CELLS[str(dtype)] = lambda dtype=dtype: uneven(dtype)  # type: ignore[misc]
    CELLS["float32 and complex64"] = lambda: Of(torch.ones(3), torch.ones(4, 2, dtype=torch.complex64),
                                                torch.ones(5))


def with_integers() -> nn.Module:
    model = Of(torch.ones(4))
    model.count = nn.Parameter(torch.arange(3), requires_grad=False)  # type: ignore[assignment]
    model.register_buffer("steps", torch.arange(3))
    return model


def gradients(model: nn.Module) -> List[torch.Tensor]:
    found = [
        p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None
    ]
    return [torch.view_as_real(g.to(torch.complex128)) if g.is_complex() else g.double() for g in found]


def off(cell: Callable[[], nn.Module], spec: str, **options: Any) -> float:
    """Returns the largest relative error of a gradient, compared with the mean in float64."""
    torch.manual_seed(3)
    alone = cell()
    ddp = DistributedDataParallel(copy.deepcopy(alone), **options)
    hook = compress(ddp, spec)
    worst = 0.0
    for step in range(3):  # DDP rebuilds its buckets after the first step
        ddp.zero_grad()
        alone.zero_grad()
        factor = float(1 + RANK + step)
        alone(factor).backward()
        ddp(factor).backward()
        ours = gradients(ddp)
        check(len(ours) == len(gradients(alone)), "gradients are missing")
        for got, mean in zip(ours, gradients(alone)):
            mean = mean.contiguous()
            dist.all_reduce(mean)
            mean /= WORLD
            if mean.numel() > 0:
                worst = max(worst, float((got - mean).norm() / mean.norm()))
    hook.close()
    return worst


def every_type_and_layout_is_averaged() -> None:
    for name, cell in CELLS.items():
        rounding = 4e-3 if "bfloat16" in name else 1e-3 if "float16" in name else 1e-6
        for spec, limit in (("fp32", rounding), ("int8", 5e-2), ("powersgd:rank=4", 0.6)):
            for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}):
                if name == "sparse" and "gradient_as_bucket_view" in options:
                    continue  # DDP rejects this case, even without a hook
                error = off(cell, spec, **options)
                check(error <= limit, f"{name}, {spec}, {options}: relative error {error:.1e}")
        say(f"{name}: averaged")


def what_cannot_be_averaged_is_refused() -> None:
    sparse = DistributedDataParallel(Sparse(), broadcast_buffers=False)
    refused(lambda: compress(sparse, "fp32", min_ranks=1), gradwire.BadArgument, "sparse=False", "embedding")
    hook = Hook("fp32")
    if TODAY:
        bucket: Any = Integers()
        refused(lambda: hook(bucket), gradwire.Unsupported, "int64")
    hook.close()
    say("sparse gradients with min_ranks, and integers, are refused by name")


def refused_by_ddp() -> Dict[str, Callable[[], torch.Tensor]]:
    ragged = [torch.ones(2), torch.ones(3)]
    return {
        "expanded": lambda: torch.ones(1, 4).expand(3, 4),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor(ragged),
        "nested, jagged": lambda: torch.nested.nested_tensor(ragged, layout=torch.jagged),
        "sparse parameter": lambda: torch.eye(4).to_sparse(),
        "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    }


def ddp_refuses_what_the_page_says() -> None:
    """Checks that DDP rejects these types without a hook.

    If a new PyTorch accepts a type, add the type to CELLS.
    """
    if torch.__version__ < (2, 9):
        return  # an error leaves a broken connection in earlier versions of Gloo
    for name, tensor in refused_by_ddp().items():
        try:
            DistributedDataParallel(Of(tensor(), torch.ones(3)))
            check(False, f"{name}: DDP takes it")
        except (RuntimeError, TypeError) as error:
            say(f"{name}: {str(error).splitlines()[0][:80]}")


class Integers:
    """A bucket of integers, which DDP never creates."""

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.int64)

    def parameters(self) -> List[torch.Tensor]:
        return [torch.zeros(4, dtype=torch.int64)]


SCENARIOS: List[Callable[[], None]] = [every_type_and_layout_is_averaged, what_cannot_be_averaged_is_refused,
                                        ddp_refuses_what_the_page_says]
