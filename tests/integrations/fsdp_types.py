"""Tests every type of parameter and gradient under compress(): averaged, or the same as FSDP2 alone."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradwire.fsdp import compress

from fsdp_training import whole
from rank import RANK, WORLD, check, say

ROWS, COLUMNS = 24, 50  # not dense by default


class Sum(nn.Module):
    """A module whose gradients differ between ranks. Complex gradients have both parts."""

    def __init__(self, dtype: torch.dtype, frozen: Optional[torch.Tensor] = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=wide, generator=generator).to(dtype))
        self.single = nn.Parameter(torch.full((1,), 2.0, dtype=dtype))
        if frozen is not None:
            self.frozen = nn.Parameter(frozen, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.complex(x, 2 * x + 1) if self.weight.is_complex() else x
        product = self.weight * factor.to(self.weight.dtype)
        total = torch.view_as_real(product) if product.is_complex() else product
        single = self.single.abs() if self.single.is_complex() else self.single
        loss = total.square().float().sum() + ((RANK + 1) * single.float()).sum()
        if hasattr(self, "frozen") and not self.frozen.is_complex():
            loss = loss + self.frozen.float().sum()
        return loss


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    gradients: str  # "averaged" in FP32 or the wire format, or "as FSDP2"
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    limit: float = 1e-6  # largest difference of fp32 gradients from FSDP2's gradients


def _of(dtype: torch.dtype, limit: float = 1e-6) -> Case:
    return Case(lambda: Sum(dtype), "as FSDP2" if dtype.is_complex else "averaged", limit=limit)


def _frozen(dtype: torch.dtype) -> Case:
    numbers = torch.arange(ROWS * COLUMNS).remainder(7).view(ROWS, COLUMNS)
    return Case(lambda: Sum(torch.float32, numbers.to(dtype)), "averaged")


def _mixed(**types: torch.dtype) -> Case:
    return Case(lambda: Sum(torch.float32), "averaged", MixedPrecisionPolicy(**types), limit=2e-3)


class Odd(nn.Module):
    """A module with a parameter of a layout that FSDP2 rejects in fully_shard() or backward()."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.odd, self.weight = nn.Parameter(parameter), nn.Parameter(torch.randn(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd.sum() + (self.weight * x).square().sum()


class Rows(nn.Module):
    """A module with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, COLUMNS, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(torch.arange(4)).square().sum()


CASES: Dict[str, Case] = {
    "float32": _of(torch.float32), "float64": _of(torch.float64), "bfloat16": _of(torch.bfloat16, 1e-2),
    "float16": _of(torch.float16, 2e-3), "complex64": _of(torch.complex64),
    "complex128": _of(torch.complex128),
    "param_dtype=bfloat16": _mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "param_dtype=float16": _mixed(param_dtype=torch.float16),
    "reduce_dtype=float64": _mixed(reduce_dtype=torch.float64),
    "param_dtype=float64": _mixed(param_dtype=torch.float64),
    **{str(dtype).replace("torch.", "frozen "): _frozen(dtype) for dtype in (
        torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16,
        torch.complex64, torch.float8_e4m3fn)}}
REFUSED: Dict[str, Callable[[], nn.Module]] = {
    "0-dim": lambda: Odd(torch.tensor(1.0)), "empty": lambda: Odd(torch.ones(0, 5)),
    "transposed": lambda: Odd(torch.ones(32, 64).t()),
    "channels_last": lambda: Odd(torch.ones(8, 4, 3, 3).to(memory_format=torch.channels_last)),
    "expanded": lambda: Odd(torch.ones(1, 64).expand(8, 64)), "sparse": lambda: Odd(torch.eye(8).to_sparse()),
    "nested": lambda: Odd(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "nested, jagged": lambda: Odd(
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    "quantized": lambda: Odd(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
    "strided": lambda: Odd(torch.ones(64, 64)[::2, ::2]), "sparse gradients": Rows
}


def _gradients(make: Callable[[], nn.Module], arguments: Any,
               **options: Any) -> Union[Dict[str, torch.Tensor], str]:
    """Returns the gradients of one backward, or the exception that it raised."""
    handle = None
    try:
        model = make()
        fully_shard(model, **options)
        handle = compress(model, *arguments, timeout_s=60) if arguments else None
        model(torch.tensor(1.0 + RANK)).backward()
        return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return str(error)
    finally:
        if handle is not None:
            handle.close()


def _off(gradients: Dict[str, torch.Tensor], exact: Dict[str, torch.Tensor]) -> float:
    check(gradients.keys() == exact.keys(), f"gradients of {gradients.keys()}, not {exact.keys()}")
    check(all(g.dtype == exact[n].dtype for n, g in gradients.items()), "gradients of another type")
    return max(float((g - exact[n]).abs().max()) / float(exact[n].abs().max()) for n, g in gradients.items())


def every_type_of_parameter() -> None:
    meshes: List[Dict[str, Any]] = [{}]
    if WORLD == 4:
        meshes.append({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))})
    for options in meshes:
        for name, case in CASES.items():
            with warnings.catch_warnings():
                # PyTorch warns if an imaginary part is discarded.
                warnings.simplefilter("error" if "complex" in name else "ignore")
                exact, plain, rounded = (_gradients(case.make, arguments, mp_policy=case.policy, **options)
                                         for arguments in (None, ("fp32", "fp32"), ("int8", "fp32")))
            what = f"{name}, {'HSDP' if options else 'one mesh'}"
            for outcome in (exact, plain, rounded):
                check(isinstance(outcome, dict) and len(outcome) == 2, f"{what}: {outcome}")
            off, lossy = _off(plain, exact), _off(rounded, exact)
            exactly = case.gradients == "as FSDP2" and not options
            check(off <= (0 if exactly else case.limit), f"{what}: {off:.1e} off")
            compressed = lossy > off
            check(lossy <= 0.05 and compressed == (case.gradients == "averaged"),
                  f"{what} in int8: {lossy:.1e} off")
            say(f"{what}: {case.gradients}, {off:.1e} from FSDP2's own in fp32, {lossy:.1e} in int8")
    for name, make in REFUSED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain, ours = _gradients(make, None), _gradients(make, ("int8", "bf16"))
        check(isinstance(plain, str) and ours == plain, f"{name}: {ours}, FSDP2: {plain}")
        say(f"{name}: refused by FSDP2: {plain.splitlines()[0][:90]}")
    dist.barrier()
