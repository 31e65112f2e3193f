"""The layout of DistributedDataParallel's buckets: parameters, addresses and types."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from gradwire import _native
from gradwire._elastic import Copies
from gradwire._reducer import Reducer
from gradwire._spec import split

# Types that the library reduces without conversion. The hook converts other types to float32 and back.
NATIVE = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Layout(NamedTuple):
    """The names and (rows, cols) of a DDP bucket's tensors, in the bucket's order."""

    names: Tuple[str, ...]
    shapes: Tuple[Tuple[int, int], ...]


class Bucket:
    """A DDP bucket and its reducer, which is created at first use."""

    def __init__(self, index: int, parameters: List[torch.Tensor], layout: Layout, element_size: int) -> None:
        self.index = index
        self.parameters = parameters
        self.layout = layout
        self.reducer: Optional[Reducer] = None
        self.address = -1  # address of the buffer to which `addresses` belongs
        self.addresses: Any = None
        self.element_size = element_size  # bytes per gradient element
        self.staging: Optional[torch.Tensor] = None  # a float32 copy, for buckets of types not in NATIVE
        self.copies = Copies()  # used with min_ranks only
        self.step, self.opens_step = -1, False  # used by _auto.py: of the bucket's last call

    def addresses_in(self, buffer: torch.Tensor) -> Any:
        """Returns the address of each gradient in `buffer`, or in its float32 copy."""
        if buffer.dtype not in NATIVE and self.staging is None:
            if not buffer.is_floating_point():
                raise _native.Unsupported(f"the gradient of {self.layout.names[0]!r} is {buffer.dtype}: "
                                          "expected a floating-point or complex type")
            self.staging = torch.empty_like(buffer, dtype=torch.float32)
        if self.addresses is None or self.address != buffer.data_ptr():
            where = buffer if self.staging is None else self.staging
            self.address = buffer.data_ptr()
            self.addresses = addresses_of(self.layout, buffer, where)
        return self.addresses


def addresses_of(layout: Layout, buffer: torch.Tensor, where: torch.Tensor) -> Any:
    """Returns the C array of the addresses in `where` of a buffer's gradients, stored one after another.

    bucket.gradients() has wrong offsets for complex and for empty gradients.
    """
    addresses: List[int] = []
    at = 0
    for rows, cols in layout.shapes:
        addresses.append(where.data_ptr() + at * where.element_size())
        at += rows * cols
    if at != buffer.numel():  # part of the gradients would not be averaged
        raise _native.Unsupported(f"a DDP bucket has {buffer.numel()} elements of {buffer.dtype}, but its "
                                  f"parameters {', '.join(layout.names)} have {at}: this PyTorch's bucket "
                                  "layout is not supported")
    return Reducer.addresses_of(addresses)


def real_view(buffer: torch.Tensor) -> torch.Tensor:
    """Returns a bucket's buffer, with each complex number as two real numbers."""
    return torch.view_as_real(buffer).flatten() if buffer.dtype.is_complex else buffer


def matrix(parameter: torch.Tensor) -> Tuple[int, int]:
    """Returns the (rows, cols) of a parameter's gradient in DDP's bucket; rows: the outermost dimension.

    DDP stores a gradient with its parameter's strides (bucket.gradients() does not show them), so the
    outermost dimension of a transposed parameter is not the first. A complex number counts as two.
    """
    parts = 2 if parameter.dtype.is_complex else 1
    if parameter.dim() < 2 or parameter.numel() == 0:
        return parameter.numel() * parts, 1
    rows = parameter.shape[0]
    for size, stride in zip(parameter.shape, parameter.stride()):
        if stride > parameter.stride(0) and stride * size == parameter.numel():
            rows = size
    return rows, parameter.numel() // rows * parts


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes that DDP and torch.compile() add to module names."""
    name = name.replace("_orig_mod.", "")
    return name[len("module."):] if name.startswith("module.") else name


def spec_for(spec: str, dtype: torch.dtype) -> str:
    """Returns `spec` for buckets of `dtype`: uncompressed BF16 gradients are sent as BF16, not FP32."""
    method, options = split(spec)
    if dtype != torch.bfloat16 or "schedule=nccl" in options:  # NCCL sums FP32 only
        return spec
    if method == "fp32":
        return "bf16:" + ",".join(["ef=off", *(option for option in options if not option.startswith("ef="))])
    if method in ("powersgd", "randk", "dion") and not any(option.startswith("wire=") for option in options):
        return f"{method}:" + ",".join([*options, "wire=bf16"])
    return spec


_ONE_MODEL = "use a hook for each model"
_NUMBER = "parameter "  # followed by the number of an unnamed parameter


def is_number(name: str) -> bool:
    """Returns whether the name is a number that Names assigned."""
    return name.startswith(_NUMBER) and name[len(_NUMBER):].isdigit()


class Names:
    """The names of a hook's parameters: the model's names, or numbers in the order of DDP's first buckets.

    Attributes:
        are_a_models: the names come from name_parameters().
        complete: every parameter of the model has appeared in a bucket.
    """

    def __init__(self) -> None:
        self.are_a_models = False
        self.complete = False
        self._of: Dict[int, str] = {}  # names by id() of the parameter
        self._parameters: List[torch.Tensor] = []  # keeps the parameters alive, so that ids stay unique

    def add_model(self, model: torch.nn.Module) -> None:
        """Uses the names of a model's parameters. See Hook.name_parameters()."""
        taken = {name: key for key, name in self._of.items()}
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        for name, parameter in named:
            if taken.get(name, id(parameter)) != id(parameter):
                raise _native.BadArgument(f"the hook already has a parameter {name!r} of another model: "
                                          f"{_ONE_MODEL}")
        for name, parameter in named:
            self._add(parameter, name)
        self.are_a_models = True

    def _add(self, parameter: torch.Tensor, name: str) -> str:
        self._parameters.append(parameter)
        return self._of.setdefault(id(parameter), name)

    def of(self, parameters: List[torch.Tensor]) -> Tuple[str, ...]:
        """Returns the names of a bucket's parameters. Raises BadArgument for a parameter of another model."""
        for p in parameters:
            if id(p) not in self._of and (self.are_a_models or self.complete):
                raise _native.BadArgument(f"the gradient of shape {tuple(p.shape)} belongs to another model, "
                                          f"or to a parameter that was added to the model: {_ONE_MODEL}, and "
                                          "call hook.name_parameters(model) after adding parameters")
        return tuple(self._of.get(id(p)) or self._add(p, f"{_NUMBER}{len(self._parameters)}")
                     for p in parameters)

    def all(self) -> List[str]:
        return list(self._of.values())


def total_stats(buckets: Dict[int, Bucket]) -> Dict[str, Any]:
    """Returns the sums of the buckets' Reducer.stats()."""
    total: Dict[str, Any] = {"steps": 0, "wire_bytes": 0, "dense_bytes": 0, "comm_ms": 0.0, "extra_bytes": 0,
                             "buckets": 0, "buckets_in_place": 0, "description": ""}
    for index, bucket in sorted(buckets.items()):
        if bucket.reducer is None:
            continue
        stats = bucket.reducer.stats()
        if bucket.staging is not None:
            stats["dense_bytes"] = stats["dense_bytes"] * bucket.element_size // 4
        total["steps"] = max(total["steps"], stats["steps"])
        for name in total.keys() - {"steps", "description"}:
            total[name] += stats[name]
        total["description"] += f"DDP {stats['description'].replace('bucket 0', f'bucket {index}', 1)}"
    total["ratio"] = total["dense_bytes"] / total["wire_bytes"] if total["wire_bytes"] else 1.0
    return total
