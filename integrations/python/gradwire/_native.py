"""Loads libgradwire.so through ctypes, declares its functions, and turns its errors into exceptions.

Nothing is compiled against Python or PyTorch, so one library serves every version of both.
"""
from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import math
import operator
import os
import pathlib
import pkgutil
import queue
import re
import threading
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, Union

HOST = -1
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
SUM, AVG = 0, 1


def _own_version() -> str:
    """Returns the version that setup.py wrote.

    In the source tree, returns the header's version; in a source archive, "".
    """
    with contextlib.suppress(OSError):  # the package may be in a zip archive
        made = pkgutil.get_data("gradwire", "_version.py") or b""
        return re.findall(r'__version__ = "(.+)"', made.decode())[0]
    with contextlib.suppress(OSError, IndexError):
        header = pathlib.Path(__file__).resolve().parents[3] / "include" / "gradwire" / "gradwire.h"
        return ".".join(re.findall(r"#define GW_VERSION_\w+ (\d+)", header.read_text()))
    return ""


__version__ = _own_version()
# The library version that this package needs: before 1.0 a minor version may change the ABI. Empty: any.
_NEEDED = tuple(int(part) for part in __version__.split(".")[:2] if part)


class Error(RuntimeError):
    """Base class of Gradwire's errors. The message says what is wrong and what to do."""


class BadArgument(Error, ValueError):
    """An argument is null, out of range, or cannot be parsed."""


class BadHandle(Error):
    """The communicator or reducer was closed, or belongs to another process."""


class CommFailed(Error):
    """A timeout, a dead peer, ranks that disagree, or an abort. The communicator cannot be used again."""


class DeviceFailed(Error):
    """A CUDA call failed, or the device does not exist."""


class Unsupported(Error, NotImplementedError):
    """The arguments are valid, but this version or build does not support them."""


class NotDone(Error, TimeoutError):
    """Request.wait() timed out; the call is still running."""


class NoMemory(Error, MemoryError):
    """Host or device memory ran out."""


_EXCEPTIONS = {1: BadArgument, 2: BadHandle, 3: CommFailed, 4: DeviceFailed, 5: Unsupported, 6: NoMemory,
               8: NotDone}


Seconds = Union[float, datetime.timedelta]
_RANGES: Dict[Any, Tuple[int, int]] = {c_int32: (-2**31, 2**31 - 1), c_int64: (-2**63, 2**63 - 1),
                                       c_uint64: (0, 2**64 - 1)}


def integer(value: Any, what: str, kind: Any = c_int32) -> int:
    """Returns `value` as an int that fits into `kind`. ctypes would drop higher bits without an error.

    Args:
        what: names the value in errors: "root".

    Raises:
        BadArgument: the value does not fit.
        TypeError: the value is not an integer.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {type(value).__name__}, not int") from None
    low, high = _RANGES[kind]
    if not low <= number <= high:
        raise BadArgument(f"{what} is {number}: expected a number from {low} to {high}")
    return number


def integers(values: Any, what: str, kind: Any = c_int32) -> Any:
    """Returns a C array of integer() of each value."""
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{what} is {type(values).__name__}, not a sequence of int") from None
    return (kind * len(items))(*(integer(item, f"{what}[{i}]", kind) for i, item in enumerate(items)))


def number(value: Any, what: str) -> float:
    """Returns `value` as a float; infinity if it is larger than any float. Raises TypeError for other types."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {type(value).__name__}, not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def seconds(value: Any, what: str = "timeout_s", least: float = 1e-3) -> float:
    """Returns a time limit in seconds: of a number or a datetime.timedelta; infinity means no limit.

    Raises:
        BadArgument: the value is not a number of at least `least`.
        TypeError: the value has another type.
    """
    limit = value.total_seconds() if isinstance(value, datetime.timedelta) else number(value, what)
    if not limit >= least:  # NaN also
        raise BadArgument(f"{what} is {limit:g} s: expected at least {least:g} s")
    return limit


def milliseconds(value: Any, least: float = 1e-3) -> int:
    """Returns seconds() of timeout_s in milliseconds, for the library, which takes at most 24 days."""
    return math.ceil(min(seconds(value, least=least), 1e9) * 1000)


def stream(value: Any) -> Optional[int]:
    """Returns a cudaStream_t for the library: None, which is the default stream, for 0."""
    return integer(value, "stream", c_uint64) or None


def device(value: Any) -> int:
    """Returns the library's number of a communicator's device: "host", or the number of a CUDA device."""
    if isinstance(value, str) and value == "host":
        return HOST
    if not hasattr(value, "__index__"):
        raise ValueError(f"device must be 'host' or the number of a CUDA device, not {value!r}")
    return integer(value, "device")


class _Checked(ctypes.Structure):
    """A C structure of gradwire.h: CommOptions is gw_comm_options. Its fields refuse numbers that do not fit.

    The constructor sets `size`. The elements of an array have no constructor.
    """

    def __init__(self, *values: Any, **fields: Any) -> None:
        super().__init__(*values, **fields)
        if self._fields_[0][0] == "size":
            self.size = ctypes.sizeof(self)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = next((field[1] for field in self._fields_ if field[0] == name), None)
        if kind in _RANGES:
            value = integer(value, name, kind)
        super().__setattr__(name, number(value, name) if kind is c_double else value)


class CommOptions(_Checked):
    _fields_ = [("size", c_size_t), ("rendezvous", c_char_p), ("store", c_void_p), ("nccl_comm", c_void_p),
                ("invitation", c_char_p), ("rank", c_int32), ("world", c_int32), ("device", c_int32),
                ("ranks_per_node", c_int32), ("timeout_ms", c_int64), ("secret", c_char_p),
                ("interface", c_char_p), ("ports", c_int32 * 2), ("shrinkable", c_int32),
                ("cancel", POINTER(c_int32))]


class CommInfo(_Checked):
    _fields_ = [("size", c_size_t), ("rank", c_int32), ("world", c_int32), ("device", c_int32),
                ("ranks_per_node", c_int32), ("bytes_sent", c_uint64), ("transport", c_char_p),
                ("invitation", c_char_p), ("joiners", c_int32)]


class CallOptions(_Checked):
    _fields_ = [("size", c_size_t), ("tag", c_char_p), ("residual", c_void_p), ("request", POINTER(c_void_p))]


class Tensor(_Checked):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("rows", c_int64), ("cols", c_int64),
                ("dtype", c_int32), ("grad", c_void_p)]


class ReducerOptions(_Checked):
    _fields_ = [("size", c_size_t), ("bucket_bytes", c_int64), ("sum", c_int32), ("no_timing", c_int32),
                ("seed", c_uint64), ("shard", c_int32), ("tag", c_char_p), ("skip_unused", c_int32)]


class Range(_Checked):
    _fields_ = [("tensor", c_int32), ("begin", c_int64), ("end", c_int64)]


class Stats(_Checked):
    _fields_ = [("size", c_size_t), ("steps", c_int64), ("wire_bytes", c_uint64), ("dense_bytes", c_uint64),
                ("comm_ms", c_double), ("exposed_comm_ms", c_double), ("extra_bytes", c_int64),
                ("buckets", c_int32), ("buckets_in_place", c_int32), ("description", c_char_p)]


class ChooseOptions(_Checked):
    _fields_ = [("size", c_size_t), ("specs", POINTER(c_char_p)), ("n_specs", c_int32), ("error", c_double),
                ("bucket_bytes", c_int64), ("seed", c_uint64), ("compute_ms", c_double),
                ("backward_ms", c_double)]


class Trial(_Checked):
    _fields_ = [("error", c_double), ("communicate_ms", c_double), ("exposed_ms", c_double)]


class SpecInfo(_Checked):
    _fields_ = [("size", c_size_t), ("method", c_char_p), ("wire", c_char_p), ("bits", c_double),
                ("exact", c_int32), ("small", c_int32), ("rank", c_int32), ("alternate", c_int32),
                ("start", c_int64), ("seed", c_uint64)]


class State(_Checked):
    _fields_ = [("residual", c_void_p), ("factor", c_void_p)]


FormatCallback = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_int64, c_void_p)


class Format(_Checked):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("block", c_int64), ("bytes", c_int64),
                ("encode", FormatCallback), ("decode", FormatCallback), ("user", c_void_p)]


StoreSet = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_char_p, c_void_p, c_size_t, c_int64)
StoreGet = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_char_p, c_int64, c_void_p, c_size_t, POINTER(c_size_t))


class Store(_Checked):
    _fields_ = [("size", c_size_t), ("set", StoreSet), ("get", StoreGet), ("user", c_void_p),
                ("prefix", c_char_p)]


_SIGNATURES: Dict[str, List[Any]] = {
    "gw_comm_create": [POINTER(CommOptions), POINTER(c_void_p)],
    "gw_comm_split": [c_void_p, c_int, c_int, POINTER(c_void_p)],
    "gw_comm_shrink": [c_void_p, c_int64, POINTER(c_int32), POINTER(c_void_p), POINTER(c_int32), c_int32],
    "gw_comm_admit": [c_void_p, c_int32],
    "gw_comm_grow": [c_void_p, POINTER(c_void_p)],
    "gw_comm_query": [c_void_p, POINTER(CommInfo)],
    "gw_comm_check": [c_void_p],
    "gw_comm_abort": [c_void_p, c_char_p],
    "gw_comm_destroy": [c_void_p],
    "gw_format_register": [POINTER(Format)],
    "gw_request_wait": [c_void_p, c_int64],
    "gw_request_destroy": [c_void_p],
    "gw_allreduce": [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_char_p, c_void_p, POINTER(CallOptions)],
    "gw_reduce_scatter": [c_void_p, c_void_p, c_void_p, POINTER(c_int64), c_int32, c_int32, c_char_p,
                          c_void_p, POINTER(CallOptions)],
    "gw_all_gather": [c_void_p, c_void_p, c_void_p, POINTER(c_int64), c_int32, c_char_p, c_void_p,
                      POINTER(CallOptions)],
    "gw_all_gather_update": [c_void_p, c_void_p, c_void_p, POINTER(c_int64), c_int32, c_char_p, c_void_p,
                             POINTER(CallOptions)],
    "gw_broadcast": [c_void_p, c_void_p, c_int64, c_int32, c_int, c_char_p, c_void_p, POINTER(CallOptions)],
    "gw_choose": [c_void_p, POINTER(Tensor), c_int32, POINTER(ChooseOptions), c_void_p, POINTER(Trial),
                  POINTER(c_int32)],
    "gw_reducer_shards": [c_void_p, POINTER(Range), c_int32, POINTER(c_int32)],
    "gw_reducer_create": [c_void_p, c_char_p, POINTER(Tensor), c_int32, POINTER(ReducerOptions),
                          POINTER(c_void_p)],
    "gw_reducer_allreduce": [c_void_p, POINTER(c_void_p), c_void_p, POINTER(c_void_p)],
    "gw_reducer_apply": [c_void_p, POINTER(c_void_p), POINTER(State), c_void_p, c_void_p],
    "gw_orthonormalize": [c_void_p, c_void_p, POINTER(c_int64), c_int32, c_int32, c_uint64, c_int64, c_void_p,
                          c_void_p],
    "gw_spec_query": [c_char_p, c_int64, c_int64, POINTER(SpecInfo)],
    "gw_reducer_stats": [c_void_p, POINTER(Stats)],
    "gw_reducer_state_save": [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)],
    "gw_reducer_state_load": [c_void_p, c_char_p, c_size_t],
    "gw_reducer_state_load_ranks": [c_void_p, POINTER(c_char_p), POINTER(c_size_t), c_int32],
    "gw_reducer_destroy": [c_void_p],
}


def _candidates() -> List[str]:
    chosen = os.environ.get("GRADWIRE_LIBRARY")
    if chosen:
        return [chosen]
    here = pathlib.Path(__file__).resolve().parent
    found = [str(path) for path in sorted(here.glob("libgradwire.so*"))]  # installed by pip
    if not here.is_dir():
        found.append(str(here / _IN_ARCHIVE))
    if len(here.parents) > 2:  # used from the source tree
        built = here.parents[2] / "build" / "lib" / "libgradwire.so"
        if built.exists():
            found.append(str(built))
    abi = re.findall(r"^0\.\d+|^\d+", __version__)
    return found + [".".join(["libgradwire.so", *abi])]  # found by the dynamic linker


_IN_ARCHIVE = "libgradwire.so"


def _open(path: str) -> ctypes.CDLL:
    """Loads a library from a path, or from the archive (a zip file) that this package is imported from."""
    if os.path.dirname(path) != os.path.dirname(os.path.abspath(__file__)) or os.path.exists(path):
        return ctypes.CDLL(path)
    data = pkgutil.get_data("gradwire", _IN_ARCHIVE)
    descriptor = os.memfd_create(_IN_ARCHIVE)  # the dynamic linker reads files only
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data or b"")
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        os.close(descriptor)


# Set by _load(), for messages.
library_path = library_version = ""


def _load() -> ctypes.CDLL:
    global library_path, library_version
    problems = []
    for path in _candidates():
        try:
            library = _open(path)
        except OSError as error:
            problems.append(str(error))
            continue
        library.gw_version.restype = c_int
        version = library.gw_version()
        if _NEEDED and (version // 10000, version // 100 % 100) != _NEEDED:
            raise ImportError(f"{path} is Gradwire {version // 10000}.{version // 100 % 100}, this package "
                              f"needs {_NEEDED[0]}.{_NEEDED[1]}; set GRADWIRE_LIBRARY to such a library")
        library.gw_last_error.restype = c_char_p
        for name, arguments in _SIGNATURES.items():
            if not hasattr(library, name):
                raise ImportError(
                    f"{path} is older than this package and lacks {name}; build it again, or set "
                    "GRADWIRE_LIBRARY to another library")
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int32
        library_path, library_version = path, f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return library
    raise ImportError("libgradwire.so was not found. Run `pip install ./integrations/python` or `make build` "
                      "in the sources; if it is in neither their build folder nor the linker's path, set "
                      "GRADWIRE_LIBRARY to its path. Tried: " + "; ".join(problems))


class _Callbacks(threading.local):
    running = 0  # number of running callbacks on this thread


callbacks = _Callbacks()
# Errors of callbacks: the text that the library shows, the exception, and the buffer of the text.
failures: Deque[Tuple[str, Optional[BaseException], object]] = collections.deque(maxlen=16)

def failed(text: str, error: Optional[BaseException] = None) -> int:
    """Returns a callback's error: the address of `text`. The library copies the text at once."""
    buffer = ctypes.create_string_buffer(text.encode(errors="replace"))
    failures.append((text, error, buffer))
    return ctypes.addressof(buffer)


_library: Optional[ctypes.CDLL] = None


def library() -> ctypes.CDLL:
    """Returns the loaded library. Raises ImportError, with the paths that were tried, if there is none."""
    global _library
    if _library is None:
        _library = _load()
    return _library


if not __version__:
    _library = _load()
    __version__ = library_version


def text(value: str, what: str) -> bytes:
    """Encodes a string for the library, which reads up to a NUL byte.

    Args:
        value: the text.
        what: names the text in errors: "the spec".

    Raises:
        BadArgument: the text contains a NUL byte, or surrogates, which are not Unicode.
        TypeError: `value` is not a str.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is {type(value).__name__}, not str")
    try:
        return _whole(value.encode(), what)
    except UnicodeEncodeError as error:
        raise BadArgument(f"{what} {value!r} is not Unicode text: {error}") from error


def path(value: str, what: str) -> bytes:
    """Encodes a string that contains a path, such as a rendezvous. A path is not always Unicode."""
    return _whole(os.fsencode(value), what)


def rendezvous(value: "Union[str, os.PathLike[str]]") -> bytes:
    """Encodes a rendezvous. A path-like object is the file of a file:// rendezvous.

    Raises:
        TypeError: `value` has another type. Bytes could be a path or a URL.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"the rendezvous is {type(value).__name__}, not str or a path")
    if not isinstance(value, str):
        value = f"file://{os.path.abspath(os.fspath(value))}"
    return path(value, "the rendezvous")


def _whole(encoded: bytes, what: str) -> bytes:
    if b"\0" in encoded:
        raise BadArgument(f"{what} {encoded.decode(errors='replace')!r} contains a NUL byte, where the "
                          "library would end it: remove it")
    return encoded


def call(name: str, *arguments: object) -> None:
    """Calls a function that returns gw_status, without the GIL. Raises its error as an exception."""
    loaded = library()
    for value, kind in zip(arguments, _SIGNATURES[name]):
        if kind in _RANGES:
            integer(value, f"an argument of {name}", kind)
    status = getattr(loaded, name)(*arguments)
    if status != 0:
        text = loaded.gw_last_error().decode(errors="replace")
        cause = next((error for part, error, _ in failures if part in text), None)
        raise _EXCEPTIONS.get(status, Error)(text) from cause


# ---- Blocking calls that signals interrupt -----------------------------------------------------------------
# Python runs signal handlers only in the main thread, and not during a call of the library. So a helper
# thread makes the call, while the main thread waits where Python checks for signals. If a handler raises, as
# for Ctrl-C, the call is cancelled or its communicator aborted, and the exception propagates. Other threads
# do not receive signals and make calls directly. The helper thread costs about 25 us per call.

Call = Tuple[Any, ...]  # the name of a function and its arguments
_LONGEST_CANCEL_S = 10.0


class _Job:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.outcome: "queue.SimpleQueue[Optional[BaseException]]" = queue.SimpleQueue()

    def run(self) -> None:
        try:
            call(*self.call)
        except BaseException as error:  # raised in the main thread
            self.outcome.put(error)
        else:
            self.outcome.put(None)


class _Helper:
    def __init__(self) -> None:
        self.process = os.getpid()
        self.jobs: "queue.SimpleQueue[_Job]" = queue.SimpleQueue()
        threading.Thread(target=self._run, name="gradwire calls", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.jobs.get().run()


_helper: Optional[_Helper] = None


def interruptible(request: Call, cancel: Callable[[], None],
                  undo: Optional[Callable[[], None]] = None) -> None:
    """Makes a call of the library. Blocks until it is done.

    Args:
        request: a function name with arguments.
        cancel: called when a signal's handler raises; must end the call. The handler's exception then
            propagates.
        undo: called after `cancel` if the call succeeded nevertheless.
    """
    global _helper
    library()  # raises ImportError in this thread if the library is missing
    if threading.get_ident() != threading.main_thread().ident:
        return call(*request)
    if _helper is None or _helper.process != os.getpid():
        _helper = _Helper()
    job = _Job(request)
    try:
        _helper.jobs.put(job)
        error = job.outcome.get()
    except BaseException:
        cancel()
        try:
            error = job.outcome.get(timeout=_LONGEST_CANCEL_S)
        except BaseException:  # another signal, or a timeout: abandon the helper
            _helper = None
        else:
            if error is None and undo is not None:
                undo()
        raise
    if error is not None:
        raise error
