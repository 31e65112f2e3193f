"""Gradwire: gradient compression with error feedback for data-parallel training.

With PyTorch's DistributedDataParallel:

    from gradwire.torch import compress
    hook = compress(ddp_model, "powersgd:rank=4")

With a model sharded by FSDP2's fully_shard():

    from gradwire.fsdp import compress
    handle = compress(model, gradients="int8", weights="bf16")

With JAX, after gradwire.jax.init():

    optimizer = optax.chain(gradwire.jax.compress("int8"), optax.adam(1e-3))

Without a framework: allreduce_() averages one tensor; Communicator and Reducer have the other operations,
and choose() compares specs. register_format() adds a custom wire format.
"""
from __future__ import annotations

import sys
from typing import Any, List, Optional

from gradwire._communicator import Communicator, Request
from gradwire._memory import memory_of
from gradwire._native import (BadArgument, BadHandle, CommFailed, DeviceFailed, Error, NoMemory, NotDone,
                              Unsupported, __version__)
from gradwire._reducer import Choice, Reducer, choose
from gradwire._spec import register_format

__all__ = ["BadArgument", "BadHandle", "Choice", "CommFailed", "Communicator", "DeviceFailed", "Error",
           "NoMemory", "NotDone", "Reducer", "Request", "Unsupported", "allreduce_", "choose",
           "register_format"]


def __dir__() -> List[str]:
    """Lists the public names and modules, for completion, without what this module imports."""
    return [name for name in globals() if name in __all__ or name.startswith("__")
            or (f"gradwire.{name}" in sys.modules and not name.startswith("_"))]


def allreduce_(tensor: Any, spec: str = "fp32", op: str = "avg", comm: Optional[Communicator] = None,
               tag: str = "") -> Any:
    """Averages or sums a tensor over all ranks, in place. Collective.

    Blocks until the result is ready. For CUDA tensors the work is enqueued on PyTorch's current stream.

    Args:
        tensor: a contiguous torch tensor (float32, bfloat16 or float16) or numpy array (float32 or float16).
        spec: a wire format of docs/formats.md, such as "fp32" or "bf16:round=stochastic". No error feedback:
            no state is kept between calls.
        op: "avg" or "sum".
        comm: the ranks. None: the ranks of torch.distributed's default process group; torch tensors only.
        tag: a name for the tensor, the same on every rank. With tags, calls of equal size that ranks make in
            different orders raise CommFailed, which names both tags. Without tags, such calls add up
            different tensors.

    Returns:
        `tensor`.

    Raises:
        CommFailed: a peer died, timed out or made a different call.
        TypeError, ValueError: the tensor's type or layout is not supported.
    """
    if not hasattr(tensor, "data_ptr"):
        if comm is None:
            memory_of(tensor)  # an object of another type is refused by name
            raise ValueError("comm is None, but numpy arrays need a communicator: pass "
                             "comm=gradwire.Communicator(...)")
        return comm.allreduce_(tensor, spec, op, tag=tag)
    from gradwire import torch as gradwire_torch

    return gradwire_torch.allreduce_(tensor, spec, op, comm, tag)
