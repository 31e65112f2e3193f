"""Makes blocking calls in the main thread interruptible by signals.

Python runs signal handlers only in the main thread, and not during a call of the library. So a helper thread
makes the call, while the main thread waits where Python checks for signals. If a handler raises, as for
Ctrl-C, the call is cancelled or its communicator aborted, and the exception propagates. Other threads do not
receive signals and make calls directly. Costs the main thread about 25 us per call.
"""
from __future__ import annotations

import ctypes
import os
import queue
import threading
from typing import Any, Callable, List, Optional, Tuple

from gradwire import _native

Call = Tuple[Any, ...]  # the name of a function and its arguments
_LONGEST_CANCEL_S = 10.0


class _Job:
    def __init__(self, calls: List[Call]) -> None:
        self.calls = calls
        self.cancelled = ctypes.c_int32(0)
        self.outcome: "queue.SimpleQueue[Optional[BaseException]]" = queue.SimpleQueue()

    def run(self) -> None:
        try:
            _native.call("gw_cancellable", ctypes.byref(self.cancelled))
            _make(self.calls)
        except BaseException as error:  # raised in the main thread
            self.outcome.put(error)
        else:
            self.outcome.put(None)
        finally:
            _native.call("gw_cancellable", None)


class _Helper:
    def __init__(self) -> None:
        self.process = os.getpid()
        self.jobs: "queue.SimpleQueue[_Job]" = queue.SimpleQueue()
        threading.Thread(target=self._run, name="gradwire calls", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.jobs.get().run()


_helper: Optional[_Helper] = None


def _make(calls: List[Call]) -> None:
    for name, *arguments in calls:
        _native.call(name, *arguments)


def interruptible(calls: List[Call], cancel: Optional[Callable[[], None]] = None,
                  undo: Optional[Callable[[], None]] = None) -> None:
    """Makes calls of the library one after another, in one thread. Blocks until they are done.

    Args:
        calls: function names with arguments.
        cancel: called when a signal's handler raises. The handler's exception then propagates.
        undo: called after `cancel` if the calls succeeded nevertheless.
    """
    global _helper
    _native.library()  # raises ImportError in this thread if there is no library
    if threading.get_ident() != threading.main_thread().ident:
        return _make(calls)
    if _helper is None or _helper.process != os.getpid():
        _helper = _Helper()
    job = _Job(calls)
    try:
        _helper.jobs.put(job)
        error = job.outcome.get()
    except BaseException:
        job.cancelled.value = 1
        if cancel is not None:
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
