"""Gradwire for PyTorch: the DistributedDataParallel hook, the optimizer Dion, and allreduce_() on tensors.

    hook = compress(ddp_model, "powersgd:rank=4")

This line is short for

    hook = Hook("powersgd:rank=4", model=ddp_model, process_group=ddp_model.process_group)
    ddp_model.register_comm_hook(hook, allreduce_hook)

Nothing else changes: after backward() the gradients are averaged, with the same bits on every rank.
docs/for-pytorch.md shows how to migrate from PyTorch's powerSGD_hook.
"""
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._allreduce import allreduce_
from gradwire._communicator import Communicator
from gradwire._dion import Dion
from gradwire._find_ddp import PYTHON_REDUCER, the_ddp
from gradwire._hook import DEFAULT_SPEC, Hook
from gradwire._process_group import TIMEOUT_S, communicator
from gradwire.backend import Backend, register_backend

__all__ = ["Backend", "Dion", "Hook", "allreduce_", "allreduce_hook", "communicator", "compress",
           "register_backend"]


def allreduce_hook(state: Hook, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
    """Reduces a DDP bucket. Register it: ddp_model.register_comm_hook(Hook(...), allreduce_hook)."""
    return state(bucket)


# DDP compares the annotations with classes, but `from __future__ import annotations` made them strings.
allreduce_hook.__annotations__ = {"state": Hook, "bucket": dist.GradBucket,
                                  "return": torch.futures.Future[torch.Tensor]}


def compress(model: Any, spec: str = DEFAULT_SPEC, *, timeout_s: _native.Seconds = TIMEOUT_S,
             comm: Optional[Communicator] = None, seed: int = 0, min_ranks: int = 0) -> Hook:
    """Compresses the gradients of a DistributedDataParallel model: creates a Hook and registers it.

    Call it once per model, on every rank with the same arguments, before the first backward; before or after
    torch.compile(model). The hook averages over the model's process group, and has its parameters' names.

    Args:
        model: the DistributedDataParallel; or a model that contains or is wrapped in exactly one
            DistributedDataParallel, such as torch.compile(ddp_model) and ddp_model.module; or a trainer with
            a DistributedDataParallel in its attributes.
        spec, timeout_s, comm, seed, min_ranks: see Hook.

    Returns:
        The hook.

    Raises:
        BadArgument: there is no DistributedDataParallel, more than one, or it has a hook.
        Unsupported: torch._dynamo.config.optimize_ddp is "python_reducer".
    """
    ddp = the_ddp(model)
    if getattr(ddp, "_use_python_reducer", False):
        raise _native.Unsupported(PYTHON_REDUCER)
    hook = Hook(spec, process_group=ddp.process_group, model=ddp, timeout_s=timeout_s, comm=comm, seed=seed,
                min_ranks=min_ranks)
    # PyTorch's list for logging. A deep copy of a DDP lists the original's hooks, but its reducer has none.
    listed = getattr(ddp, "_comm_hooks", None)
    before = list(listed) if listed is not None else []
    try:
        ddp.register_comm_hook(hook, allreduce_hook)
    except RuntimeError as error:
        if listed is not None:
            listed[:] = before
        hook.close()
        raise _native.BadArgument("cannot register a communication hook: use a DistributedDataParallel "
                                  f"without one. PyTorch says: {error}") from error
    return hook
