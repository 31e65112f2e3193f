"""Gradwire: gradient compression with error feedback for data-parallel training.

With PyTorch's DistributedDataParallel:

    from gradwire.torch import compress
    hook = compress(ddp_model, "powersgd:rank=4")

With a model sharded by FSDP2's fully_shard():

    from gradwire.fsdp import compress
    handle = compress(model, gradients="int8", weights="bf16")

With JAX, after gradwire.jax.init():

    optimizer = optax.chain(gradwire.jax.compress("int8"), optax.adam(1e-3))

Without them: allreduce_() for one tensor, Communicator and Reducer for everything else. register_format() adds
a compression of your own.
"""
from __future__ import annotations

from typing import Any, Optional

from gradwire._core import Communicator, Reducer, Request
from gradwire._formats import register_format
from gradwire._native import (BadArgument, BadHandle, CommFailed, DeviceFailed, Error, NoMemory, NotDone,
                              Unsupported, __version__)

__all__ = ["BadArgument", "BadHandle", "CommFailed", "Communicator", "DeviceFailed", "Error", "NoMemory",
           "NotDone", "Reducer", "Request", "Unsupported", "allreduce_", "register_format"]


def allreduce_(tensor: Any, spec: str = "fp32", op: str = "avg", comm: Optional[Communicator] = None,
               tag: str = "") -> Any:
    """Averages (or sums, op="sum") a tensor over all ranks, in place, and returns it. Collective.

    tensor: a contiguous torch tensor (float32, bfloat16 or float16) or numpy array (float32 or float16).
    spec: a wire format of docs/formats.md, such as "fp32" or "bf16:round=stochastic". There is no error
        feedback, because nothing is kept between calls.
    tag: a name for the tensor, the same on every rank. If ranks make calls of equal size in a different
        order, tags turn that into CommFailed, which names both; without tags, different tensors are added up.
    comm: the ranks. None, for torch tensors only: those of torch.distributed's default process group.

    For CUDA tensors the work is enqueued on PyTorch's current stream; otherwise it is done on return.
    """
    if not hasattr(tensor, "data_ptr"):
        if comm is None:
            raise ValueError("numpy arrays need a communicator: "
                             "allreduce_(array, comm=gradwire.Communicator(...))")
        return comm.allreduce_(tensor, spec, op, tag=tag)
    from gradwire import torch as gradwire_torch

    return gradwire_torch.allreduce_(tensor, spec, op, comm, tag)
