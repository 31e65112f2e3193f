"""The layout of DistributedDataParallel's buckets: which parameters a bucket has, where, and in what type."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from gradwire import _native
from gradwire._core import Reducer
from gradwire._elastic import Copies

# The types that the library reduces itself. The hook converts other types to float32 and back.
NATIVE = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Layout(NamedTuple):
    """The tensors of a DDP bucket, in its order: names and (rows, cols)."""

    names: Tuple[str, ...]
    shapes: Tuple[Tuple[int, int], ...]


class Bucket:
    """A DDP bucket and its reducer, which is created at first use."""

    def __init__(self, index: int, parameters: List[torch.Tensor], layout: Layout, element_size: int) -> None:
        self.index = index
        self.parameters = parameters
        self.layout = layout
        self.reducer: Optional[Reducer] = None
        self.address = -1  # address of the buffer that `addresses` is for
        self.addresses: Any = None
        self.element_size = element_size  # size of a gradient's element, in bytes
        self.staging: Optional[torch.Tensor] = None  # a float32 copy, for buckets of another type
        self.copies = Copies()  # filled where the hook can lose ranks

    def addresses_in(self, buffer: torch.Tensor) -> Any:
        """Returns the address of each gradient in `buffer`, or in its float32 copy."""
        if buffer.dtype not in NATIVE and self.staging is None:
            if not buffer.is_floating_point():
                raise _native.Unsupported(f"gradients of {buffer.dtype} are not supported, such as that of "
                                          f"{self.layout.names[0]!r}: they must be floating-point or complex")
            self.staging = torch.empty_like(buffer, dtype=torch.float32)
        if self.addresses is None or self.address != buffer.data_ptr():
            where = buffer if self.staging is None else self.staging
            self.address = buffer.data_ptr()
            self.addresses = Reducer.addresses_of(_addresses(self.layout, buffer, where))
        return self.addresses


def _addresses(layout: Layout, buffer: torch.Tensor, where: torch.Tensor) -> Sequence[int]:
    """DDP places gradients one after another. bucket.gradients() has wrong offsets for complex and for empty ones."""
    addresses, at = [], 0
    for rows, cols in layout.shapes:
        addresses.append(where.data_ptr() + at * where.element_size())
        at += rows * cols
    if at != buffer.numel():  # part of the gradients would not be averaged
        raise _native.Unsupported(f"a DDP bucket of {buffer.numel()} {buffer.dtype} elements does not match its "
                                  f"parameters, which have {at}: {', '.join(layout.names)}")
    return addresses


def real_view(buffer: torch.Tensor) -> torch.Tensor:
    """Returns a bucket's buffer, as real numbers where it has complex ones."""
    return torch.view_as_real(buffer).flatten() if buffer.dtype.is_complex else buffer


def matrix(parameter: torch.Tensor) -> Tuple[int, int]:
    """(rows, cols) of a parameter's gradient as stored in DDP's bucket: outermost dimension, and the rest.

    DDP stores a gradient with its parameter's strides (bucket.gradients() does not show them), so the
    outermost dimension of a transposed parameter is not the first. A complex number is two real ones.
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
    """A parameter's name without the prefixes that DDP and torch.compile() add to modules' names."""
    name = name.replace("_orig_mod.", "")
    return name[len("module."):] if name.startswith("module.") else name


def spec_for(spec: str, dtype: torch.dtype) -> str:
    """`spec` for buckets of `dtype`. What travels uncompressed of BF16 gradients travels as BF16, as without a hook."""
    method, _, text = spec.replace(":", ",", 1).partition(",")
    options = [option for option in text.split(",") if option]
    if dtype != torch.bfloat16 or "schedule=nccl" in options:  # NCCL sums FP32 only
        return spec
    if method == "fp32":
        return "bf16:" + ",".join(["ef=off", *(option for option in options if not option.startswith("ef="))])
    if method in ("powersgd", "randk") and not any(option.startswith("wire=") for option in options):
        return f"{method}:" + ",".join([*options, "wire=bf16"])
    return spec


_ONE_MODEL = "use a hook for each model"
_NUMBER = "parameter "  # and the number of a parameter without a name


def is_number(name: str) -> bool:
    """Whether Names has made this name."""
    return name.startswith(_NUMBER) and name[len(_NUMBER):].isdigit()


class Names:
    """The names of a hook's parameters: a model's, or numbers in the order of DDP's first buckets.

    are_a_models: name_parameters() has given them.
    complete: every parameter of the model has come in a bucket.
    """

    def __init__(self) -> None:
        self.are_a_models = False
        self.complete = False
        self._of: Dict[int, str] = {}  # by id()
        self._parameters: List[torch.Tensor] = []  # keeps them alive, so that the ids stay unique

    def add_model(self, model: torch.nn.Module) -> None:
        """See Hook.name_parameters()."""
        taken = {name: key for key, name in self._of.items()}
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        for name, parameter in named:
            if taken.get(name, id(parameter)) != id(parameter):
                raise _native.BadArgument(f"the hook has a parameter {name!r} of another model already: {_ONE_MODEL}")
        for name, parameter in named:
            self._add(parameter, name)
        self.are_a_models = True

    def _add(self, parameter: torch.Tensor, name: str) -> str:
        self._parameters.append(parameter)
        return self._of.setdefault(id(parameter), name)

    def of(self, parameters: List[torch.Tensor]) -> Tuple[str, ...]:
        """The names of a bucket's parameters. Raises BadArgument where one is not the model's."""
        for p in parameters:
            if id(p) not in self._of and (self.are_a_models or self.complete):
                raise _native.BadArgument(f"a gradient of shape {tuple(p.shape)} is of a parameter of another model, or one that "
                                          f"was added since: {_ONE_MODEL}, or call hook.name_parameters(model) for what was added")
        return tuple(self._of.get(id(p)) or self._add(p, f"{_NUMBER}{len(self._parameters)}") for p in parameters)

    def all(self) -> List[str]:
        return list(self._of.values())
