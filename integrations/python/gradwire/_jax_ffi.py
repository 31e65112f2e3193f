"""XLA's foreign function interface through ctypes: makes a Python function the target of a custom call.

The structures copy xla/ffi/api/c_api.h (jax.ffi.include_dir()), version 0.3, up to the last field used here.
Nothing is compiled. XLA calls the function on one of its threads. The function holds the GIL while it reads
the call, and releases it in calls through ctypes.
"""
from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Callable, Dict, List, NamedTuple

import jax

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
