"""Tests every type and layout of tensor over the registered backend: compressed, or the same as with Gloo."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Union

import torch
import torch.distributed as dist

from gradwire.torch import register_backend

from rank import RANK, WORLD, check, say

COUNT = 4096  # elements; divisible by the number of ranks
Make = Callable[[], torch.Tensor]


class Case(NamedTuple):
    """A tensor, the compressed operations on it, and the operations in which Gloo ends the process."""

    make: Make
    compressed: str = ""
    crashes: str = ""


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(RANK)
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=generator)
    values = torch.randn(*shape, generator=generator)
    if not (dtype.is_floating_point or dtype == torch.bool):
        return (10 * values).abs().to(dtype)
    return values.to(dtype) if dtype != torch.bool else values > 0


def _of(dtype: torch.dtype, compressed: str = "") -> Case:
    return Case(lambda: _numbers(dtype, COUNT), compressed)


def _float(*shape: int) -> torch.Tensor:
    return _numbers(torch.float32, *shape)


ALL = "all_reduce reduce_scatter all_gather"
CASES: Dict[str, Case] = {
    "float32": _of(torch.float32, ALL), "bfloat16": _of(torch.bfloat16, ALL),
    "float16": _of(torch.float16, ALL), "float64": _of(torch.float64),
    "int8": _of(torch.int8), "uint8": _of(torch.uint8), "int16": _of(torch.int16),
    "int32": _of(torch.int32), "int64": _of(torch.int64), "bool": _of(torch.bool),
    "complex64": _of(torch.complex64, "all_reduce all_gather"),  # PyTorch passes pairs of float32
    "complex128": _of(torch.complex128),
    "float8": Case(lambda: _float(COUNT).to(torch.float8_e4m3fn)),
    "quantized": Case(lambda: torch.quantize_per_tensor(_float(COUNT), 0.1, 0, torch.qint8)),
    "transposed": Case(lambda: _float(64, COUNT // 64).t(), ALL),
    "strided": Case(lambda: _float(COUNT, 2)[:, 0], ALL),
    "channels_last": Case(lambda: _float(4, COUNT // 64, 4, 4).to(memory_format=torch.channels_last), ALL),
    "0-dim": Case(lambda: _float(1)[0], crashes="reduce_scatter"),
    "one element": Case(lambda: _float(1)),
    "empty": Case(lambda: _float(0)),
    "expanded": Case(lambda: _float(1, COUNT // 4).expand(4, COUNT // 4), ALL),
    "requires_grad": Case(lambda: _float(COUNT).requires_grad_(), ALL),
    "negated view": Case(lambda: torch._neg_view(_float(COUNT)), ALL),
    "sparse": Case(lambda: torch.eye(64).to_sparse() * (RANK + 1)),
    "nested": Case(lambda: torch.nested.nested_tensor([_float(4), _float(8)], layout=torch.jagged)),
}


def _all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor.detach()


def _zeros(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)


def _reduce_scatter(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    output = _zeros(tensor, tensor.shape[:1].numel() // WORLD)
    dist.reduce_scatter_tensor(output, tensor, group=group)
    return output


def _all_gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    output = _zeros(tensor, tensor.shape[:1].numel() * WORLD)
    dist.all_gather_into_tensor(output, tensor, group=group)
    return output


OPERATIONS = {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather}
# Gloo refuses these layouts, or uses their memory order. Contiguous copies are the reference.
OWN_REFERENCE = ("transposed", "strided", "channels_last", "expanded", "negated view", "requires_grad")


def _outcome(call: Callable[[], torch.Tensor]) -> Union[torch.Tensor, str]:
    try:
        return call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        return tensor.values()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense().resolve_neg().contiguous()


def every_type_and_layout() -> None:
    register_backend("int8", reduce_scatter="int8", all_gather="bf16", min_bytes=1, name="small")
    small, gloo = dist.new_group(backend="small"), dist.new_group(backend="gloo")
    table: List[str] = []
    for name, case in CASES.items():
        row: List[str] = []
        for operation, run in OPERATIONS.items():
            if operation in case.crashes:
                row.append("-")
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                before = small.compressed
                ours = _outcome(lambda: run(case.make(), small))
                compressed = small.compressed > before
                own = name in OWN_REFERENCE
                theirs = _outcome(lambda: run(_dense(case.make().detach()) if own else case.make(), gloo))
            what = f"{operation} of {name}"
            wanted = operation in case.compressed.split()
            check(compressed == wanted, f"{what}: compressed is {compressed}: {ours}")
            if isinstance(ours, str) or isinstance(theirs, str):
                both = isinstance(ours, str) and isinstance(theirs, str)
                overlaps = name == "expanded" and operation == "all_reduce"
                check(both or overlaps, f"{what}: {ours}, with Gloo {theirs}")
                row.append("refused")
                continue
            a, b = _dense(ours), _dense(theirs)
            same = a.dtype == b.dtype and a.numel() == b.numel()
            check(same, f"{what}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}")
            a, b = a.flatten(), b.flatten()
            if compressed:
                off = float((a - b).to(torch.complex128).abs().square().sum().sqrt())
                off /= float(b.to(torch.complex128).abs().square().sum().sqrt())
                check(0 < off < 0.05 or off == 0 and "16" in name, f"{what}: {off:.1e} off")
            else:
                check(torch.equal(a, b), f"{what}: {a[:4]}, with Gloo {b[:4]}")
            row.append("compressed" if compressed else "as Gloo")
        table.append(f"{name:14} {', '.join(row)}")
    say("\n".join([f"{'':14} {', '.join(OPERATIONS)}", *table]))


SCENARIOS: List[Callable[[], None]] = [every_type_and_layout]
