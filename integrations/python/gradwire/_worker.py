"""Runs the communication of the DDP hook and the backend on a separate thread."""
from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import weakref
from typing import Any, Callable, List, Optional, Tuple

import torch

from gradwire import _native
from gradwire._communicator import Communicator


class Worker:
    """A thread that runs jobs in order, so that communication on the host does not block backward."""

    def __init__(self) -> None:
        self.communicators: List[Communicator] = []  # used by the jobs
        self.done = 0  # number of jobs completed
        self._jobs: "queue.Queue[Any]" = queue.Queue()  # (job, future); None: stop
        self.inline = 0  # number of running calls that futures' callbacks make on the thread, between jobs
        self.stopping = False  # a failed job must not retry
        self._process = 0  # process of the thread, 0 before the first job: a fork does not copy threads
        self._starting = threading.Lock()
        self._thread: Optional[threading.Thread] = None

    def _start(self) -> None:
        with self._starting:
            if self._process == os.getpid():
                return
            if self.forked:
                raise _native.BadHandle("the hook or process group belongs to the parent of this forked "
                                        "process: create another in this process")
            self._process = os.getpid()
            _interrupts.watch(self)
            self._thread = threading.Thread(target=self._run, name="gradwire", daemon=True)
            self._thread.start()

    @property
    def forked(self) -> bool:
        """Returns whether the thread, its jobs and communicators belong to another process."""
        return self._process not in (0, os.getpid())

    def _run(self) -> None:
        while True:
            item = self._jobs.get()
            if item is None:
                return
            job, done = item
            outcome = job()
            self.done += 1
            del item, job  # references to the bucket's buffer
            # Must precede set_result(): a caller that waits for the last future may close the hook.
            self._jobs.task_done()
            done.set_result(outcome)
            del outcome, done

    def submit(self, job: Callable[[], Any], done: "torch.futures.Future[Any]") -> None:
        """Queues `job`, which must not raise; its result goes to `done`."""
        self._start()
        self._jobs.put((job, done))

    def drain(self) -> None:
        """Blocks until all submitted jobs are done."""
        if not self.forked:
            self._jobs.join()

    @property
    def busy(self) -> bool:
        return not self.forked and (self._jobs.unfinished_tasks > 0 or self.inline > 0)

    def stop(self) -> None:
        self.stopping = True
        if self._thread is None or self.forked:
            return
        self._jobs.put(None)
        self._thread.join(timeout=10)  # a daemon: the process can exit even while the thread waits for a peer

    def shut_down(self) -> None:
        """Stops the thread, and closes the communicators. Aborts a running job."""
        if self.forked:
            return  # the communicators are the parent's
        self.stopping = True
        for comm in self.communicators:
            if self.busy and not comm.closed:
                comm.abort("the hook or process group was closed during a step")
        self.stop()
        for comm in self.communicators:
            comm.close()


class _Interrupts:
    """Handles Ctrl-C while the main thread waits for a job in C++, as in DDP's backward.

    Python cannot raise KeyboardInterrupt there. So this class aborts the job's communicators. The job fails,
    and Python raises KeyboardInterrupt when C++ returns.

    Python writes signal numbers to the wakeup descriptor, unless another library (asyncio, Jupyter) uses it.
    """

    _GRACE_S = 1.0  # time for the main thread to raise KeyboardInterrupt without help

    def __init__(self) -> None:
        self._workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()
        self._process = 0  # process of the thread
        self._writing = -1  # file descriptor to which Python writes signal numbers

    def forget_parent(self) -> None:
        """Detaches a forked process from the parent's pipe, so that it cannot interrupt the parent's jobs."""
        if self._writing != -1:
            with contextlib.suppress(ValueError):  # not the main thread
                before = signal.set_wakeup_fd(-1)
                if before not in (-1, self._writing):
                    signal.set_wakeup_fd(before)
        self._workers, self._writing = weakref.WeakSet(), -1

    def watch(self, worker: "Worker") -> None:
        self._workers.add(worker)
        if self._process == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._writing = writing
        threading.Thread(target=self._run, args=(reading,), name="gradwire interrupts", daemon=True).start()

    def _run(self, reading: int) -> None:
        while True:
            numbers = os.read(reading, 64)
            if (signal.SIGINT not in numbers
                    or signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
                continue
            busy: List[Tuple[Worker, int]] = [(w, w.done) for w in list(self._workers) if w.busy]
            if busy:
                threading.Event().wait(self._GRACE_S)
            for worker, done in busy:
                if worker.busy and worker.done == done:
                    worker.stopping = True
                    for comm in list(worker.communicators):
                        if not comm.closed:
                            comm.abort("interrupted by Ctrl-C")


_interrupts = _Interrupts()
os.register_at_fork(after_in_child=_interrupts.forget_parent)
