"""Calls into the library: their options, owners, requests and cancellation."""
from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Any, Iterator, Optional, Tuple

from gradwire import _native
from gradwire._memory import Handle

if TYPE_CHECKING:
    from gradwire._communicator import Communicator


def op_of(op: str) -> int:
    if op not in ("sum", "avg"):
        raise ValueError(f"op must be 'sum' or 'avg', not {op!r}")
    return _native.SUM if op == "sum" else _native.AVG


class _OfThread(threading.local):
    """This thread's owner of calls, and the request of its next call.

    Attributes:
        request: set by Communicator.start(): the communicator, and the handle for its next collective call.
        owner: see calls_of().
    """

    request: "Optional[Tuple[Communicator, ctypes.c_void_p]]" = None
    owner: Any = None


of_thread = _OfThread()


@contextlib.contextmanager
def calls_of(owner: Any) -> Iterator[None]:
    """Marks this thread's calls as made by `owner`: see Communicator._claim()."""
    before, of_thread.owner = of_thread.owner, owner
    try:
        yield
    finally:
        of_thread.owner = before


class Flag:
    """Cancels a call of another thread."""

    def __init__(self) -> None:
        self.value = ctypes.c_int32(0)

    def set(self) -> None:
        self.value.value = 1


def call_options(
        tag: str = "", residual: Optional[int] = None,
        request: "Optional[ctypes._Pointer[ctypes.c_void_p]]" = None) -> Optional[_native.CallOptions]:
    """Returns the gw_call_options of a call; None if all options are the defaults."""
    if not tag and residual is None and request is None:
        return None
    return _native.CallOptions(size=ctypes.sizeof(_native.CallOptions), tag=_native.text(tag, "the tag")
                               or None, residual=residual, request=request)


class Request(Handle):
    """A call started by Communicator.start(). close() blocks until the call is done."""

    def __init__(self, handle: ctypes.c_void_p, arrays: Any, comm: Communicator) -> None:
        super().__init__("gw_request_destroy", handle)
        self._arrays = arrays  # keeps the arrays' memory alive
        self._comm = comm

    def done(self) -> bool:
        """Returns whether the result is ready. Raises CommFailed if the call has failed."""
        try:
            _native.call("gw_request_wait", self._handle, 0)
        except _native.NotDone:
            return False
        return True

    def wait(self, timeout_s: Optional[_native.Seconds] = None) -> None:
        """Blocks until the result is ready.

        Args:
            timeout_s: the longest wait, in seconds or as a timedelta. None: until the communicator's timeout.

        Raises:
            CommFailed: the call failed.
            NotDone: timed out; the call is still running. NotDone is also a TimeoutError.
        """
        longest = 2**62 if timeout_s is None else _native.milliseconds(timeout_s, least=0)
        self._comm._wait_for(("gw_request_wait", self._handle, longest))
