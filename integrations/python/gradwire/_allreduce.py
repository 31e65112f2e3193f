"""allreduce_() on torch tensors, and its communicators for the default process group."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._memory import memory_of
from gradwire._process_group import Origin, communicator, during, normal_tensors, stream_of


def _reduce(comm: Communicator, tensor: torch.Tensor, spec: str, op: str, tag: str) -> None:
    if tensor.is_cuda:
        comm.check()  # an earlier call may have failed on its stream, which carries no errors
    with during(spec, "allreduce_", tensor):
        comm.allreduce_(tensor.detach(), spec, op, stream_of(tensor), tag)


class _Default:
    """The communicator of the default process group for one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.origin = Origin()
        self._completed = 0  # number of completed calls; must be equal on all ranks after a failure
        self._comm: Optional[Communicator] = None
        self._failed = False

    def communicator(self) -> Communicator:
        if self._failed:
            self._agree()
            self._comm, self._failed = None, False
        if self._comm is None:
            self._comm = communicator(device="host" if self._device == _native.HOST else self._device)
        return self._comm

    def _agree(self) -> None:
        """Raises CommFailed on every rank if the ranks have completed different numbers of calls.

        In that case the ranks' next calls would not match.
        """
        if self._comm is not None:
            self._comm.close()
        completed: List[Any] = [None] * dist.get_world_size()
        with normal_tensors():
            dist.all_gather_object(completed, self._completed)
        if len(set(completed)) > 1:
            raise _native.CommFailed(
                f"allreduce_() failed on only some of the ranks, which have completed {completed} calls: "
                "call torch.distributed.destroy_process_group() and init_process_group(), or pass comm=")

    def allreduce_(self, tensor: torch.Tensor, spec: str, op: str, tag: str) -> None:
        comm = self.communicator()
        try:
            _reduce(comm, tensor, spec, op, tag)
        except (_native.CommFailed, KeyboardInterrupt):
            self._failed = True
            raise
        self._completed += 1


_defaults: Dict[int, _Default] = {}  # by device; each valid in one process, for one default process group


def _default(device: int) -> _Default:
    if not dist.is_initialized():
        raise ValueError("comm is None and there is no default process group: call "
                         "torch.distributed.init_process_group() first, or pass "
                         "comm=gradwire.Communicator(...)")
    default = _defaults.get(device)
    if default is None or default.origin.ended():
        default = _defaults[device] = _Default(device)
    return default


def allreduce_(tensor: torch.Tensor, spec: str = "fp32", op: str = "avg",
               comm: Optional[Communicator] = None, tag: str = "") -> torch.Tensor:
    """Averages or sums a contiguous float32, bfloat16 or float16 tensor over all ranks, in place. Collective.

    The same as gradwire.allreduce_(). On CUDA a call raises the failure of an earlier call. To raise a call's
    failure at once, synchronize with the stream and call comm.check().

    Args:
        tensor, spec, op, tag: see gradwire.allreduce_().
        comm: the ranks. None: the ranks of the default process group. Their communicator is created at the
            first call, and again after destroy_process_group(), in a forked process, and after CommFailed.

    Returns:
        `tensor`.
    """
    memory = memory_of(tensor)
    if comm is None:
        _default(memory.device).allreduce_(tensor, spec, op, tag)
    else:
        _reduce(comm, tensor, spec, op, tag)
    return tensor
