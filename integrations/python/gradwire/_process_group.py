"""Creates communicators of the ranks of a torch.distributed process group."""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import queue
import re
import secrets
import signal
import socket
import threading
import weakref
from datetime import timedelta
from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.constants import default_pg_timeout

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._port import reserve_port

# ---- The thread for communication of the DDP hook and the backend ------------------------------------------


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

# ---- Ranges in torch.profiler, with format and bytes -------------------------------------------------------


def during(spec: str, call: str, *tensors: torch.Tensor) -> "contextlib.AbstractContextManager[Any]":
    """Returns a context manager that records a blocking call as a range.

    Args:
        spec, call: the call's format and name.
        tensors: the tensors that are averaged or gathered, whose uncompressed bytes the range shows.
    """
    if not torch.autograd._profiler_enabled():
        return contextlib.nullcontext()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return record_function(f"gradwire {spec}: {call}, {size} bytes")


def until(future: Any, spec: str, call: str, *tensors: torch.Tensor) -> Any:
    """Records a range until `future` is done. Returns `future`, or a Future of the end of the range."""
    with during(spec, call, *tensors) as until_done:
        # The range belongs to this thread: the profiler does not record the thread that makes the call.
        return future if until_done is None else until_done._call_end_callbacks_on_future(future)


def stream_of(tensor: torch.Tensor) -> int:
    """Returns PyTorch's current stream for a CUDA tensor, as a number; 0 on the host."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0


# ---- Process groups ----------------------------------------------------------------------------------------

# PyTorch's default, half an hour. A rank may pause for minutes, as rank 0 does when it writes a checkpoint. A
# dead rank is detected at once, with any timeout: its connections break.
TIMEOUT_S = default_pg_timeout.total_seconds()


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group() if dist.is_initialized() else None


class Origin:
    """The process and the process groups for which a communicator is valid.

    The groups are the default group and, if different, the group of the communicator's ranks.
    """

    def __init__(self, process_group: Any = None) -> None:
        group = _default_group()
        self._process = os.getpid()
        self._group = weakref.ref(group) if group is not None else None
        self._own = process_group

    def forked(self) -> bool:
        """Returns whether this process is a fork of the communicator's process."""
        return self._process != os.getpid()

    def ended(self) -> str:
        """Returns why a communicator of this origin cannot be used now; "" if it can."""
        if self.forked():
            return "this process is a fork of the process that made its communicator"
        now = _default_group()
        if now is None or self._group is None or (self._group() is now and _registered(self._own)):
            return ""
        return "torch.distributed.destroy_process_group() has ended the process group of its communicator"


def _registered(group: Any) -> bool:
    if group is None or group == dist.group.WORLD:
        return True
    try:
        dist.get_rank(group)
        return True
    except (RuntimeError, ValueError):  # PyTorch 1.13, and later
        return False


def normal_tensors() -> Any:
    """Returns a context for PyTorch's collectives of objects, which fail in inference mode in PyTorch 1.13."""
    return torch.inference_mode(False)


class _Inherited:
    """A default process group that a forked process inherits. The parent has the threads and connections."""

    group: Any = None

    @classmethod
    def remember(cls) -> None:
        group = _default_group()
        cls.group = weakref.ref(group) if group is not None else None


os.register_at_fork(after_in_child=_Inherited.remember)


def _refuse_inherited() -> None:
    if _Inherited.group is not None and _Inherited.group() is _default_group():
        raise _native.BadHandle("the default process group belongs to the parent of this forked process: "
                                "call init_process_group() in this process, or start it with the spawn "
                                "method")


def global_rank(group: Any, rank: int) -> int:
    if group is None or group == dist.group.WORLD:
        return rank
    find = getattr(dist, "get_global_rank", None) or dist.distributed_c10d._get_global_rank
    return int(find(group, rank))


def _network() -> str:
    """Returns an identifier of the network of this process's 127.0.0.1.

    It is equal in two processes only if they share that network. The host name is not sufficient: containers
    of one image, and network namespaces of one machine, share it.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _rendezvous(stack: contextlib.ExitStack, networks: List[str], store: Any) -> List[str]:
    """Returns the rendezvous of this process, which is rank 0, and a secret.

    Ranks of one network use localhost, which other machines cannot reach. Otherwise the rendezvous is at
    MASTER_ADDR, if that is this machine: it may be an address of none of its interfaces. Elsewhere it is
    "store": rank 0 publishes the addresses of its interfaces in `store`. gethostname() does not help: Debian
    resolves it to 127.0.1.1. Only MPI's process groups have no store.

    Args:
        stack: reserves the port until it closes.
        networks: _network() of every rank.
    """
    host = "localhost"
    if len(set(networks)) > 1:
        host = os.environ.get("MASTER_ADDR", "") if dist.get_rank() == 0 else ""
        if host in ("", "localhost", "::1", "[::1]") or host.startswith("127."):
            host = socket.gethostname() if store is None else ""
    return [f"tcp://{host}:{reserve_port(stack)}" if host else "store", secrets.token_hex(16)]


def _in_store(store: Any, key: str, rank: int, timeout_s: float) -> _native.Store:
    """Returns the rendezvous at a key of a torch.distributed store. Blocks until rank 0 has set the key."""
    published = b""

    def put(_user: Any, _key: bytes, value: int, count: int, _timeout_ms: int) -> Optional[int]:
        try:
            store.set(key, ctypes.string_at(value, count).decode())
        except Exception as error:  # ctypes would print it and continue
            return _native.failed(f"raised {type(error).__name__}: {error}", error)
        return None

    def get(_user: Any, _key: bytes, _timeout_ms: int, value: int, capacity: int, count: Any) -> None:
        ctypes.memmove(value, published, min(capacity, len(published)))
        count[0] = len(published)

    if rank > 0:
        try:
            store.wait([key], timedelta(milliseconds=_native.milliseconds(timeout_s)))
            published = store.get(key)
        except RuntimeError as error:
            raise _native.CommFailed(f"no address of rank 0 after {timeout_s:g} s: {error}") from error
    return _native.Store(set=_native.StoreSet(put), get=_native.StoreGet(get))


def place_in(process_group: Any) -> Tuple[int, int]:
    """Returns this process's rank in a process group, and the group's size.

    Raises:
        BadArgument: this process is not in the group, or the other ranks are not processes.
    """
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise _native.BadArgument(f"rank {dist.get_rank()} is not in the process group "
                                  "(GroupMember.NON_GROUP_MEMBER): make this call on the group's ranks only")
    if world > 1 and "fake" in str(dist.get_backend(process_group)):
        raise _native.BadArgument(f"the other {world - 1} ranks of a process group of the backend 'fake' do "
                                  "not exist: use another backend, such as 'gloo', or a world of 1")
    return rank, world


def _meet(process_group: Any, timeout_s: float) -> None:
    """Waits for all ranks of a Gloo group, at most timeout_s. Other backends have only the group's timeout."""
    if str(dist.get_backend(process_group)) != "gloo":
        return
    try:
        dist.monitored_barrier(process_group, timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        missing = re.search(r"[Rr]anks? ([\d, ]*\d) failed", str(error))  # on rank 0 alone
        who = f"rank {missing[1]} of the process group made no" if missing else "not every rank made"
        raise _native.CommFailed(f"{who} such call within {timeout_s:g} s: all ranks must, for a hook with "
                                 "the first backward(). Rank 0's error names the ranks") from error


def communicator(process_group: Any = None, device: "str | int" = "host",
                 timeout_s: _native.Seconds = TIMEOUT_S, shrinkable: bool = False) -> Communicator:
    """Creates a communicator of the ranks of a torch.distributed process group. Collective.

    Rank 0 chooses a rendezvous and a secret, and broadcasts both through the process group.

    Args:
        process_group: None: the default group.
        device, timeout_s, shrinkable: see Communicator.

    Raises:
        BadArgument: this process is not in the group, or the group's backend is "fake".
        CommFailed: a rank of a Gloo group did not make this call within timeout_s.
    """
    device, timeout_s = _native.device(device), _native.seconds(timeout_s)  # before ranks wait for each other
    rank, world = place_in(process_group)
    if world == 1:
        return Communicator(device=device, timeout_s=timeout_s)
    _refuse_inherited()
    networks: List[Any] = [None] * world
    rendezvous: List[Any] = [None, None]
    with contextlib.ExitStack() as stack, normal_tensors():
        _meet(process_group, timeout_s)
        dist.all_gather_object(networks, _network(), group=process_group)
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            rendezvous = list(_rendezvous(stack, networks, store))
        dist.broadcast_object_list(rendezvous, src=global_rank(process_group, 0), group=process_group)
        where, secret = rendezvous
        key = hashlib.sha256(secret.encode()).hexdigest()[:16]
        if where == "store":
            where = _in_store(store, f"gradwire/{key}", rank, timeout_s)
        comm = Communicator(where, rank, world, device=device, timeout_s=timeout_s, secret=secret,
                            shrinkable=shrinkable)
    comm._key = key
    return comm


def communicator_of_store(store: Any, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> Communicator:
    """Creates a communicator on the host of ranks that share a torch.distributed store. Collective."""
    # A store can outlive its group. Every rank counts the groups, so that no rank reads an old address.
    group = f"gradwire/{store.add(f'gradwire/groups/{rank}', 1)}"
    store.set(f"{group}/network/{rank}", _network())
    with contextlib.ExitStack() as stack:
        if rank == 0:
            networks = [store.get(f"{group}/network/{r}").decode() for r in range(world)]
            store.set(f"{group}/rendezvous", " ".join(_rendezvous(stack, networks, store)))
        where, secret = store.get(f"{group}/rendezvous").decode().split()
        if where == "store":
            where = _in_store(store, f"{group}/addresses", rank, timeout_s)
        comm = Communicator(where, rank, world, timeout_s=timeout_s, secret=secret)
    return comm
