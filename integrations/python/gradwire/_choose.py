"""choose(): compares specs on a model's gradients."""
from __future__ import annotations

import ctypes
import math
from typing import Any, Dict, Mapping, NamedTuple, Sequence

from gradwire import _native
from gradwire._communicator import Communicator


class Trial(NamedTuple):
    """What choose() measured for a spec: means over the ranks.

    Attributes:
        error: relative L2 error of one encode. NaN: the spec made finite gradients not finite.
        communicate_ms: milliseconds of averaging all gradients.
        exposed_ms: milliseconds of it that backward does not hide.
    """

    error: float
    communicate_ms: float
    exposed_ms: float


class Choice(NamedTuple):
    """The chosen spec, and the trials by spec."""

    spec: str
    trials: Dict[str, Trial]


def choose(comm: Communicator, specs: Sequence[str], gradients: Mapping[str, Any], *, error: float = 0.0,
           compute_ms: float = 0.0, backward_ms: float = 0.0, bucket_bytes: int = 0, seed: int = 0,
           stream: int = 0) -> Choice:
    """Chooses the spec for a Reducer: the shortest step within the error; in a tie the smallest error.

    Steps within 5 % tie. Collective; all ranks choose alike. Blocks. The gradients do not change. Call it after
    a few steps, because gradients below a last layer that begins as zero are zero in the first step.

    Args:
        specs: the first is kept where no other is faster, and need not be within `error`: usually "fp32".
        gradients: a step's gradients by name, in the order in which backward completes them: torch tensors or
            numpy arrays. A matrix's rows are the first dimension.
        error: the largest relative L2 error of one encode. 0: 0.1.
        compute_ms: milliseconds of a step without communication.
        backward_ms: the part of compute_ms that hides communication.
        bucket_bytes: of the reducer's buckets. 0: 25 MiB.
        seed: of the reducer.
        stream: for CUDA tensors, the cudaStream_t as a number.

    Raises:
        BadArgument: an argument is invalid, or the mean gradient is zero or not finite.
        CommFailed: a peer died, timed out or made a different call.
    """
    tensors = (_native.Tensor * max(1, len(gradients)))()
    for item, (name, gradient) in zip(tensors, gradients.items()):
        memory = comm._memory(gradient, f"the gradient {name!r}")
        rows, *others = gradient.shape or (1,)
        item.size = ctypes.sizeof(_native.Tensor)
        item.name = _native.text(name, "the gradient's name")
        item.rows, item.cols, item.dtype, item.grad = rows, math.prod(others), memory.dtype, memory.address
    texts = (ctypes.c_char_p * len(specs))(*(_native.text(spec, "the spec") for spec in specs))
    options = _native.ChooseOptions(size=ctypes.sizeof(_native.ChooseOptions), specs=texts,
                                    n_specs=len(specs), error=error, bucket_bytes=bucket_bytes, seed=seed,
                                    compute_ms=compute_ms, backward_ms=backward_ms)
    trials, chosen = (_native.Trial * max(1, len(specs)))(), ctypes.c_int32()
    comm._wait_for(("gw_choose", comm._handle, tensors, len(gradients), ctypes.byref(options),
                    _native.stream(stream), trials, ctypes.byref(chosen)))
    return Choice(specs[chosen.value], {
        spec: Trial(one.error, one.communicate_ms, one.exposed_ms) for spec, one in zip(specs, trials)})
