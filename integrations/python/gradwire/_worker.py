"""The thread on which the DDP hook and the backend communicate, so that the caller's goes on."""
from __future__ import annotations

import queue
import threading
from typing import Any, Callable, List

import torch

from gradwire._core import Communicator


class Worker:
    """A thread that runs jobs in order, so that host-side communication does not block backward."""

    def __init__(self) -> None:
        self._jobs: "queue.Queue[Any]" = queue.Queue()  # of (job, future); None: stop
        self.stopping = False  # a job that has failed must not try again
        self._thread = threading.Thread(target=self._run, name="gradwire", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            item = self._jobs.get()
            if item is None:
                return
            job, done = item
            outcome = job()
            del item, job  # they hold the bucket's buffer
            # Before set_result(): a caller that has waited for the last future may close the hook.
            self._jobs.task_done()
            done.set_result(outcome)
            del outcome, done

    def submit(self, job: Callable[[], Any], done: "torch.futures.Future[Any]") -> None:
        """Queues `job`, which must not raise; its result goes to `done`."""
        self._jobs.put((job, done))

    def drain(self) -> None:
        self._jobs.join()

    @property
    def busy(self) -> bool:
        return self._jobs.unfinished_tasks > 0

    def stop(self) -> None:
        self.stopping = True
        self._jobs.put(None)
        self._thread.join(timeout=10)  # a daemon, so the process can exit even if it still waits for a peer


def shut_down(worker: Worker, communicators: List[Communicator]) -> None:
    worker.stopping = True
    for comm in communicators:
        if worker.busy and not comm.closed:
            comm.abort("the hook or process group was closed in the middle of a step")
    worker.stop()
    for comm in communicators:
        comm.close()
