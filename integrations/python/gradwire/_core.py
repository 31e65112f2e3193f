"""Communicators and reducers, for numpy arrays and torch tensors."""
from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from gradwire import _native
from gradwire._interrupt import Call, interruptible
from gradwire._memory import TORCH_DTYPES, Handle, Memory, destroy
from gradwire._memory import memory_of as memory_of


def _op(op: str) -> int:
    if op not in ("sum", "avg"):
        raise ValueError(f"op={op!r} is neither 'sum' nor 'avg'")
    return _native.SUM if op == "sum" else _native.AVG


class _Next(threading.local):
    begin: Optional[Call] = None  # makes a request of this thread's next collective call
    owner: Any = None  # makes this thread's calls, see calls_of()


_next = _Next()


@contextlib.contextmanager
def calls_of(owner: Any) -> Iterator[None]:
    """Marks calls as those of the owner of a communicator: see Communicator._claim()."""
    before, _next.owner = _next.owner, owner
    try:
        yield
    finally:
        _next.owner = before


class Communicator(Handle):
    """A group of ranks. Creating one is collective: it blocks until all `world` ranks have joined.

    rendezvous: the same text on every rank: "tcp://HOST:PORT" (rank 0 listens there), "file:///PATH" on a
        shared folder, for which a pathlib.Path will do, or "local://NAME" for ranks that are threads of one
        process. None in a world of 1.
    device: "host", or the number of a CUDA device.
    timeout_s: the longest wait for a peer, in joining and in any later operation: half an hour, as in PyTorch, because
        a rank may pause for minutes (to write a checkpoint, say); one that dies is noticed at once.
    ranks_per_node: for schedule=hierarchical, where rank = node * ranks_per_node + local rank; 0: unknown.
    secret: whoever knows it may join; the same on every rank. "": the environment's GRADWIRE_SECRET. A tcp://
        address that other machines can reach needs one (docs/running.md).
    shrinkable: whether the others can go on when ranks die: see shrink(). For processes, those with GPUs from NCCL 2.28.7
        on; the same on every rank.
    interface, ports: where this process on the host listens for the other ranks' data: the name of a network
        interface ("": GRADWIRE_INTERFACE, else with tcp:// the interface that reaches rank 0, otherwise all),
        and the first and last of the allowed ports ((0, 0): GRADWIRE_PORTS, else any).

    Raises CommFailed when a rank does not join in time.
    """

    def __init__(self, rendezvous: "Union[str, os.PathLike[str], None]" = None, rank: int = 0,
                 world: int = 1, *, device: "str | int" = "host", timeout_s: float = 1800.0,
                 ranks_per_node: int = 0,
                 secret: str = "", shrinkable: bool = False, interface: str = "",
                 ports: Tuple[int, int] = (0, 0)) -> None:
        number = _native.HOST if device == "host" else device
        if not isinstance(number, int):
            raise ValueError(f"device={device!r} is neither 'host' nor the number of a CUDA device")
        if number != _native.HOST:
            _native.load_nccl()
        where = _native.rendezvous(rendezvous) if rendezvous is not None else None
        handle = ctypes.c_void_p()
        interruptible([("gw_secret", _native.text(secret, "the secret") or None),
                       ("gw_shrinkable", int(shrinkable)),
                       ("gw_listen", _native.text(interface, "the interface") or None, *ports),
                       ("gw_comm_create", where, rank, world, number, int(timeout_s * 1000),
                        ctypes.byref(handle))],
                      undo=lambda: destroy("gw_comm_destroy", handle))
        self._take(handle)
        if ranks_per_node != 0:
            _native.call("gw_comm_set_ranks_per_node", handle, ranks_per_node)

    def _take(self, handle: ctypes.c_void_p) -> None:
        super().__init__("gw_comm_destroy", handle)
        info = self._query()
        self.rank: int = info.rank
        self.world: int = info.world
        self.device: int = info.device

    def _query(self) -> "_native.CommInfo":
        info = _native.CommInfo(size=ctypes.sizeof(_native.CommInfo))
        _native.call("gw_comm_query", self._handle, ctypes.byref(info))
        return info

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent so far."""
        return int(self._query().bytes_sent)

    def split(self, color: int, key: int = 0) -> "Optional[Communicator]":
        """A communicator of the ranks that pass the same color, ordered by key, then by rank. Collective.

        color: 0 or more; negative: this rank joins none, and the result is None.

        The two are independent: each is closed by itself, and neither hears of the other's failures.
        """
        handle = ctypes.c_void_p()
        self._wait_for(("gw_comm_split", self._handle, color, key, ctypes.byref(handle)))
        if not handle:
            return None
        part = Communicator.__new__(Communicator)
        part._take(handle)
        return part

    def shrink(self, timeout_s: float = 20.0) -> "Tuple[Communicator, List[int]]":
        """The communicator of the ranks that are left of one that has failed, and their ranks in this one.

            try:
                comm.allreduce_(gradient)
            except gradwire.CommFailed:
                rest, ranks = comm.shrink()   # on every rank that is left; any may be gone, also rank 0
                comm.close()

        Needs shrinkable=True. Fails a communicator that has not failed. Afterwards this one and its reducers can only be
        closed; the new one can shrink in turn.

        timeout_s: how long to wait for ranks that are alive but do not call this.

        Raises CommFailed when this rank was left out or too few answer; at most one group goes on (docs/faults.md).
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} is not a time to wait")
        handle = ctypes.c_void_p()
        ranks = (ctypes.c_int32 * self.world)()
        interruptible([("gw_comm_shrink", self._handle, max(1, int(timeout_s * 1000)), ctypes.byref(handle), ranks, self.world)],
                      undo=lambda: destroy("gw_comm_destroy", handle))
        rest = Communicator.__new__(Communicator)
        rest._take(handle)
        return rest, list(ranks[:rest.world])

    def admit(self, most: int) -> None:
        """From here on processes may ask to join, up to `most` ranks; 0: nobody any more. Needs shrinkable=True.

            comm.admit(4)                        # on every rank, new ones too
            doors = comm.doors()                 # for the new process: Communicator.join(doors)
            ...
            if waiting:                          # comm.waiting on rank 0, which all must know
                grown = comm.grow()              # on every rank; then send the new ones the state
        """
        _native.call("gw_comm_admit", self._handle, most)

    def doors(self) -> str:
        """Where processes that want to join find the ranks. For those only who may: it can contain a secret."""
        size = ctypes.c_size_t()
        _native.call("gw_comm_doors", self._handle, None, 0, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        _native.call("gw_comm_doors", self._handle, text, size.value, ctypes.byref(size))
        return os.fsdecode(text.value)

    @property
    def waiting(self) -> int:
        """How many processes wait to join; always 0 but on rank 0."""
        number = ctypes.c_int32()
        _native.call("gw_comm_waiting", self._handle, ctypes.byref(number))
        return number.value

    def grow(self) -> "Optional[Communicator]":
        """The communicator of these ranks and, after them, of those that wait to join. Collective.

        None if nobody has joined in the end. Else this one and its reducers can only be closed. A new rank's residuals
        begin with 0; the rest of the state is the caller's to send.
        """
        handle = ctypes.c_void_p()
        self._wait_for(("gw_comm_grow", self._handle, ctypes.byref(handle)))
        if not handle:
            return None
        grown = Communicator.__new__(Communicator)
        grown._take(handle)
        return grown

    @classmethod
    def join(cls, doors: str, *, timeout_s: float = 1800.0, secret: str = "") -> "Communicator":
        """Joins ranks that are running, when they call grow(). timeout_s and secret are those of the constructor.

        doors: what doors() has said on any of the ranks.

        Raises BadArgument with the reason when they refuse, CommFailed when none answers, or none lets this process in.
        """
        where, handle = _native.path(doors, "the doors"), ctypes.c_void_p()
        interruptible([("gw_secret", _native.text(secret, "the secret") or None),
                       ("gw_comm_join", where, int(timeout_s * 1000), ctypes.byref(handle))],
                      undo=lambda: destroy("gw_comm_destroy", handle))
        joined = cls.__new__(cls)
        joined._take(handle)
        return joined

    def start(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> "Request":
        """Makes a collective call of this communicator, or of one of its reducers, that returns at once; on the host.

            request = comm.start(comm.allreduce_, gradient, "int8")
            ...
            request.wait()

        Calls run one after another in the order in which they were made, with or without start(). Until a call is done
        its arrays must not be touched. Raises what the call itself raises when it is refused, and Unsupported on CUDA,
        where streams do this.
        """
        handle = ctypes.c_void_p()
        begin = ("gw_request_begin", self._handle, ctypes.byref(handle))
        _next.begin = begin
        try:
            call(*arguments, **options)
            if _next.begin is begin:  # no call was made, which wait() says
                _native.call(*begin)
        except BaseException:
            destroy("gw_request_destroy", handle)
            raise
        finally:
            _next.begin = None
        return Request(handle, (arguments, options), self)

    def allreduce_(self, array: Any, spec: str = "fp32", op: str = "avg", stream: int = 0,
                   tag: str = "", residual: Any = None) -> Any:
        """Averages (or sums, op="sum") a tensor or array over all ranks in place, and returns it. Collective.

        spec: a wire format of docs/formats.md, such as "fp32" or "bf16:round=stochastic".
        stream: for CUDA tensors, the cudaStream_t as a number.
        tag: a name for the tensor, the same on every rank. If ranks make calls of equal size in a different
            order, tags turn that into CommFailed, which names both; without tags, the result mixes tensors.
        residual: float32, as many elements, zeros at first: error feedback. Holds what this rank's rounding
            has lost, from call to call. None: that is lost, because nothing else is kept between calls.
        """
        memory = self._memory(array, "the tensor")
        kept = self._residual(residual, memory.count)
        if residual is None:
            self._collective(tag, "gw_allreduce", memory.address, memory.count, memory.dtype, _op(op),
                         _native.text(spec, "the spec"), stream or None)
        else:
            self._collective(tag, "gw_allreduce_residual", memory.address, memory.count, memory.dtype,
                         _op(op), _native.text(spec, "the spec"), kept, stream or None)
        return array

    def reduce_scatter(self, output: Any, input: Any, spec: str = "fp32", op: str = "avg",
                       counts: Optional[Sequence[int]] = None, residual: Any = None, stream: int = 0,
                       tag: str = "") -> Any:
        """Averages (or sums) `input` over all ranks; `output`, which is returned, is this rank's shard of that.

        input: float32, bfloat16 or float16, sum(counts) elements; unchanged, unless output is this rank's place in it.
        output: the same type, counts[rank] elements.
        counts: elements of each rank's shard, in rank order, any size; the same on every rank. None: equal
            shards, of len(input) / world elements.
        residual: float32, sum(counts) elements, zeros at first: see allreduce_.
        spec, stream, tag: as in allreduce_. Collective.
        """
        whole, part = self._memory(input, "the input"), self._memory(output, "the output")
        sizes = self._shards(counts, whole.count, part.count, "input", "output")
        if whole.dtype != part.dtype:
            raise TypeError("the input and the output are of different types")
        kept = self._residual(residual, whole.count)
        self._collective(tag, "gw_reduce_scatter", whole.address, part.address, sizes, whole.dtype, _op(op),
                     _native.text(spec, "the spec"), kept, stream or None)
        return output

    def all_gather(self, output: Any, input: Any, spec: str = "fp32", counts: Optional[Sequence[int]] = None,
                   residual: Any = None, stream: int = 0, tag: str = "") -> Any:
        """Joins the ranks' shards in `output`, which is returned: the same bits everywhere, as the wire had them.

        input: float32, bfloat16 or float16, counts[rank] elements; may be this rank's place in output.
        output: the same type, sum(counts) elements.
        counts: elements of each rank's shard; None: equal shards, of len(input) elements.
        residual: float32, counts[rank] elements, zeros at first: see allreduce_.
        spec, stream, tag: as in allreduce_. Collective.
        """
        whole, part = self._memory(output, "the output"), self._memory(input, "the input")
        sizes = self._shards(counts, whole.count, part.count, "output", "input")
        if whole.dtype != part.dtype:
            raise TypeError("the input and the output are of different types")
        kept = self._residual(residual, part.count)
        self._collective(tag, "gw_all_gather", part.address, whole.address, sizes, whole.dtype,
                     _native.text(spec, "the spec"), kept, stream or None)
        return output

    def all_gather_update(self, replica: Any, master: Any, spec: str = "fp32",
                          counts: Optional[Sequence[int]] = None, stream: int = 0, tag: str = "") -> Any:
        """Brings `replica`, which is returned, nearer to all ranks' masters by sending encoded differences.

        Replicas that begin with the same bits on every rank keep the same bits, and follow the masters without
        drift: what one call rounds off is part of the next one's difference.

        replica: float32, sum(counts) elements, the same on every rank.
        master: float32, counts[rank] elements, this rank's shard; not in replica's memory.
        counts: elements of each rank's shard; None: equal shards, of len(master) elements.
        spec, stream, tag: as in allreduce_. Collective. Raises Unsupported for 16-bit types.
        """
        whole, part = self._memory(replica, "the replica"), self._memory(master, "the master")
        sizes = self._shards(counts, whole.count, part.count, "replica", "master")
        if part.dtype != _native.FLOAT32:
            raise TypeError("the master is not float32")
        self._collective(tag, "gw_all_gather_update", part.address, whole.address, sizes, whole.dtype,
                     _native.text(spec, "the spec"), stream or None)
        return replica

    def broadcast_(self, array: Any, root: int = 0, spec: str = "fp32", stream: int = 0, tag: str = "") -> Any:
        """Gives every rank what rank `root` has in `array`, and returns it: the same bits everywhere, as the wire
        had them. spec, stream, tag: as in allreduce_. Collective."""
        memory = self._memory(array, "the tensor")
        self._collective(tag, "gw_broadcast", memory.address, memory.count, memory.dtype, root,
                     _native.text(spec, "the spec"), stream or None)
        return array

    def _memory(self, array: Any, what: str) -> Memory:
        memory = memory_of(array)
        if memory.device != self.device:
            raise ValueError(f"{what} is on device {memory.device}, the communicator on {self.device} "
                             "(-1: host)")
        return memory

    def _residual(self, residual: Any, count: int) -> Optional[int]:
        if residual is None:
            return None
        memory = self._memory(residual, "the residual")
        if memory.dtype != _native.FLOAT32 or memory.count != count:
            raise ValueError(f"the residual is not {count} float32 elements")
        return memory.address

    def _shards(self, counts: Optional[Sequence[int]], whole: int, part: int, whole_name: str,
                part_name: str) -> "ctypes.Array[ctypes.c_int64]":
        if counts is None:
            if part * self.world != whole:
                raise ValueError(f"the {whole_name} has {whole} elements and the {part_name} {part}, which is not "
                                 f"one of {self.world} equal shards; give counts")
            counts = [part] * self.world
        elif len(counts) != self.world or sum(counts) != whole or counts[self.rank] != part:
            raise ValueError(f"counts={list(counts)} on rank {self.rank} of {self.world}: the {whole_name} has "
                             f"{whole} elements and the {part_name} {part}")
        return (ctypes.c_int64 * self.world)(*counts)

    def _collective(self, tag: str, function: str, *arguments: object) -> None:
        call = (function, self._handle, *arguments)
        calls: List[Call] = [call]
        if tag:
            calls.insert(0, ("gw_call_tag", self._handle, _native.text(tag, "the tag")))
        self._wait_for(*calls)

    def _wait_for(self, *calls: Call) -> None:
        """Makes calls that wait for other ranks; on CUDA they return at once. A signal whose handler raises,
        as for Ctrl-C, aborts the communicator."""
        self._refuse_others(_next.owner)
        begin, _next.begin = _next.begin, None
        if begin is not None:  # its first call may wait for the other ranks as well
            calls = (begin, *calls)
        if self.device == _native.HOST:
            interruptible(list(calls), cancel=self._interrupt)
        else:
            for name, *arguments in calls:
                _native.call(name, *arguments)

    _key = ""  # the same on its ranks, and different for any other communicator; "" if it is not of a process group
    _owner: "Optional[Callable[[], Any]]" = None
    _owner_kind = ""

    def _claim(self, owner: Any, kind: str) -> None:
        """Reserves the communicator for `owner`, which makes calls from a thread of its own: calls from elsewhere would
        come before them on one rank and after them on another. Raises BadArgument where it has an owner."""
        self._refuse_others(owner)
        self._owner, self._owner_kind = weakref.ref(owner), kind

    def _release(self, owner: Any) -> None:
        if self._owner is not None and self._owner() is owner:
            self._owner = None

    def _refuse_others(self, caller: Any) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner is not caller:
            raise _native.BadArgument(f"{self._owner_kind} uses this communicator, from a thread of its own: give it another, "
                                      "from Communicator.split(0) before it is created")

    def _interrupt(self) -> None:
        self.abort("a signal interrupted rank %d" % self.rank)

    def check(self) -> None:
        """Raises CommFailed, with the reason, once the communicator has failed.

        On CUDA call it after synchronizing with the stream and before using results: a stream carries no
        errors, so an abandoned operation leaves garbage in the buffers. On the host failing calls raise.
        """
        _native.call("gw_comm_check", self._handle)

    def abort(self, reason: str = "") -> None:
        """Fails all pending operations of the communicator, on all reachable ranks. Returns at once."""
        _native.call("gw_comm_abort", self._handle, _native.text(reason, "the reason"))

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Request(Handle):
    """A call that Communicator.start() has begun. Closing it waits for the call."""

    def __init__(self, handle: ctypes.c_void_p, arrays: Any, comm: Communicator) -> None:
        super().__init__("gw_request_destroy", handle)
        self._arrays = arrays  # their memory is in use
        self._comm = comm

    def done(self) -> bool:
        """Whether the result is ready. Raises CommFailed if the call has failed."""
        done = ctypes.c_int32()
        _native.call("gw_request_test", self._handle, ctypes.byref(done))
        return done.value != 0

    def wait(self, timeout_s: Optional[float] = None) -> None:
        """Returns when the result is ready. Raises CommFailed if the call has failed, and NotDone, a TimeoutError,
        after timeout_s; the call then goes on. None: the communicator's own deadline ends it."""
        longest = 2**62 if timeout_s is None else int(timeout_s * 1000)
        self._comm._wait_for(("gw_request_wait", self._handle, longest))


class Reducer(Handle):
    """A model's gradients, or a part of them, reduced together with compression and error feedback.

    spec: "fp32", "bf16", "powersgd:rank=R[,...]": see docs/for-pytorch.md.
    tensors: a (name, rows, cols) for each, in the order in which backward completes them; vectors: cols == 1.
    bucket_bytes: tensors are reduced together in buckets of about this size; 0: the default, 25 MiB.
    tag: a name for the reducer in error messages, to tell it from others of the communicator.
    shard: each rank gets the mean of its own shard only: see shards(). A wire format then sends half as much.
    dtype: "float32", or "bfloat16" or "float16" for gradients that the library widens bucket by bucket, and rounds at
        the end.

    Collective. Raises CommFailed on every rank when ranks differ in any of these, tensor names and order too.
    """

    def __init__(self, comm: Communicator, spec: str, tensors: Sequence[Tuple[str, int, int]], *,
                 bucket_bytes: int = 0, op: str = "avg", seed: int = 0, tag: str = "",
                 shard: bool = False, dtype: str = "float32") -> None:
        self._dtype = TORCH_DTYPES.get(f"torch.{dtype}", -1)
        if self._dtype < 0:
            raise ValueError(f"dtype {dtype!r} is none of 'float32', 'bfloat16', 'float16'")
        self._dtype_name = dtype
        array = (_native.Tensor * max(1, len(tensors)))()
        for item, (name, rows, cols) in zip(array, tensors):
            item.size = ctypes.sizeof(_native.Tensor)
            item.name = _native.text(name, "the tensor's name")
            item.rows, item.cols, item.dtype = rows, cols, self._dtype
        options = _native.ReducerOptions(size=ctypes.sizeof(_native.ReducerOptions), seed=seed,
                                         bucket_bytes=bucket_bytes, sum=int(_op(op) == _native.SUM),
                                         shard=int(shard))
        handle = ctypes.c_void_p()
        comm._collective(tag, "gw_reducer_create", _native.text(spec, "the spec"), array, len(tensors),
                         ctypes.byref(options), ctypes.byref(handle))
        self._comm = comm
        super().__init__("gw_reducer_destroy", handle)
        self._counts = [rows * cols for _, rows, cols in tensors]
        self._device = comm.device

    def allreduce(self, gradients: Sequence[Any], stream: int = 0) -> None:
        """Reduces tensors or arrays of the reducer's dtype in place, one per registered tensor, in order. Collective.

        float32 tensors that are adjacent in memory are reduced in place; others are copied to a buffer and back. On
        the host the result is ready on return. On CUDA the work is enqueued on `stream`, a cudaStream_t as a
        number, and the tensors must live until the stream has finished it.
        """
        memories = [memory_of(g) for g in gradients]
        for i, (memory, count) in enumerate(zip(memories, self._counts)):
            if memory != (memory.address, count, self._dtype, self._device):
                raise ValueError(f"gradient {i} is not {count} {self._dtype_name} elements on device {self._device} "
                                 "(-1: host)")
        self.allreduce_at(self.addresses_of([m.address for m in memories]), stream)

    def allreduce_at(self, addresses: "ctypes.Array[ctypes.c_void_p]", stream: int = 0) -> None:
        """allreduce() for gradients at `addresses`, from addresses_of(). The memory is not checked."""
        if len(addresses) != len(self._counts):
            raise ValueError(f"got {len(addresses)} gradients, the reducer has {len(self._counts)} tensors")
        self._comm._wait_for(("gw_reducer_allreduce", self._handle, addresses, stream or None))

    @staticmethod
    def addresses_of(addresses: Sequence[int]) -> "ctypes.Array[ctypes.c_void_p]":
        """A C array of addresses, which can be reused as long as the gradients do not move."""
        return (ctypes.c_void_p * len(addresses))(*addresses)

    def shards(self) -> List[Tuple[int, int, int]]:
        """(tensor, begin, end): the elements whose mean this rank finds in its gradients after allreduce(). All of
        them or, with shard=True, its part of each bucket; the other elements are then unspecified."""
        count = ctypes.c_int32()
        _native.call("gw_reducer_shards", self._handle, None, 0, ctypes.byref(count))
        ranges = (_native.Range * max(1, count.value))()
        _native.call("gw_reducer_shards", self._handle, ranges, count.value, ctypes.byref(count))
        return [(r.tensor, r.begin, r.end) for r in ranges[:count.value]]

    def stats(self) -> Dict[str, Any]:
        """The fields of gw_stats: bytes and times of the last step, and the memory held."""
        stats = _native.Stats(size=ctypes.sizeof(_native.Stats))
        _native.call("gw_reducer_stats", self._handle, ctypes.byref(stats))
        fields: List[str] = [name for name, *_ in _native.Stats._fields_ if name != "size"]
        values = {name: getattr(stats, name) for name in fields}
        values["description"] = values["description"].decode(errors="replace")
        return values

    def save_state(self, memory: Optional[bytearray] = None) -> bytearray:
        """Residuals, factors and step count of this rank. docs/checkpoints.md has the layout.

        memory: an earlier result that is no longer needed; used again if it has the right size."""
        size = ctypes.c_size_t()
        _native.call("gw_reducer_state_size", self._handle, ctypes.byref(size))
        state = memory if memory is not None and len(memory) == size.value else bytearray(size.value)
        buffer = (ctypes.c_char * len(state)).from_buffer(state)
        _native.call("gw_reducer_state_save", self._handle, buffer, len(state))
        return state

    def load_state(self, state: bytes) -> None:
        """Restores a save_state() of this rank. After Communicator.shrink() or .grow(), the state may be from
        the previous group. This rank's whole residual is loaded; the residual of a lost rank is lost. Raises
        BadArgument for a state of another spec or model, and for a state of another rank in a group of the
        same size. The next step compares the loaded states. It raises CommFailed on every rank if two ranks
        have loaded the same state."""
        _native.call("gw_reducer_state_load", self._handle, bytes(state), len(state))

    def load_states(self, states: Sequence[bytes]) -> None:
        """Restores the save_state()s of all ranks of a run, which may have had another number of ranks: rank r of n takes
        the sum of the residuals of the ranks r, r + n, r + 2n, ... Raises BadArgument, as load_state(), and where a
        state that this rank needs is missing."""
        blobs = [bytes(state) for state in states]
        _native.call("gw_reducer_state_load_ranks", self._handle, (ctypes.c_char_p * len(blobs))(*blobs),
                     (ctypes.c_size_t * len(blobs))(*map(len, blobs)), len(blobs))
