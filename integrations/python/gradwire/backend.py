"""Gradwire as a backend of torch.distributed: compresses the collectives of any caller.

    from gradwire.torch import register_backend
    register_backend("int8")                          # before init_process_group
    torch.distributed.init_process_group("gradwire")  # in place of "gloo"

A group is a Gloo process group that sends large floating-point tensors in a wire format. The choice depends
on the operation, the type and the size only, which are the same on every rank. Gloo does everything else:
broadcasts, barriers, objects, integers and small tensors. Gloo and Gradwire number their calls separately.
Both require that all ranks make the same calls in the same order, as torch.distributed does.

No error feedback: the backend cannot tell which calls carry the same tensor. For the gradients of
DistributedDataParallel and FSDP2, use gradwire.torch.compress() and gradwire.fsdp.compress(), which have it.
"""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from datetime import timedelta
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._process_group import Worker, communicator_of_store, until

__all__ = ["Backend", "register_backend"]

_NO_TIMEOUT = timedelta(0)
# torch.compile() must not trace this module's code when a compiled model calls it, as DDP's broadcast does.
_untraced: Callable[[Any], Any] = getattr(torch, "_disable_dynamo", lambda function: function)


def _untraced_methods(cls: Any) -> Any:
    """Excludes a class's methods, which PyTorch calls, from torch.compile()."""
    for name, value in list(vars(cls).items()):
        if callable(value) and not name.startswith("__"):
            setattr(cls, name, _untraced(value))
    return cls


class Rule(NamedTuple):
    """The wire format of each operation (None: uncompressed), and the smallest compressed tensor in bytes."""

    allreduce: Optional[str]
    reduce_scatter: Optional[str]
    all_gather: Optional[str]
    min_bytes: int


def register_backend(allreduce: Optional[str] = "int8", *, reduce_scatter: Optional[str] = None,
                     all_gather: Optional[str] = None, min_bytes: int = 1 << 20,
                     name: str = "gradwire") -> None:
    """Registers a backend for init_process_group() and new_group().

    Call it on every rank with the same arguments. The backend compresses sums, averages and gathers of
    float32, bfloat16 and float16 tensors.

    Args:
        allreduce, reduce_scatter, all_gather: the wire format (docs/formats.md) of each operation, such as
            "int8", "bf16:round=stochastic" or "int4:rotate=hadamard". None: Gloo does the operation. The
            format of all_gather rounds the caller's tensors, often parameters.
        min_bytes: Gloo does operations on smaller tensors. The size counts the whole tensor: the input of
            reduce_scatter, the output of all_gather. Gloo also does tensors of one element per rank: they may
            be counts or flags, as in DDP's join().
        name: the backend's name. Register several names to give groups different formats:
            new_group(ranks, backend=name).

    Raises:
        BadArgument: a format is unknown, or works on matrices.
        Unsupported: PyTorch is older than 2.9.
    """
    # PyTorch 2.1 to 2.8 support process groups in Python, but 2.6 leaves a destroyed group usable, and its
    # functional collectives time out.
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
        raise _native.Unsupported("register_backend() needs PyTorch 2.9 or later; this is "
                                  f"{torch.__version__}. For DistributedDataParallel use "
                                  "gradwire.torch.compress()")
    min_bytes = _native.integer(min_bytes, "min_bytes", ctypes.c_int64)
    rule = Rule(allreduce, reduce_scatter, all_gather, min_bytes)
    with Communicator() as alone:  # a wrong format must fail here, not in a step
        for spec in (allreduce, reduce_scatter, all_gather):
            if spec is not None:
                alone.allreduce_(torch.zeros(1, dtype=torch.float32, device="cpu"), spec)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Backend:
        return Backend(store, rank, size, timeout, rule, name)

    dist.Backend.register_backend(name, create, devices=["cpu"])


@_untraced_methods
class Work(dist._Work if hasattr(dist, "_Work") else object):  # type: ignore[misc]
    """A collective on the backend's thread. Its tensors are ready after wait() or when its future is done."""

    def __init__(self, tensors: List[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._finished = threading.Event()
        self._failure: Optional[BaseException] = None
        self._started: "torch.futures.Future[Any]" = torch.futures.Future()
        self._future = self._started.then(self._outcome)

    def _outcome(self, _: Any) -> List[torch.Tensor]:
        if self._failure is not None:
            raise self._failure  # set_exception() would not reach users of the future in C++
        return self._tensors

    def run(self, job: Callable[[], None]) -> None:
        """Runs `job` on the backend's thread, which then completes the future. Does not raise."""
        try:
            job()
        except BaseException as error:  # wait() raises it
            self._failure = error
        self._finished.set()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Blocks until the collective is done. Raises its failure, such as CommFailed with the dead rank.

        Args:
            timeout: zero: the group's timeout.
        """
        longest = min(timeout.total_seconds(), threading.TIMEOUT_MAX)
        if not self._finished.wait(longest if timeout > _NO_TIMEOUT else None):
            raise _native.CommFailed("a compressed collective did not complete within "
                                     f"{timeout.total_seconds()} s: pass wait() a longer timeout, or find "
                                     "the rank that did not call it")
        if self._failure is not None:
            raise self._failure
        self._future.wait()  # completed by the same thread, next
        return True

    def get_future(self) -> "torch.futures.Future[List[torch.Tensor]]":
        return self._future

    def is_completed(self) -> bool:
        return self._finished.is_set()

    def is_success(self) -> bool:
        return self._finished.is_set() and self._failure is None

    def exception(self) -> Optional[BaseException]:
        return self._failure

    def result(self) -> List[torch.Tensor]:
        """Returns the tensors. Raises RuntimeError before the call is complete, like Gloo."""
        if not self._finished.is_set():
            raise RuntimeError("the collective is not complete: call wait() before result()")
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


def _gloos(*names: str) -> Any:
    """Returns a method that calls Gloo's method.

    The method is not inherited, because PyTorch holds the GIL while it runs a C++ method that a Python class
    does not override. Gloo's threads need the GIL to drop a finished call while they hold Gloo's lock. The
    next call waits for that lock with the GIL held: an occasional deadlock.

    Args:
        names: the method's names in different versions of PyTorch, latest first.
    """

    def method(self: "Backend", *arguments: Any, **options: Any) -> Any:
        return self._gloo_call(*names)(*arguments, **options)

    method.__name__ = names[0]
    return method


@_untraced_methods
class Backend(dist.ProcessGroup):
    """A process group with compressed collectives. Created through register_backend()."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, rule: Rule, name: str) -> None:
        super().__init__(store, rank, size)
        self._rule, self._name, self._timeout_s = rule, name, _native.seconds(timeout, "timeout")
        self._store, self._process = store, os.getpid()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._worker: Optional[Worker] = None
        self._running = 0  # identifier of the thread that runs jobs
        self._finalizer: Any = None  # a weakref.finalize, which is generic in some versions of mypy
        self.compressed = 0  # number of compressed calls

    def getBackendName(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Ends running calls. Called by destroy_process_group()."""
        if self._finalizer is not None:
            self._finalizer()
        self._gloo.shutdown()

    # ---- Choosing the wire format --------------------------------------------------------------------------

    def _format(self, spec: Optional[str], tensors: Sequence[torch.Tensor], parts: int = 1) -> str:
        """Returns the wire format of a call; "" if Gloo makes the call.

        The result depends only on properties that are equal on all ranks.

        Args:
            spec: the rule's format for the operation.
            tensors: the whole input of a reduction, or output of a gather.
            parts: the number of parts. Tensors of one element per part may be counts, and are not compressed.
        """
        dtype, count = tensors[0].dtype, sum(t.numel() for t in tensors)
        fits = (all(t.layout == torch.strided and t.dtype == dtype for t in tensors)
                and self.size() > 1 and dtype in (torch.float32, torch.bfloat16, torch.float16)
                and count > parts and count * dtype.itemsize >= self._rule.min_bytes)
        return spec if spec is not None and fits else ""

    def allreduce(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        opts = _options(opts, others, c10d.AllreduceOptions)
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = _op(opts.reduceOp)
        spec = self._format(self._rule.allreduce, tensors) if len(tensors) == 1 else ""
        if not op or not spec:
            return self._gloo.allreduce(tensors, opts)

        def job(comm: Communicator) -> None:
            with _Contiguous(tensors[0], write=True) as values:
                comm.allreduce_(values, spec, op, tag="torch.distributed.all_reduce")

        return self._submit(job, tensors, spec, "all_reduce")

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        spec, op = self._format(self._rule.reduce_scatter, [input], self.size()), _op(opts.reduceOp)
        if not op or not spec or not _alike(output, input):
            return self._gloo_call("reduce_scatter_single", "_reduce_scatter_base")(output, input, opts)

        def job(comm: Communicator) -> None:
            with _Contiguous(output, write=True) as result, _Contiguous(input) as values:
                comm.reduce_scatter(result, values, spec, op, tag="torch.distributed.reduce_scatter")

        return self._submit(job, [output], spec, "reduce_scatter", input)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        opts = _options(opts, others, c10d.ReduceScatterOptions)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        spec, op = "", _op(opts.reduceOp)
        if len(outputs) == 1 and inputs[0] and _alike(outputs[0], inputs[0][0]):
            spec = self._format(self._rule.reduce_scatter, inputs[0], self.size())
        if not op or not spec:
            return self._gloo.reduce_scatter(outputs, inputs, opts)

        def job(comm: Communicator) -> None:
            values = torch.cat([t.detach().reshape(-1) for t in inputs[0]])
            with _Contiguous(outputs[0], write=True) as result:
                comm.reduce_scatter(result, values, spec, op, [t.numel() for t in inputs[0]],
                                    tag="torch.distributed.reduce_scatter")

        return self._submit(job, list(outputs), spec, "reduce_scatter", *inputs[0])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        spec = self._format(self._rule.all_gather, [output], self.size())
        if not spec or not _alike(output, input):
            return self._gloo_call("all_gather_single", "_allgather_base")(output, input,
                                                                           opts or c10d.AllgatherOptions())

        def job(comm: Communicator) -> None:
            with _Contiguous(output, write=True) as result, _Contiguous(input) as values:
                comm.all_gather(result, values, spec, tag="torch.distributed.all_gather")

        return self._submit(job, [output], spec, "all_gather")

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *others: Any) -> Any:
        opts = _options(opts, others, c10d.AllgatherOptions)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        spec, parts = "", outputs[0]
        if len(inputs) == 1 and parts and _alike(inputs[0], parts[0]):
            spec = self._format(self._rule.all_gather, parts, len(parts))
        if not spec:
            return self._gloo.allgather(outputs, inputs, opts)

        def job(comm: Communicator) -> None:
            counts = [t.numel() for t in parts]
            result = torch.empty(sum(counts), dtype=inputs[0].dtype, device=inputs[0].device)
            with _Contiguous(inputs[0]) as values:
                comm.all_gather(result, values, spec, counts, tag="torch.distributed.all_gather")
            for part, values in zip(parts, result.split(counts)):
                part.detach().copy_(values.view(part.shape))

        return self._submit(job, list(parts), spec, "all_gather")

    # Functional collectives, DTensor and Megatron pass lists of one tensor. Gloo makes the calls with longer
    # lists.

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, *others: Any) -> Any:
        opts = _options(opts, others, c10d.AllreduceCoalescedOptions)
        if len(tensors) == 1:
            return self.allreduce(tensors, opts.reduceOp, opts.timeout)
        return self._gloo.allreduce_coalesced(tensors, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if len(inputs) == 1:
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        return self._gloo_call("reduce_scatter_single_coalesced",
                               "reduce_scatter_tensor_coalesced")(outputs, inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if len(inputs) == 1:
            return self.all_gather_single(outputs[0], inputs[0], opts)
        return self._gloo_call("all_gather_single_coalesced",
                               "allgather_into_tensor_coalesced")(outputs, inputs, opts)

    # The methods' names in earlier versions of PyTorch.
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base, _allgather_base = reduce_scatter_single, all_gather_single

    # ---- Gloo's methods ------------------------------------------------------------------------------------

    broadcast, reduce, scatter, gather = (_gloos("broadcast"), _gloos("reduce"), _gloos("scatter"),
                                          _gloos("gather"))
    alltoall, barrier = _gloos("alltoall"), _gloos("barrier")
    send, recv, recv_anysource = _gloos("send"), _gloos("recv"), _gloos("recv_anysource")
    allgather_coalesced = _gloos("allgather_coalesced")
    all_to_all_single = _gloos("all_to_all_single", "alltoall_base")
    gather_single = _gloos("gather_single", "gather_into_tensor")
    alltoall_base, gather_into_tensor = all_to_all_single, gather_single

    # ---- Making calls --------------------------------------------------------------------------------------

    def _gloo_call(self, *names: str) -> Any:
        return next(getattr(self._gloo, name) for name in names if hasattr(self._gloo, name))

    def _submit(self, job: Callable[[Communicator], None], tensors: List[torch.Tensor], spec: str, call: str,
                *inputs: torch.Tensor) -> Work:
        """Queues a job on the worker's thread.

        Args:
            job: the collective.
            tensors: the results.
            spec, call: the format and the name, for the profiler.
            inputs: the tensors that are encoded, if not `tensors`.
        """
        if self._process != os.getpid():  # the store shares the parent's connection
            raise _native.BadHandle("the process group belongs to the parent of this forked process: call "
                                    "init_process_group() in this process, or start it with the spawn method")
        if self._worker is None or self._finalizer is None:
            # Uses the store: a call of this group inside another call of the group would deadlock.
            comm = communicator_of_store(self._store, self.rank(), self.size(), self._timeout_s)
            comm._finalizer.atexit = False  # shut_down() closes it, after the worker
            self._worker = Worker()
            self._worker.communicators[:] = [comm]
            # Also runs at exit without destroy_process_group(): a thread that completes a future while Python
            # exits would end the process with abort().
            self._finalizer = weakref.finalize(self, self._worker.shut_down)
        elif not self._finalizer.alive:
            raise _native.BadHandle("the process group was shut down: create another with "
                                    "init_process_group() or new_group()")
        comm, work = self._worker.communicators[0], Work(tensors)
        work._future = until(work._future, spec, call, *(inputs or tensors))
        self.compressed += 1

        def run() -> None:
            self._running = threading.get_ident()
            work.run(lambda: job(comm))

        if threading.get_ident() == self._running:
            # A future's callback makes this call on the worker's thread, and may wait for it, as
            # powerSGD_hook does.
            self._worker.inline += 1
            try:
                run()
            finally:
                self._worker.inline -= 1
            work._started.set_result(None)
        else:
            self._worker.submit(run, work._started)
        return work


def _options(given: Any, others: Sequence[Any], kind: Any) -> Any:
    """Returns the options of a call that passed an options object, or an operation and a timeout."""
    if isinstance(given, kind):
        return given
    options = kind()
    for value in (given, *others):
        if isinstance(value, timedelta):
            options.timeout = value
        elif value is not None:
            options.reduceOp = value
    return options


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.layout == b.layout


def _op(op: Any) -> str:
    """Returns "sum" or "avg"; "": Gloo does the operation."""
    return "sum" if op == dist.ReduceOp.SUM else "avg" if op == dist.ReduceOp.AVG else ""


class _Contiguous:
    """A tensor, or a contiguous copy of it, which write=True copies back."""

    def __init__(self, tensor: torch.Tensor, write: bool = False) -> None:
        self._tensor, self._write = tensor.detach(), write
        # The memory of a negated view, such as z.conj().imag, has the opposite sign.
        self._copy = self._tensor.resolve_neg().contiguous()

    def __enter__(self) -> torch.Tensor:
        return self._copy

    def __exit__(self, failed: Any, *_: object) -> None:
        if self._write and failed is None and self._copy.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._copy)
