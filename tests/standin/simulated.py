"""Calls the stand-in's CUDA runtime through ctypes: arrays on simulated GPUs, streams, and ranks as
threads."""
from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import random
import struct
import sys
import types
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, Callable, Iterator, List, Optional

import gradwire

NOT_READY = 600  # cudaErrorNotReady
NON_BLOCKING = 1  # cudaStreamNonBlocking
ANY_KIND = 4  # cudaMemcpyDefault

_RUNTIME = ctypes.CDLL(os.environ["GRADWIRE_LIBRARY"])
for _name, _arguments in {
        "cudaMalloc": [POINTER(c_void_p), c_size_t], "cudaFree": [c_void_p],
        "cudaMallocHost": [POINTER(c_void_p), c_size_t], "cudaFreeHost": [c_void_p],
        "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
        "cudaMemsetAsync": [c_void_p, c_int, c_size_t, c_void_p],
        "cudaSetDevice": [c_int], "cudaGetDevice": [POINTER(c_int)],
        "cudaStreamCreateWithFlags": [POINTER(c_void_p), c_uint], "cudaStreamDestroy": [c_void_p],
        "cudaStreamSynchronize": [c_void_p],
        "cudaStreamBeginCapture": [c_void_p, c_int], "cudaStreamEndCapture": [c_void_p, POINTER(c_void_p)],
        "cudaGraphDestroy": [c_void_p],
        "cudaEventCreateWithFlags": [POINTER(c_void_p), c_uint], "cudaEventRecord": [c_void_p, c_void_p],
        "cudaEventQuery": [c_void_p], "cudaEventDestroy": [c_void_p],
        "standin_release": [c_void_p, c_void_p]}.items():
    getattr(_RUNTIME, _name).argtypes = _arguments
_RUNTIME.standin_hold.argtypes, _RUNTIME.standin_hold.restype = [c_void_p], c_void_p
_RUNTIME.standin_release.restype = None
_RUNTIME.cudaGetErrorName.restype = c_char_p


def cuda(function: str, *arguments: Any) -> None:
    status = getattr(_RUNTIME, function)(*arguments)
    if status != 0:
        raise AssertionError(f"{function}: {_RUNTIME.cudaGetErrorName(status).decode()}")


def current_device() -> int:
    device = c_int(-1)
    cuda("cudaGetDevice", byref(device))
    return device.value


class Stream:
    """A stream of a device. The end of its `with` statement waits for the stream and destroys it."""

    def __init__(self, device: int) -> None:
        handle = c_void_p()
        cuda("cudaSetDevice", device)
        cuda("cudaStreamCreateWithFlags", byref(handle), NON_BLOCKING)
        self.handle = handle.value or 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.synchronize()
        cuda("cudaStreamDestroy", self.handle)

    def synchronize(self) -> None:
        cuda("cudaStreamSynchronize", self.handle)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stops the stream after the work enqueued so far, until the end of the `with` statement."""
        hold = _RUNTIME.standin_hold(self.handle)
        assert hold, "no such stream"
        try:
            yield
        finally:
            _RUNTIME.standin_release(hold, self.handle)

    def record(self) -> Callable[[], bool]:
        """Returns a function that returns whether the work enqueued so far is done."""
        event = c_void_p()
        cuda("cudaEventCreateWithFlags", byref(event), 0)
        cuda("cudaEventRecord", event, self.handle)

        def done() -> bool:
            status = _RUNTIME.cudaEventQuery(event)
            assert status in (0, NOT_READY), status
            return status == 0

        return done


class Tensor:
    """What Gradwire asks of PyTorch's tensors, in addition to Array's functions."""

    layout = "strided"

    def __torch_dispatch__(self) -> None:
        raise NotImplementedError

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(nbytes=lambda: self.bytes)

    storage = untyped_storage

    def storage_offset(self) -> int:
        return 0

    def element_size(self) -> int:
        return self.bytes // max(self.count, 1)

    def is_neg(self) -> bool:
        return False


# These tests do without PyTorch, and Gradwire takes tensors of PyTorch only.
_torch: Any = types.ModuleType("torch")
_torch.Tensor, _torch.strided = Tensor, Tensor.layout
sys.modules["torch"] = _torch


class Array(Tensor):
    """A contiguous array on a device, or on the host (device=None), as a PyTorch tensor."""

    SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

    def __init__(self, device: Optional[int], values: List[float], dtype: str = "float32") -> None:
        self.device = types.SimpleNamespace(type="cpu" if device is None else "cuda", index=device)
        self.is_cuda, self.dtype = device is not None, f"torch.{dtype}"
        self.count, self.bytes = len(values), len(values) * self.SIZES[dtype]
        self.encoded = encode(values, dtype)
        self.host = ctypes.create_string_buffer(self.encoded, self.bytes)
        self.address = c_void_p(ctypes.addressof(self.host))
        if device is not None:
            cuda("cudaSetDevice", device)
            self.address = c_void_p()
            cuda("cudaMalloc", byref(self.address), self.bytes)

    def data_ptr(self) -> int:
        return self.address.value or 0

    def numel(self) -> int:
        return self.count

    def is_contiguous(self) -> bool:
        return True

    def write(self, stream: Stream) -> None:
        """Enqueues a copy of the values to the device."""
        cuda("cudaMemcpyAsync", self.address, self.encoded, self.bytes, ANY_KIND, stream.handle)

    def overwrite(self, stream: Stream) -> None:
        """Enqueues a fill with NaN."""
        cuda("cudaMemsetAsync", self.address, 0xff, self.bytes, stream.handle)

    def read(self, stream: Optional[Stream] = None) -> bytes:
        if stream is not None:
            cuda("cudaMemcpyAsync", self.host, self.address, self.bytes, ANY_KIND, stream.handle)
            stream.synchronize()
        return self.host.raw

    def free(self) -> None:
        if self.device.type == "cuda":
            cuda("cudaFree", self.address)


class Pinned:
    """Page-locked memory, to which copies are asynchronous."""

    def __init__(self, size: int) -> None:
        self.address, self.bytes = c_void_p(), size
        cuda("cudaMallocHost", byref(self.address), size)

    def take(self, array: Array, stream: Stream) -> None:
        """Enqueues a copy of an array into this memory."""
        cuda("cudaMemcpyAsync", self.address, array.address, self.bytes, ANY_KIND, stream.handle)

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.bytes)

    def free(self) -> None:
        cuda("cudaFreeHost", self.address)


def encode(values: List[float], dtype: str) -> bytes:
    if dtype == "bfloat16":  # exact for these tests' values, otherwise truncated
        wide = struct.pack(f"<{len(values)}f", *values)
        return b"".join(wide[i + 2:i + 4] for i in range(0, len(wide), 4))
    return struct.pack(f"<{len(values)}{'f' if dtype == 'float32' else 'e'}", *values)


def numbers(rank: int, count: int) -> List[float]:
    return [x / 16 for x in random.Random(rank + 1).choices(range(-64, 65), k=count)]


def mean(world: int, count: int) -> List[float]:
    """Returns the mean of all ranks' numbers(). Float16 and bfloat16 represent the mean exactly for a world
    of up to 4 ranks."""
    return [sum(values) / world for values in zip(*(numbers(rank, count) for rank in range(world)))]


def together(world: int, body: Callable[[int], Any]) -> List[Any]:
    """Runs body(rank) on one thread per rank. Returns the results of all ranks."""
    with concurrent.futures.ThreadPoolExecutor(world) as threads:
        return list(threads.map(body, range(world)))


_meetings = itertools.count()


@contextlib.contextmanager
def group(world: int, on: str) -> Iterator[List[gradwire.Communicator]]:
    """Yields the communicators of a group of threads: rank r is on device r, or on the host if on="host"."""
    meeting = f"local://standin python {next(_meetings)}"
    ranks = together(world, lambda rank: gradwire.Communicator(
        meeting, rank, world, device="host" if on == "host" else rank, timeout_s=60))
    try:
        yield ranks
    finally:
        together(world, lambda rank: ranks[rank].close())
