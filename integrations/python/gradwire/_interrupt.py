"""Makes blocking calls in the main thread interruptible by signals.

Python runs signal handlers only in the main thread, and not during a call of the library. So a helper thread
makes the call, while the main thread waits where Python checks for signals. If a handler raises, as for
Ctrl-C, the call is cancelled or its communicator aborted, and the exception propagates. Other threads do not
receive signals and make calls directly. The helper thread costs about 25 us per call.
"""
from __future__ import annotations

import os
import queue
import threading
from typing import Any, Callable, Optional, Tuple

from gradwire import _native

Call = Tuple[Any, ...]  # the name of a function and its arguments
_LONGEST_CANCEL_S = 10.0


class _Job:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.outcome: "queue.SimpleQueue[Optional[BaseException]]" = queue.SimpleQueue()

    def run(self) -> None:
        try:
            _native.call(*self.call)
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


def interruptible(call: Call, cancel: Callable[[], None],
                  undo: Optional[Callable[[], None]] = None) -> None:
    """Makes a call of the library. Blocks until it is done.

    Args:
        call: a function name with arguments.
        cancel: called when a signal's handler raises; must end the call. The handler's exception then
            propagates.
        undo: called after `cancel` if the call succeeded nevertheless.
    """
    global _helper
    _native.library()  # raises ImportError in this thread if there is no library
    if threading.get_ident() != threading.main_thread().ident:
        return _native.call(*call)
    if _helper is None or _helper.process != os.getpid():
        _helper = _Helper()
    job = _Job(call)
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
