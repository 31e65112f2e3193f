"""Reducers, for numpy arrays and torch tensors, and the choice of their spec."""
from __future__ import annotations

import ctypes
import math
import struct
import zlib
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from gradwire import _native
from gradwire._communicator import Communicator, op_of
from gradwire._memory import TORCH_DTYPES, Handle, memory_of

# ---- States, by tensor -------------------------------------------------------------------------------------
# Layout: docs/checkpoints.md. PyTorch rebuilds its buckets after the first step, and each tensor's state must
# move to its new bucket.

_HEADER = struct.Struct("<8sIIQqII")
_TENSOR, _ENTRY = struct.Struct("<qqQQ"), struct.Struct("<8sQQ")
_MAGIC, _VERSION = b"GRADWIRE", 2
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


class Entry(NamedTuple):
    """Part of a tensor's state: little-endian elements. `dtype` is a safetensors name such as "F32"."""

    dtype: str
    data: bytes


class TensorState(NamedTuple):
    """The state of one (rows, cols) tensor by kind: "residual", PowerSGD's "factor", ..."""

    rows: int
    cols: int
    entries: Dict[str, Entry]


class State(NamedTuple):
    """A reducer's state. The reducer that loads it must have the same `identity`."""

    identity: str
    steps: int
    tensors: Dict[str, TensorState]


def _walk(view: memoryview) -> Iterator[Tuple[str, int, int, Iterator[Tuple[str, str, memoryview]]]]:
    """Yields (tensor, rows, cols, its entries) from the memory of a state.

    An entry is (kind, dtype, elements). Read all entries of a tensor before the next tensor.
    """
    at = _HEADER.size + _HEADER.unpack_from(view)[-1]

    def text(size: int) -> str:
        nonlocal at
        at += size
        return bytes(view[at - size:at]).decode()

    def entries(count: int) -> Iterator[Tuple[str, str, memoryview]]:
        nonlocal at
        for _ in range(count):
            dtype_bytes, elements, kind_bytes = _ENTRY.unpack_from(view, at)
            at += _ENTRY.size
            kind, dtype = text(kind_bytes), dtype_bytes.rstrip(b"\0").decode()
            at += _BYTES[dtype] * elements
            yield kind, dtype, view[at - _BYTES[dtype] * elements:at]

    for _ in range(_HEADER.unpack_from(view)[-2]):
        rows, cols, count, name_bytes = _TENSOR.unpack_from(view, at)
        at += _TENSOR.size
        yield text(name_bytes), rows, cols, entries(count)


def entries_of(blob: bytearray) -> Iterator[Tuple[str, str, str, memoryview]]:
    """Yields (tensor, kind, dtype, elements) of each entry of a state from gw_reducer_state_save.

    The elements are in the memory of `blob`, which is not validated.
    """
    for name, _, _, entries in _walk(memoryview(blob)):
        for kind, dtype, elements in entries:
            yield name, kind, dtype, elements


def unpack(blob: "bytes | bytearray") -> State:
    """Parses the output of gw_reducer_state_save."""
    view = memoryview(blob)
    magic, version, crc, size, steps, _, identity_bytes = _HEADER.unpack_from(view)
    if (magic, version, size, crc) != (_MAGIC, _VERSION, len(view), zlib.crc32(view[_HEADER.size:])):
        raise ValueError(f"not a reducer's state of version {_VERSION}, or it is truncated or damaged")
    identity = bytes(view[_HEADER.size:_HEADER.size + identity_bytes]).decode()
    return State(identity, steps, {
        name: TensorState(rows, cols, {kind: Entry(dtype, bytes(data)) for kind, dtype, data in entries})
        for name, rows, cols, entries in _walk(view)})


def pack(state: State) -> bytes:
    """Inverts unpack(): returns the bytes of a state."""
    identity = state.identity.encode()
    parts = [identity]
    for name, t in state.tensors.items():
        encoded = name.encode()
        parts += [_TENSOR.pack(t.rows, t.cols, len(t.entries), len(encoded)), encoded]
        for kind, entry in t.entries.items():
            encoded = kind.encode()
            elements = len(entry.data) // _BYTES[entry.dtype]
            parts += [_ENTRY.pack(entry.dtype.encode(), elements, len(encoded)), encoded, entry.data]
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(body), _HEADER.size + len(body), state.steps,
                        len(state.tensors), len(identity)) + body

# ---- Reducers ----------------------------------------------------------------------------------------------


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
        options = _native.ReducerOptions(seed=seed, bucket_bytes=bucket_bytes,
                                         sum=int(op_of(op) == _native.SUM),
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

    def _apply(self, addresses: "ctypes.Array[ctypes.c_void_p]", states: "ctypes.Array[_native.State]",
               step: int, stream: int = 0) -> None:
        """Reduces gradients with the state in the caller's memory: see gw_reducer_apply(). Checks nothing.

        Args:
            addresses: from addresses_of().
            states: of each tensor.
            step: the address of the number of earlier steps, an int32.
        """
        _native.call("gw_reducer_apply", self._handle, addresses, states, step, stream or None)

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
        stats = _native.Stats()
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

# ---- The choice of a spec ----------------------------------------------------------------------------------


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

    Steps within 5 % tie. Collective; all ranks choose alike. Blocks. The gradients do not change. Call it
    after a few steps, because gradients below a last layer that begins as zero are zero in the first step.

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
    options = _native.ChooseOptions(specs=texts, n_specs=len(specs), error=error, bucket_bytes=bucket_bytes,
                                    seed=seed, compute_ms=compute_ms, backward_ms=backward_ms)
    trials, chosen = (_native.Trial * max(1, len(specs)))(), ctypes.c_int32()
    comm._wait_for(("gw_choose", comm._handle, tensors, len(gradients), ctypes.byref(options),
                    _native.stream(stream), trials, ctypes.byref(chosen)))
    return Choice(specs[chosen.value], {
        spec: Trial(one.error, one.communicate_ms, one.exposed_ms) for spec, one in zip(specs, trials)})


def orthonormalize(comm: Communicator, values: int, shapes: Sequence[Tuple[int, int, int]], second: bool,
                   seed: int, step: int, flags: int, stream: int = 0) -> None:
    """Orthonormalizes the columns of factors in place: see gw_orthonormalize().

    Args:
        values, flags: addresses.
        shapes: (rows, columns, number) of each factor.
    """
    table = (ctypes.c_int64 * (3 * len(shapes)))(*(size for shape in shapes for size in shape))
    _native.call("gw_orthonormalize", comm._handle, values, table, len(shapes), int(second), seed, step,
                 flags, stream or None)
