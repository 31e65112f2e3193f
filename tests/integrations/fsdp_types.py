"""A scenario of every type of parameter under compress(): gradients are averaged, or the same as FSDP2's."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, Tuple, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_training import replicas_of, whole
from gradwire.fsdp import compress
from rank import RANK, WORLD, check
from scenarios import scenario

ROWS, COLUMNS = 24, 50  # not dense by default


class Sum(nn.Module):
    """A module whose gradients differ between ranks. Complex gradients have both parts."""

    def __init__(self, dtype: torch.dtype, frozen: "torch.dtype | None" = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=wide, generator=generator).to(dtype))
        self.single = nn.Parameter(torch.full((1,), 2.0, dtype=dtype))
        if frozen is not None:
            numbers = torch.arange(ROWS * COLUMNS).remainder(7).view(ROWS, COLUMNS)
            self.frozen = nn.Parameter(numbers.to(frozen), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.complex(x, 2 * x + 1) if self.weight.is_complex() else x
        product = self.weight * factor.to(self.weight.dtype)
        total = torch.view_as_real(product) if product.is_complex() else product
        single = self.single.abs() if self.single.is_complex() else self.single
        loss = total.square().float().sum() + ((RANK + 1) * single.float()).sum()
        if hasattr(self, "frozen") and not self.frozen.is_complex():
            loss = loss + self.frozen.float().sum()
        return loss


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


# The module's arguments, the policy's types, and the largest difference of fp32 gradients from FSDP2's.
Case = Tuple[Tuple[torch.dtype, ...], Dict[str, torch.dtype], float]
HALF = torch.float16
CASES: Dict[str, Case] = {
    **{str(dtype): ((dtype,), {}, limit) for dtype, limit in (
        (torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 1e-2), (HALF, 2e-3),
        (torch.complex64, 1e-6), (torch.complex128, 1e-6))},
    **{f"{types}": ((torch.float32,), types, 2e-3) for types in (
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, {"param_dtype": HALF},
        {"reduce_dtype": torch.float64}, {"param_dtype": torch.float64})},
    **{f"frozen {dtype}": ((torch.float32, dtype), {}, 1e-6) for dtype in (
        torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float64, torch.bfloat16,
        torch.complex64, torch.float8_e4m3fn)}}
REFUSED: Dict[str, Callable[[], Any]] = {
    "0-dim": lambda: torch.tensor(1.0), "empty": lambda: torch.ones(0, 5),
    "transposed": lambda: torch.ones(32, 64).t(),
    "channels_last": lambda: torch.ones(8, 4, 3, 3).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1, 64).expand(8, 64), "sparse": lambda: torch.eye(8).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "strided": lambda: torch.ones(64, 64)[::2, ::2], "sparse gradients": lambda: None}


def gradients(make: Callable[[], nn.Module], formats: Tuple[str, ...],
              **options: Any) -> Union[Dict[str, torch.Tensor], str]:
    """Returns the gradients of one backward, or the error that it raised."""
    handle = None
    try:
        model = make()
        fully_shard(model, **options)
        handle = compress(model, *formats, timeout_s=60) if formats else None
        model(torch.tensor(1.0 + RANK)).backward()
        return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return str(error)
    finally:
        if handle is not None:
            handle.close()


def off(what: str, found: Any, exact: Any) -> float:
    check(all(isinstance(each, dict) and len(each) == 2 for each in (found, exact)), f"{what}: {found}")
    check(found.keys() == exact.keys() and all(g.dtype == exact[n].dtype for n, g in found.items()),
          f"{what}: gradients of other parameters or types")
    return max(float((g - exact[n]).abs().max()) / float(exact[n].abs().max()) for n, g in found.items())


@scenario()
def every_type_of_parameter() -> None:
    meshes: List[Dict[str, Any]] = [{}, {"mesh": replicas_of(2)}] if WORLD == 4 else [{}]
    for options in meshes:
        for name, (arguments, types, limit) in CASES.items():
            is_complex = arguments[0].is_complex
            with warnings.catch_warnings():
                # PyTorch warns if an imaginary part is discarded.
                warnings.simplefilter("error" if is_complex else "ignore")
                exact, plain, rounded = (gradients(lambda: Sum(*arguments), formats, **options,
                                                   mp_policy=MixedPrecisionPolicy(**types))
                                         for formats in ((), ("fp32", "fp32"), ("int8", "fp32")))
            what = f"{name}, {'HSDP' if options else 'one mesh'}"
            error, lossy = off(what, plain, exact), off(what, rounded, exact)
            check(error <= (0 if is_complex and not options else limit), f"{what}: {error:.1e} off")
            # Complex gradients are as FSDP2's; all others are compressed.
            check(lossy <= 0.05 and (lossy > error) != is_complex, f"{what} in int8: {lossy:.1e} off")
    for name, parameter in REFUSED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain, ours = (gradients(lambda: Odd(parameter()) if parameter() is not None else Rows(), formats)
                           for formats in ((), ("int8", "bf16")))
        check(isinstance(plain, str) and ours == plain, f"{name}: {ours}, FSDP2: {plain}")
    dist.barrier()
