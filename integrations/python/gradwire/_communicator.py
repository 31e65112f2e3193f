"""Communicators, for numpy arrays and torch tensors."""
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Union

from gradwire import _native
from gradwire._memory import Handle, Memory, destroy, memory_of
from gradwire._native import Call, interruptible

# ---- Calls: options, owners, requests and cancellation -----------------------------------------------------


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
    return _native.CallOptions(tag=_native.text(tag, "the tag") or None, residual=residual, request=request)


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


def load_nccl() -> str:
    """Loads NCCL, so that the library finds it when it asks the dynamic linker for libnccl.so.2.

    In order of precedence: GRADWIRE_NCCL_LIBRARY; an NCCL that this process has loaded, as PyTorch does; the
    NCCL installed by pip; the NCCL that the dynamic linker finds.

    Returns:
        The version, such as "2.28.9"; "" without NCCL.
    """
    chosen = os.environ.get("GRADWIRE_NCCL_LIBRARY")
    places = [(chosen, os.RTLD_NOW)] if chosen else [("libnccl.so.2", os.RTLD_NOW | os.RTLD_NOLOAD)]
    if not chosen:
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec("nvidia.nccl")
            places += [(os.path.join(folder, "lib", "libnccl.so.2"), os.RTLD_NOW)
                       for folder in (spec.submodule_search_locations or [] if spec else [])]
        places.append(("libnccl.so.2", os.RTLD_NOW))
    for path, mode in places:
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(path, mode=mode).ncclGetVersion(ctypes.byref(number))
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ""

# ---- Communicators -----------------------------------------------------------------------------------------


class Communicator(Handle):
    """A group of ranks. The constructor is collective: it blocks until all `world` ranks have joined.

    Args:
        rendezvous: the same text on every rank: "tcp://HOST:PORT" (rank 0 listens there), "file:///PATH" on a
            shared folder (or a pathlib.Path), or "local://NAME" for ranks that are threads of one process.
            None: a world of 1.
        rank, world: this rank, and the number of ranks.
        device: "host", or the number of a CUDA device.
        timeout_s: the longest wait for a peer, while joining and in every later operation, in seconds or as a
            timedelta (infinity: 24 days). Half an hour, as in PyTorch, because a rank may pause for minutes,
            for example to write a checkpoint. A dead rank is detected at once, with any timeout.
        ranks_per_node: for schedule=hierarchical, with rank = node * ranks_per_node + local rank; 0: unknown.
        secret: authenticates the ranks; the same on every rank. "": the environment's GRADWIRE_SECRET.
            Required for a tcp:// address that other machines can reach (docs/running.md).
        shrinkable: allows shrink(), so that ranks can continue when others die. Needs ranks that are
            processes and, with GPUs, NCCL 2.28.7 or later. The same on every rank.
        interface: the network interface on which this process listens for the other ranks' data, on the host.
            "": GRADWIRE_INTERFACE; otherwise with tcp:// the interface that reaches rank 0, else all
            interfaces.
        ports: the first and last port to listen on. (0, 0): GRADWIRE_PORTS; otherwise any port.

    Raises:
        CommFailed: a rank did not join within timeout_s.
    """

    def __init__(self, rendezvous: "Union[str, os.PathLike[str], _native.Store, None]" = None, rank: int = 0,
                 world: int = 1, *, device: "str | int" = "host", timeout_s: _native.Seconds = 1800.0,
                 ranks_per_node: int = 0, secret: str = "", shrinkable: bool = False, interface: str = "",
                 ports: Tuple[int, int] = (0, 0)) -> None:
        number, span = _native.device(device), _native.integers(ports, "ports")
        if len(span) != 2:
            raise _native.BadArgument(f"ports has {len(span)} numbers: pass the first and the last port")
        if number != _native.HOST:
            load_nccl()
        store = ctypes.addressof(rendezvous) if isinstance(rendezvous, _native.Store) else None
        where = _native.rendezvous(rendezvous) if rendezvous is not None and store is None else None
        self._create(rendezvous=where, store=store, rank=rank, world=world, device=number,
                     timeout_ms=_native.milliseconds(timeout_s), ports=span, shrinkable=int(shrinkable),
                     ranks_per_node=ranks_per_node, secret=_native.text(secret, "the secret") or None,
                     interface=_native.text(interface, "the interface") or None)

    def _create(self, **fields: Any) -> None:
        handle, cancelled = ctypes.c_void_p(), Flag()
        options = _native.CommOptions(cancel=ctypes.pointer(cancelled.value), **fields)
        interruptible(("gw_comm_create", ctypes.byref(options), ctypes.byref(handle)), cancel=cancelled.set,
                      undo=lambda: destroy("gw_comm_destroy", handle))
        self._take(handle)

    @classmethod
    def _of(cls, handle: ctypes.c_void_p) -> "Communicator":
        made = cls.__new__(cls)
        made._take(handle)
        return made

    def _take(self, handle: ctypes.c_void_p) -> None:
        super().__init__("gw_comm_destroy", handle)
        info = self._query()
        self.rank: int = info.rank
        self.world: int = info.world
        self.device: int = info.device

    def _query(self) -> "_native.CommInfo":
        info = _native.CommInfo()
        _native.call("gw_comm_query", self._handle, ctypes.byref(info))
        return info

    @property
    def bytes_sent(self) -> int:
        """Returns the number of payload bytes that this rank has sent."""
        return int(self._query().bytes_sent)

    def split(self, color: int, key: int = 0) -> "Optional[Communicator]":
        """Creates a communicator of the ranks that pass the same color. Collective.

        The two communicators are independent: each must be closed separately, and a failure of either
        communicator does not affect the other.

        Args:
            color: 0 or more; negative: this rank joins no new communicator.
            key: orders the ranks; equal keys are ordered by rank.

        Returns:
            The communicator, or None for a negative color.
        """
        handle = ctypes.c_void_p()
        self._wait_for(("gw_comm_split", self._handle, _native.integer(color, "color"),
                        _native.integer(key, "key"), ctypes.byref(handle)))
        return Communicator._of(handle) if handle else None

    def shrink(self, timeout_s: _native.Seconds = 20.0) -> "Tuple[Communicator, List[int]]":
        """Creates a communicator of the surviving ranks after a failure. Collective over the survivors.

            try:
                comm.allreduce_(gradient)
            except gradwire.CommFailed:
                rest, ranks = comm.shrink()   # on every surviving rank; any rank may have died, even rank 0
                comm.close()

        Needs shrinkable=True. If this communicator has not failed, it fails now. Afterwards this communicator
        and its reducers can only be closed. The new communicator can shrink again.

        Args:
            timeout_s: how long to wait for ranks that are alive but do not call shrink().

        Returns:
            The new communicator, and the ranks of its members in this communicator.

        Raises:
            CommFailed: this rank was left out, or too few answered. Only one group survives (docs/faults.md).
        """
        longest = _native.milliseconds(timeout_s)
        handle = ctypes.c_void_p()
        ranks, cancelled = (ctypes.c_int32 * self.world)(), Flag()
        interruptible(("gw_comm_shrink", self._handle, longest, ctypes.byref(cancelled.value),
                       ctypes.byref(handle), ranks, self.world),
                      cancel=cancelled.set, undo=lambda: destroy("gw_comm_destroy", handle))
        rest = Communicator._of(handle)
        return rest, list(ranks[:rest.world])

    def admit(self, most: int) -> None:
        """Accepts requests to join, up to a world of `most` ranks. Needs shrinkable=True.

            comm.admit(4)                        # on every rank, including admitted ranks
            invitation = comm.invitation()       # for the new process: Communicator.join(invitation)
            ...
            if waiting:                          # comm.waiting on rank 0, broadcast to all ranks
                grown = comm.grow()              # on every rank; then send the state to the new ranks

        Args:
            most: the largest world size. 0 closes admission and notifies waiting processes.
        """
        _native.call("gw_comm_admit", self._handle, _native.integer(most, "most"))

    def invitation(self) -> str:
        """Returns the addresses for join(). They can have a secret: give them to trusted processes only."""
        invitation = self._query().invitation
        if invitation is None:
            raise _native.BadArgument(
                "no new ranks can join this communicator: create it with shrinkable=True")
        return os.fsdecode(invitation)

    @property
    def waiting(self) -> int:
        """Returns the number of processes that wait to join; always 0 except on rank 0."""
        return int(self._query().joiners)

    def grow(self) -> "Optional[Communicator]":
        """Creates a communicator of these ranks, followed by the processes that wait to join. Collective.

        Afterwards this communicator and its reducers can only be closed. Residuals of new ranks start at 0.
        The caller sends all other state to the new ranks.

        Returns:
            The new communicator. None if no process joined; this communicator then remains usable.
        """
        handle = ctypes.c_void_p()
        self._wait_for(("gw_comm_grow", self._handle, ctypes.byref(handle)))
        return Communicator._of(handle) if handle else None

    @classmethod
    def join(cls, invitation: str, *, timeout_s: _native.Seconds = 1800.0,
             secret: str = "") -> "Communicator":
        """Joins running ranks. Blocks until these ranks call grow().

        Args:
            invitation: the result of invitation() on any of the ranks.
            timeout_s, secret: see the constructor.

        Raises:
            BadArgument: the ranks rejected this process; the message has the reason.
            CommFailed: no rank answered, or no rank admitted this process.
        """
        joined = cls.__new__(cls)
        joined._create(invitation=_native.path(invitation, "the invitation"), device=_native.HOST,
                       timeout_ms=_native.milliseconds(timeout_s),
                       secret=_native.text(secret, "the secret") or None)
        return joined

    def start(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> "Request":
        """Starts a collective call of this communicator or of its reducers without blocking. Host only.

            request = comm.start(comm.allreduce_, gradient, "int8")
            ...
            request.wait()

        Calls run one after another in the order in which they were made, with or without start(). Do not read
        or write a call's arrays until the call is done.

        Args:
            call, arguments, options: the method to call, and its arguments.

        Returns:
            The request, on which to wait.

        Raises:
            Unsupported: the communicator is on CUDA, where calls do not block.
            Error: the errors that `call` raises for wrong arguments.
        """
        handle = ctypes.c_void_p()
        of_thread.request = (self, handle)
        try:
            call(*arguments, **options)
            if not handle:
                raise _native.BadArgument(
                    "start() was given a function that makes no collective call of this "
                    "communicator or its reducers")
        except BaseException:
            destroy("gw_request_destroy", handle)
            raise
        finally:
            of_thread.request = None
        return Request(handle, (arguments, options), self)

    def allreduce_(self, array: Any, spec: str = "fp32", op: str = "avg", stream: int = 0,
                   tag: str = "", residual: Any = None) -> Any:
        """Averages or sums a tensor or array over all ranks, in place. Collective.

        Blocks on the host; enqueues the work on CUDA.

        Args:
            array: see gradwire.allreduce_().
            spec: a wire format of docs/formats.md, such as "fp32" or "bf16:round=stochastic".
            op: "avg" or "sum".
            stream: for CUDA tensors, the cudaStream_t as a number.
            tag: a name for the tensor, the same on every rank. With tags, calls of equal size that ranks make
                in different orders raise CommFailed, which names both tags. Without tags, such calls mix the
                tensors.
            residual: float32, as many elements as `array`, initially zeros: error feedback, which carries
                this rank's rounding errors from call to call. None: rounding errors are lost.

        Returns:
            `array`.
        """
        memory = self._memory(array, "the tensor")
        self._collective("gw_allreduce", memory.address, memory.count, memory.dtype, op_of(op),
                         _native.text(spec, "the spec"), _native.stream(stream), tag=tag,
                         residual=self._residual(residual, memory.count))
        return array

    def reduce_scatter(self, output: Any, input: Any, spec: str = "fp32", op: str = "avg",
                       counts: Optional[Sequence[int]] = None, residual: Any = None, stream: int = 0,
                       tag: str = "") -> Any:
        """Averages or sums `input` over all ranks, and stores this rank's shard of the result. Collective.

        Args:
            output: this rank's shard: the type of `input`, counts[rank] elements. May be this rank's part of
                `input`.
            input: float32, bfloat16 or float16, sum(counts) elements. Unchanged, except for `output` if that
                is part of `input`.
            counts: elements of each rank's shard, in rank order, any size; the same on every rank. None:
                equal shards of len(input) / world elements.
            residual: float32, sum(counts) elements, initially zeros: see allreduce_().
            spec, op, stream, tag: see allreduce_().

        Returns:
            `output`.
        """
        whole, part, sizes = self._shards(counts, input, output, "input", "output")
        if whole.dtype != part.dtype:
            raise TypeError("the input and the output are of different types")
        self._collective("gw_reduce_scatter", whole.address, part.address, sizes, whole.dtype, op_of(op),
                         _native.text(spec, "the spec"), _native.stream(stream), tag=tag,
                         residual=self._residual(residual, whole.count))
        return output

    def all_gather(self, output: Any, input: Any, spec: str = "fp32", counts: Optional[Sequence[int]] = None,
                   residual: Any = None, stream: int = 0, tag: str = "") -> Any:
        """Gathers the ranks' shards into `output`: decoded, the same bits on every rank. Collective.

        Args:
            output: the type of `input`, sum(counts) elements.
            input: this rank's shard: float32, bfloat16 or float16, counts[rank] elements. May be this rank's
                part of `output`.
            counts: elements of each rank's shard. None: equal shards of len(input) elements.
            residual: float32, counts[rank] elements, initially zeros: see allreduce_().
            spec, stream, tag: see allreduce_().

        Returns:
            `output`.
        """
        whole, part, sizes = self._shards(counts, output, input, "output", "input")
        if whole.dtype != part.dtype:
            raise TypeError("the input and the output are of different types")
        self._collective("gw_all_gather", part.address, whole.address, sizes, whole.dtype,
                         _native.text(spec, "the spec"), _native.stream(stream), tag=tag,
                         residual=self._residual(residual, part.count))
        return output

    def all_gather_update(self, replica: Any, master: Any, spec: str = "fp32",
                          counts: Optional[Sequence[int]] = None, stream: int = 0, tag: str = "") -> Any:
        """Moves `replica` towards all ranks' masters by sending encoded differences. Collective.

        Replicas with the same initial bits on every rank keep the same bits. They do not drift from the
        masters: the next call's difference contains this call's rounding error.

        Args:
            replica: float32, sum(counts) elements, the same on every rank.
            master: this rank's shard: float32, counts[rank] elements, outside replica's memory.
            counts: elements of each rank's shard. None: equal shards of len(master) elements.
            spec, stream, tag: see allreduce_().

        Returns:
            `replica`.

        Raises:
            Unsupported: 16-bit types.
        """
        whole, part, sizes = self._shards(counts, replica, master, "replica", "master")
        if part.dtype != _native.FLOAT32:
            raise TypeError("the master is not float32")
        self._collective("gw_all_gather_update", part.address, whole.address, sizes, whole.dtype,
                         _native.text(spec, "the spec"), _native.stream(stream), tag=tag)
        return replica

    def broadcast_(self, array: Any, root: int = 0, spec: str = "fp32", stream: int = 0,
                   tag: str = "") -> Any:
        """Broadcasts rank `root`'s `array`: the decoded values, the same bits on every rank. Collective.

        Args:
            array, spec, stream, tag: see allreduce_().
            root: the sending rank.

        Returns:
            `array`.
        """
        memory = self._memory(array, "the tensor")
        self._collective("gw_broadcast", memory.address, memory.count, memory.dtype,
                         _native.integer(root, "root"), _native.text(spec, "the spec"),
                         _native.stream(stream), tag=tag)
        return array

    def _memory(self, array: Any, what: str) -> Memory:
        memory = memory_of(array)
        if memory.device != self.device:
            raise ValueError(f"{what} is on device {memory.device}, but the communicator is on {self.device} "
                             "(-1: host): copy it there")
        return memory

    def _residual(self, residual: Any, count: int) -> Optional[int]:
        if residual is None:
            return None
        memory = self._memory(residual, "the residual")
        if memory.dtype != _native.FLOAT32 or memory.count != count:
            raise ValueError(f"the residual has {memory.count} elements; expected {count} of type float32")
        return memory.address

    def _shards(self, counts: Optional[Sequence[int]], all_: Any, own: Any, whole_name: str,
                part_name: str) -> "Tuple[Memory, Memory, ctypes.Array[ctypes.c_int64]]":
        """Returns the memory of an array of all ranks' shards and of this rank's shard, and the counts."""
        whole, part = self._memory(all_, f"the {whole_name}"), self._memory(own, f"the {part_name}")
        if counts is None and part.count * self.world != whole.count:
            raise ValueError(f"the {whole_name} has {whole.count} elements and the {part_name} {part.count}: "
                             f"expected {self.world} equal shards. For other shards pass counts")
        sizes: "ctypes.Array[ctypes.c_int64]" = _native.integers(
            [part.count] * self.world if counts is None else counts, "counts", ctypes.c_int64)
        if len(sizes) != self.world or sum(sizes) != whole.count or sizes[self.rank] != part.count:
            raise ValueError(f"counts={list(sizes)} on rank {self.rank} of {self.world} does not match: the "
                             f"{whole_name} has {whole.count} elements and the {part_name} {part.count}")
        return whole, part, sizes

    def _collective(self, function: str, *arguments: object, tag: str,
                    residual: Optional[int] = None) -> None:
        self._wait_for((function, self._handle, *arguments, call_options(tag, residual,
                                                                         self._take_request())))

    def _take_request(self) -> "Optional[ctypes._Pointer[ctypes.c_void_p]]":
        """Returns the handle for the request of the next collective call, inside start()."""
        if of_thread.request is None or of_thread.request[0] is not self:
            return None
        handle, of_thread.request = of_thread.request[1], None
        return ctypes.pointer(handle)

    def _wait_for(self, call: Call) -> None:
        """Makes a collective call. Blocks on the host until the other ranks make the call, but not on CUDA.

        A signal whose handler raises, such as Ctrl-C, aborts the communicator.
        """
        self._refuse_others(of_thread.owner)
        if self.device == _native.HOST:
            interruptible(call, cancel=self._interrupt)
        else:
            _native.call(*call)

    # Unique identifier of a process group's communicator, the same on its ranks. "" for other communicators.
    _key = ""
    _owner: "Optional[Callable[[], Any]]" = None
    _owner_kind = ""

    def _claim(self, owner: Any, kind: str) -> None:
        """Reserves the communicator for `owner`, which makes calls from a separate thread.

        Calls from other threads could precede the owner's calls on one rank and follow them on another.

        Raises:
            BadArgument: the communicator has another owner.
        """
        self._refuse_others(owner)
        self._owner, self._owner_kind = weakref.ref(owner), kind

    def _release(self, owner: Any) -> None:
        if self._owner is not None and self._owner() is owner:
            self._owner = None

    def _refuse_others(self, caller: Any) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner is not caller:
            raise _native.BadArgument(f"{self._owner_kind} uses this communicator from a separate thread: "
                                      "create another communicator with Communicator.split(0) first, and "
                                      "pass that one")

    def _interrupt(self) -> None:
        self.abort("a signal interrupted rank %d" % self.rank)

    def check(self) -> None:
        """Raises CommFailed, with the reason, if the communicator has failed.

        On CUDA, call it after synchronizing with the stream and before using results: streams do not report
        errors, and an abandoned operation leaves garbage in the buffers. On the host the failing call raises.
        """
        _native.call("gw_comm_check", self._handle)

    def abort(self, reason: str = "") -> None:
        """Fails all pending operations of the communicator on all reachable ranks. Does not block."""
        _native.call("gw_comm_abort", self._handle, _native.text(reason, "the reason"))

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
