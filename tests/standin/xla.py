"""Implements the caller's side of XLA's foreign function interface. Calls gradwire.jax's registered handlers
as XLA does.

Replaces the module `jax`, from which gradwire.jax's handlers use three functions.
"""
from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
import threading
import types
from ctypes import POINTER, c_void_p
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

INVALID_ARGUMENT, ABORTED, UNIMPLEMENTED = 3, 10, 12  # XLA_FFI_Error_Code
# These are the functions of XLA_FFI_Api, version 0.3, in the order of the header.
FUNCTIONS = ("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get",
             "Type_Register", "ExecutionContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate",
             "DeviceMemory_Free", "ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create",
             "Future_SetAvailable", "Future_SetError", "RunId_Get", "DeviceOrdinal_Get")

_targets: Dict[str, int] = {}  # addresses of the registered functions, by platform


def _register(name: str, capsule: object, *, platform: str) -> None:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]
    _targets[platform] = pointer(capsule, None)


jax = types.ModuleType("jax")
jax.ffi = types.SimpleNamespace(register_ffi_target=_register)  # type: ignore[attr-defined]
jax.profiler = types.SimpleNamespace(
    TraceAnnotation=lambda *_, **__: contextlib.nullcontext())  # type: ignore[attr-defined]
sys.modules["jax"] = jax

from gradwire import _jax_ffi as ffi  # noqa: E402


class Failure(NamedTuple):
    """An XLA_FFI_Error that a handler returned."""

    code: int
    message: str


class _Context(NamedTuple):
    """An XLA_FFI_ExecutionContext."""

    ordinal: int
    stream: Optional[int]  # None: XLA_FFI_Stream_Get fails


_contexts: Dict[int, _Context] = {}
_failures: Dict[int, Failure] = {}
_numbers = itertools.count(1)
_mutex = threading.Lock()


def _kept(table: Dict[int, Any], value: Any) -> int:
    with _mutex:
        number = next(_numbers)
        table[number] = value
    return number


def _error_create(arguments: Any) -> int:
    given = arguments.contents
    return _kept(_failures, Failure(given.code, given.message.decode()))


def _stream_get(arguments: Any) -> Optional[int]:
    stream = _contexts[arguments.contents.context].stream
    if stream is None:
        return _kept(_failures, Failure(ABORTED, "this executor has no stream"))
    arguments.contents.stream = stream
    return None


def _ordinal_get(arguments: Any) -> Optional[int]:
    arguments.contents.ordinal = _contexts[arguments.contents.context].ordinal
    return None


_callbacks = {"Error_Create": ffi._ErrorCreate(_error_create), "Stream_Get": ffi._StreamGet(_stream_get),
              "DeviceOrdinal_Get": ffi._OrdinalGet(_ordinal_get)}


class _Api(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("extensions", c_void_p), ("version", ffi._Version),
                ("internal", c_void_p), ("functions", c_void_p * len(FUNCTIONS))]


# Functions that the handlers never call are null, so calling them crashes the process.
_api = _Api(ctypes.sizeof(_Api), None, ffi._Version(ctypes.sizeof(ffi._Version), None, 0, 3), None,
            (c_void_p *
             len(FUNCTIONS))(*(ctypes.cast(_callbacks[name], c_void_p).value if name in _callbacks else None
                               for name in FUNCTIONS)))


def _invoke(platform: str, frame: ffi._CallFrame) -> Optional[Failure]:
    frame.struct_size = ctypes.sizeof(frame)
    frame.api = ctypes.cast(ctypes.pointer(_api), POINTER(ffi._Api))
    error = ctypes.CFUNCTYPE(c_void_p, POINTER(ffi._CallFrame))(_targets[platform])(ctypes.pointer(frame))
    return _failures.pop(error) if error else None


def _buffers(addresses: Sequence[int], counts: Sequence[int]) -> ffi._Buffers:
    made = [ffi._Buffer(struct_size=ctypes.sizeof(ffi._Buffer), data=address, rank=1,
                        dims=(ctypes.c_int64 * 1)(count)) for address, count in zip(addresses, counts)]
    return ffi._Buffers(struct_size=ctypes.sizeof(ffi._Buffers), size=len(made),
                        buffers=(POINTER(ffi._Buffer) * len(made))(*map(ctypes.pointer, made)))


def _span(text: str) -> ffi._Span:
    data = text.encode()
    return ffi._Span(ctypes.cast(ctypes.c_char_p(data), c_void_p), len(data))


def call(platform: str, ordinal: int, stream: Optional[int], arrays: Sequence[Tuple[int, int]],
         plan: List[Dict[str, Any]], *, results: Optional[Sequence[int]] = None) -> Optional[Failure]:
    """Executes the custom call on a device. `arrays` lists each array's (address, number of elements). The
    call works in place unless `results` gives other addresses."""
    addresses, counts = [address for address, _ in arrays], [count for _, count in arrays]
    name, value = _span("plan"), _span(json.dumps(plan))
    attributes = ffi._Attributes(
        struct_size=ctypes.sizeof(ffi._Attributes), size=1, types=(ctypes.c_int * 1)(ffi._STRING),
        names=(POINTER(ffi._Span) * 1)(ctypes.pointer(name)), values=(c_void_p * 1)(ctypes.addressof(value)))
    context = _kept(_contexts, _Context(ordinal, stream))
    try:
        return _invoke(platform, ffi._CallFrame(
            context=context, stage=ffi._EXECUTE, operands=_buffers(addresses, counts),
            results=_buffers(results or addresses, counts), attributes=attributes))
    finally:
        del _contexts[context]


def metadata(platform: str) -> Tuple[int, int, int]:
    """Returns a handler's metadata from registration: (major version, minor version, traits)."""
    about = ffi._Metadata(struct_size=ctypes.sizeof(ffi._Metadata), traits=0xff)
    extension = ffi._MetadataExtension(
        ffi._Base(ctypes.sizeof(ffi._MetadataExtension), ffi._METADATA, None), ctypes.pointer(about))
    failed = _invoke(platform,
                     ffi._CallFrame(extensions=ctypes.cast(ctypes.pointer(extension), POINTER(ffi._Base))))
    assert failed is None, failed
    return about.version.major, about.version.minor, about.traits


def register() -> None:
    ffi.register_average()


ranks = ffi.ranks
