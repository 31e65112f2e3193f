"""XLA's foreign function interface through ctypes: makes a Python function the target of a custom call.

The structures copy xla/ffi/api/c_api.h (jax.ffi.include_dir()), version 0.3, up to the last field used here.
Nothing is compiled. XLA calls the function on one of its threads. The function holds the GIL while it reads
the call, and releases it in calls through ctypes.
"""
from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import jax

from gradwire import _native
from gradwire._communicator import Communicator, call_options
from gradwire._reducer import Reducer

_MAJOR, _MINOR = 0, 3
_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_STRING = 4  # XLA_FFI_AttrType_STRING
_ABORTED = 10  # XLA_FFI_Error_Code_ABORTED
# XLA_FFI_Error_Code_INVALID_ARGUMENT, RESOURCE_EXHAUSTED and UNIMPLEMENTED, by the classes that Gradwire's
# errors derive from.
_CODES = ((ValueError, 3), (MemoryError, 8), (NotImplementedError, 12))


class _Base(ctypes.Structure):
    pass


_Base._fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", POINTER(_Base))]


class _Version(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", POINTER(_Base)), ("major", c_int), ("minor", c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Base), ("metadata", POINTER(_Metadata))]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("message", c_char_p), ("code", c_int)]


class _OrdinalArguments(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("context", c_void_p),
                ("ordinal", c_int32)]


class _StreamArguments(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("context", c_void_p),
                ("stream", c_void_p)]


_ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments))
_OrdinalGet = ctypes.CFUNCTYPE(c_void_p, POINTER(_OrdinalArguments))
_StreamGet = ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArguments))


class _Api(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("version", _Version),
                ("internal", c_void_p), ("error_create", _ErrorCreate), ("others", c_void_p * 3),
                ("stream_get", _StreamGet), ("more", c_void_p * 12), ("ordinal_get", _OrdinalGet)]


class _Buffer(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("dtype", c_int), ("data", c_void_p),
                ("rank", c_int64), ("dims", POINTER(c_int64))]


class _Buffers(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("size", c_int64),
                ("types", POINTER(c_int)), ("buffers", POINTER(POINTER(_Buffer)))]


class _Span(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("size", c_size_t)]

    def text(self) -> str:
        return ctypes.string_at(self.data, self.size).decode() if self.size else ""


class _Attributes(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("size", c_int64),
                ("types", POINTER(c_int)), ("names", POINTER(POINTER(_Span))), ("values", POINTER(c_void_p))]


class _CallFrame(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", POINTER(_Base)), ("api", POINTER(_Api)),
                ("context", c_void_p), ("stage", c_int), ("operands", _Buffers), ("results", _Buffers),
                ("attributes", _Attributes)]


class Call(NamedTuple):
    """The arguments of a custom call. The memory is on the device, and valid during the call."""

    operands: List[int]  # addresses
    results: List[int]
    counts: List[int]  # elements of each result
    attributes: Dict[str, str]
    device: int  # on the CPU jax.Device.id; on GPUs local_hardware_id, the number in the process
    stream: int  # a cudaStream_t; 0 on the CPU


class _Refused(Exception):
    """A function of XLA's API failed."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error = error  # an XLA_FFI_Error


def _ask(function: Callable[..., "int | None"], arguments: ctypes.Structure) -> None:
    """Calls a function of XLA's API. Raises _Refused with the error that it returns."""
    error = function(byref(arguments))
    if error:
        raise _Refused(error)


def _buffers(of: _Buffers) -> List[_Buffer]:
    return [of.buffers[i].contents for i in range(of.size)]


def _count(buffer: _Buffer) -> int:
    count = 1
    for i in range(buffer.rank):
        count *= buffer.dims[i]
    return count


def _read(frame: _CallFrame, platform: str) -> Call:
    strings = {}
    for i in range(frame.attributes.size):
        if frame.attributes.types[i] == _STRING:
            value = ctypes.cast(frame.attributes.values[i], POINTER(_Span)).contents
            strings[frame.attributes.names[i].contents.text()] = value.text()
    ordinal = _OrdinalArguments(ctypes.sizeof(_OrdinalArguments), None, frame.context, -1)
    _ask(frame.api.contents.ordinal_get, ordinal)
    stream = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
    if platform == "CUDA":
        _ask(frame.api.contents.stream_get, stream)
    results = _buffers(frame.results)
    return Call([b.data or 0 for b in _buffers(frame.operands)], [b.data or 0 for b in results],
                [_count(b) for b in results], strings, ordinal.ordinal, stream.stream or 0)


_kept: List[object] = []  # callbacks, which XLA calls for as long as the process lives


def handler_of(function: Callable[[Call], None], platform: str) -> Callable[..., "int | None"]:
    """Returns the handler for a platform, "cpu" or "CUDA". Exceptions of `function` fail the computation."""

    def handler(pointer: "ctypes._Pointer[_CallFrame]") -> "int | None":
        frame = pointer.contents
        extension = frame.extensions
        while extension:
            if extension.contents.type == _METADATA:
                metadata = ctypes.cast(extension, POINTER(_MetadataExtension)).contents.metadata.contents
                metadata.version.major, metadata.version.minor, metadata.traits = _MAJOR, _MINOR, 0
                return None
            extension = extension.contents.next
        if frame.stage != _EXECUTE:
            return None
        try:
            function(_read(frame, platform))
            return None
        except _Refused as refused:
            return refused.error
        except BaseException as error:  # no exception may pass through XLA's frames
            text = f"{type(error).__name__}: {error}".encode(errors="replace")
            code = next((code for kind, code in _CODES if isinstance(error, kind)), _ABORTED)
            arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, code)
            return frame.api.contents.error_create(byref(arguments))

    return handler


def register(name: str, function: Callable[[Call], None]) -> None:
    """Makes `function` the target of jax.ffi.ffi_call(name, ...), on the host and on CUDA.

    On CUDA the function enqueues on the call's stream.
    """
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
    for platform in ("cpu", "CUDA"):
        callback = ctypes.CFUNCTYPE(c_void_p, POINTER(_CallFrame))(handler_of(function, platform))
        _kept.append(callback)
        jax.ffi.register_ffi_target(name, make(ctypes.cast(callback, c_void_p), None, None),
                                    platform=platform)

# ---- When a program runs: the ranks of this process, and the custom call -----------------------------------

TARGET = "gradwire_average"
DTYPES = {"float32": _native.FLOAT32, "bfloat16": _native.BFLOAT16, "float16": _native.FLOAT16}
_BYTES = {_native.FLOAT32: 4, _native.BFLOAT16: 2, _native.FLOAT16: 2}


_KEPT_REDUCERS = 8  # per rank: each has a copy of its program's residuals


class Rank(NamedTuple):
    """The rank of a device."""

    communicator: Communicator
    lock: threading.Lock
    reducers: Dict[str, Reducer]  # by plan, the most recently used last

    def close(self) -> None:
        for reducer in self.reducers.values():
            reducer.close()
        self.communicator.close()


class Ranks:
    """The ranks of this process, one for each of its devices."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.communicators: Dict[int, Rank] = {}  # by Call.device
        self.world = 0
        self.generation = 0  # counts init() and shutdown()

    def set(self, communicators: Dict[int, Communicator], world: int) -> None:
        """Closes the ranks and replaces them."""
        for rank in self.communicators.values():
            rank.close()
        self.communicators = {device: Rank(comm, threading.Lock(), {})
                              for device, comm in communicators.items()}
        self.world = world
        self.generation += 1
        self.process = os.getpid()

    def forget_parents(self) -> None:
        """Drops the parent's communicators in a forked process."""
        if self.process != os.getpid():
            self.set({}, 0)


ranks = Ranks()


def check_mapped(devices: int) -> None:
    """Raises RuntimeError if jax.shard_map over this number of devices would leave ranks out."""
    if devices not in (ranks.world, len(ranks.communicators)):
        raise RuntimeError(f"gradwire.jax is inside jax.shard_map over {devices} of {ranks.world} devices, "
                           "but all ranks must take part, and each device is a rank: use a mesh of all "
                           f"{ranks.world} devices, or of the {len(ranks.communicators)} devices of each "
                           "process")


@functools.lru_cache(maxsize=256)
def _parsed(plan: str) -> List[Dict[str, Any]]:
    return [dict(part) for part in json.loads(plan)]


def run_call(call: Call) -> None:
    rank = ranks.communicators.get(call.device)
    if rank is None:
        raise RuntimeError(f"no communicator for device {call.device}: gradwire.jax.init() did not include "
                           "it, or gradwire.jax.shutdown() closed it: call gradwire.jax.init() again")
    for i, (given, result) in enumerate(zip(call.operands, call.results)):
        if given != result:  # every operand is aliased with its result
            raise RuntimeError(f"XLA did not alias operand {i} with its result: report this bug")
    plan = call.attributes["plan"]
    parts = _parsed(plan)
    if parts[0]["devices"]:
        check_mapped(parts[0]["devices"])
    addresses, counts = call.results[1:], call.counts[1:]
    with rank.lock:  # serializes concurrent computations on this device
        if call.stream:
            # An earlier call may have failed on its stream, which reports no errors.
            _native.call("gw_comm_check", rank.communicator._handle)
        if "tensors" in parts[0]:
            _run_step(rank, plan, parts[0], addresses, call.stream)
            return
        residuals = iter(addresses[len(parts):])
        for part, address, count in zip(parts, addresses, counts):
            residual = next(residuals) if part["keeps"] else None
            _run_part(rank.communicator, part, address, count, residual, call.stream)


def _run_step(rank: Rank, plan: str, step: Dict[str, Any], addresses: List[int], stream: int) -> None:
    spec, tag, tensors = step["spec"], step["tag"], step["tensors"]
    count = len(tensors)
    # Creation is collective: the ranks make the same calls in the same order.
    reducer = rank.reducers.pop(plan, None) or Reducer(
        rank.communicator, spec, [(f"array {i}", rows, cols) for i, (rows, cols, *_) in enumerate(tensors)],
        tag=tag)
    rank.reducers[plan] = reducer
    if len(rank.reducers) > _KEPT_REDUCERS:
        rank.reducers.pop(next(iter(rank.reducers))).close()
    states, given = (_native.State * count)(), iter(addresses[1 + count:])
    for kind, field in ((2, "residual"), (3, "factor")):
        for state, tensor in zip(states, tensors):
            if tensor[kind]:
                setattr(state, field, next(given))
    size = 4 * sum(tensor[0] * tensor[1] for tensor in tensors)
    with jax.profiler.TraceAnnotation(f"gradwire {spec}: {tag}", spec=spec, bytes=size):
        reducer._apply(Reducer.addresses_of(addresses[1:1 + count]), states, addresses[0], stream)


def _run_part(communicator: Communicator, part: Dict[str, Any], address: int, count: int,
              residual: Optional[int], stream: int) -> None:
    spec, tag = part["spec"], part["tag"]
    size = count * _BYTES[part["dtype"]]
    with jax.profiler.TraceAnnotation(f"gradwire {spec}: {tag}", spec=spec, bytes=size):
        _native.call("gw_allreduce", communicator._handle, address, count, part["dtype"],
                     _native.SUM if part["op"] == "sum" else _native.AVG, _native.text(spec, "the spec"),
                     stream or None, call_options(tag, residual))


@functools.lru_cache(maxsize=None)
def register_average() -> None:
    """Registers the custom call with XLA."""
    register(TARGET, run_call)
