"""Reducers, for numpy arrays and torch tensors."""
from __future__ import annotations

import ctypes
from typing import Any, Dict, List, Optional, Sequence, Tuple

from gradwire import _native
from gradwire._calls import op_of
from gradwire._communicator import Communicator
from gradwire._memory import TORCH_DTYPES, Handle, memory_of


class Reducer(Handle):
    """Reduces a model's gradients, or part of them, with compression and error feedback.

    The constructor is collective.

    Args:
        comm: the ranks.
        spec: "fp32", "bf16", "powersgd:rank=R[,...]": see docs/for-pytorch.md.
        tensors: (name, rows, cols) of each gradient, in the order in which backward completes them. Vectors
            have cols == 1.
        bucket_bytes: the approximate size of a bucket of tensors that are reduced together; 0: 25 MiB.
        op: "avg" or "sum".
        seed: for stochastic rounding; the same on all ranks, which draw different numbers.
        tag: names the reducer in error messages.
        shard: each rank gets the mean of its shard only: see shards(). Wire formats then send half the bytes.
        skip_unused: a tensor whose gradient is zero on every rank counts as unused in this step: its gradient
            stays zero, and its residual, momentum and factors keep their bits. On CUDA the host then waits
            for each bucket.
        dtype: "float32", "bfloat16" or "float16". The library widens 16-bit gradients bucket by bucket, and
            rounds the results.

    Raises:
        CommFailed: ranks differ in an argument, including tensor names and order. Raised on every rank.
    """

    def __init__(self, comm: Communicator, spec: str, tensors: Sequence[Tuple[str, int, int]], *,
                 bucket_bytes: int = 0, op: str = "avg", seed: int = 0, tag: str = "",
                 shard: bool = False, skip_unused: bool = False, dtype: str = "float32") -> None:
        self._dtype = TORCH_DTYPES.get(f"torch.{dtype}", -1)
        if self._dtype < 0:
            raise ValueError(f"dtype must be 'float32', 'bfloat16' or 'float16', not {dtype!r}")
        self._dtype_name = dtype
        array = (_native.Tensor * max(1, len(tensors)))()
        for item, (name, rows, cols) in zip(array, tensors):
            item.size = ctypes.sizeof(_native.Tensor)
            item.name = _native.text(name, "the tensor's name")
            item.rows, item.cols, item.dtype = rows, cols, self._dtype
        options = _native.ReducerOptions(size=ctypes.sizeof(_native.ReducerOptions), seed=seed,
                                         bucket_bytes=bucket_bytes, sum=int(op_of(op) == _native.SUM),
                                         shard=int(shard), skip_unused=int(skip_unused),
                                         tag=_native.text(tag, "the tag") or None)
        handle = ctypes.c_void_p()
        comm._wait_for(("gw_reducer_create", comm._handle, _native.text(spec, "the spec"), array,
                        len(tensors), ctypes.byref(options), ctypes.byref(handle)))
        self._comm = comm
        super().__init__("gw_reducer_destroy", handle)
        self._counts = [rows * cols for _, rows, cols in tensors]
        self._device = comm.device

    def allreduce(self, gradients: Sequence[Any], stream: int = 0) -> None:
        """Reduces tensors or arrays in place. Collective.

        float32 tensors that are adjacent in memory are reduced in place; others are copied to a buffer and
        back. Blocks on the host. On CUDA the work is enqueued, and the tensors must live until the stream has
        completed it.

        Args:
            gradients: one per registered tensor, in order, of the reducer's dtype.
            stream: for CUDA, the cudaStream_t as a number.
        """
        memories = [memory_of(g) for g in gradients]
        for i, (memory, count) in enumerate(zip(memories, self._counts)):
            if memory != (memory.address, count, self._dtype, self._device):
                raise ValueError(f"gradient {i} has {memory.count} elements on device {memory.device} (-1: "
                                 f"host); expected {count} of type {self._dtype_name} on device "
                                 f"{self._device}")
        self.allreduce_at(self.addresses_of([m.address for m in memories]), stream)

    def allreduce_at(self, addresses: "ctypes.Array[ctypes.c_void_p]", stream: int = 0) -> None:
        """Reduces gradients at `addresses`, from addresses_of(). See allreduce(). Memory is not checked."""
        if len(addresses) != len(self._counts):
            raise ValueError(f"got {len(addresses)} gradients; the reducer has {len(self._counts)} tensors, "
                             "and takes one gradient for each")
        self._comm._wait_for(("gw_reducer_allreduce", self._handle, addresses, _native.stream(stream),
                              self._comm._take_request()))

    @staticmethod
    def addresses_of(addresses: Sequence[int]) -> "ctypes.Array[ctypes.c_void_p]":
        """Returns a C array of addresses. It can be reused as long as the gradients do not move."""
        return (ctypes.c_void_p * len(addresses))(*addresses)

    def shards(self) -> List[Tuple[int, int, int]]:
        """Returns the (tensor, begin, end) of the elements whose mean this rank has after allreduce().

        These are all elements or, with shard=True, this rank's part of each bucket. Other elements are
        unspecified.
        """
        count = ctypes.c_int32()
        _native.call("gw_reducer_shards", self._handle, None, 0, ctypes.byref(count))
        ranges = (_native.Range * max(1, count.value))()
        _native.call("gw_reducer_shards", self._handle, ranges, count.value, ctypes.byref(count))
        return [(r.tensor, r.begin, r.end) for r in ranges[:count.value]]

    def stats(self) -> Dict[str, Any]:
        """Returns the fields of gw_stats: bytes and times of the last step, and memory in use."""
        stats = _native.Stats(size=ctypes.sizeof(_native.Stats))
        _native.call("gw_reducer_stats", self._handle, ctypes.byref(stats))
        fields: List[str] = [name for name, *_ in _native.Stats._fields_ if name != "size"]
        values = {name: getattr(stats, name) for name in fields}
        values["description"] = values["description"].decode(errors="replace")
        return values

    def save_state(self, memory: Optional[bytearray] = None) -> bytearray:
        """Returns this rank's residuals, factors and step count, in the layout of docs/checkpoints.md.

        Args:
            memory: an earlier result to overwrite, if it has the right size.
        """
        size = ctypes.c_size_t()
        _native.call("gw_reducer_state_save", self._handle, None, 0, ctypes.byref(size))
        state = memory if memory is not None and len(memory) == size.value else bytearray(size.value)
        buffer = (ctypes.c_char * len(state)).from_buffer(state)
        _native.call("gw_reducer_state_save", self._handle, buffer, len(state), ctypes.byref(size))
        return state

    def load_state(self, state: bytes) -> None:
        """Restores the result of this rank's save_state().

        After Communicator.shrink() or .grow(), the state may be from the previous group. The whole residual
        of this rank is loaded; the residuals of dead ranks are lost. The next step compares the ranks'
        states, and raises CommFailed on every rank if two ranks have loaded the same state.

        Raises:
            BadArgument: the state is of another spec or model, or of another rank of an equal group.
        """
        _native.call("gw_reducer_state_load", self._handle, bytes(state), len(state))

    def load_states(self, states: Sequence[bytes]) -> None:
        """Restores the results of save_state() on all ranks of a run with any number of ranks.

        Rank r of n loads the sum of the residuals of ranks r, r + n, r + 2n, ...

        Raises:
            BadArgument: see load_state(); or a state that this rank needs is missing.
        """
        blobs = [bytes(state) for state in states]
        _native.call("gw_reducer_state_load_ranks", self._handle, (ctypes.c_char_p * len(blobs))(*blobs),
                     (ctypes.c_size_t * len(blobs))(*map(len, blobs)), len(blobs))
