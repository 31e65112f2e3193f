"""Lets the DDP hook continue when ranks die: docs/for-pytorch.md, "Continuing after a rank fails".

A step ends with an exchange that confirms that every rank has the means of all buckets. DDP's Futures
complete after this exchange, so no rank uses a mean earlier. When a call fails, the survivors form a new
group and compare their progress. A rank that completed the final exchange may be one step ahead of a rank
that did not. In that case every rank has the step's means, and all ranks continue with the next step.
Otherwise all ranks repeat the step's exchanges from copies of gradients and states.
"""
from __future__ import annotations

import logging
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._reducer import State, TensorState, entries_of, unpack

_log = logging.getLogger("gradwire")
_STEPS = 1 << 20  # step numbers are compared modulo this, because they are sent as float32


class Copies:
    """Copies from which a bucket's step can be repeated. Their memory is reused in each step."""

    def __init__(self) -> None:
        self.gradients: Optional[torch.Tensor] = None
        # The reducer's state before the step; between steps, its current state. A reducer whose group has
        # failed cannot save its state.
        self.before: Optional[bytearray] = None
        self.after: Optional[bytearray] = None  # the reducer's state after the step


class _Part(NamedTuple):
    """A bucket in the current step."""

    entry: Any  # a Bucket of _buckets.py
    buffer: torch.Tensor
    addresses: Any


class Elastic:
    """A hook's group of ranks, and its current step. Runs on the hook's worker thread.

    Attributes:
        ranks: the surviving ranks, numbered as in the process group.
    """

    def __init__(self, min_ranks: int) -> None:
        self.min_ranks = min_ranks
        self.ranks: List[int] = []
        self._done: "torch.futures.Future[Any]" = torch.futures.Future()  # used by DDP's thread only
        self._step = 0
        self._parts: List[_Part] = []
        self._exchanged = 0  # number of parts exchanged
        self._has_all = False  # this rank has all means of the step
        self._finished = False
        self._fresh = True  # no state from an earlier step
        self._regroups = 0  # regroups in this step that lost no rank
        self._norms: List[float] = []  # norm of each rank's residuals after the last step

    def submit(self, hook: Any, entry: Any, bucket: Any, buffer: torch.Tensor,
               addresses: Any) -> "torch.futures.Future[Any]":
        """Queues a bucket. Returns the step's Future of None or an exception, done after the last bucket."""
        first, last = bucket.index() == 0, bucket.is_last()
        if first:
            self._done = torch.futures.Future()
        part = _Part(entry, buffer, addresses)
        hook._worker.submit(lambda: self._run(hook, part, first, last),
                            self._done if last else torch.futures.Future())
        return self._done

    # ---- On the worker -------------------------------------------------------------------------------------

    def _run(self, hook: Any, part: _Part, first: bool, last: bool) -> Optional[BaseException]:
        if hook._failure is not None:
            return hook._failure
        try:
            if first:
                (self._parts, self._exchanged, self._has_all, self._finished,
                 self._regroups) = [], 0, False, False, 0
                self._fresh = self._step == 0 and hook._carried is None
            self._keep_gradients(part)
            while True:
                try:
                    self._exchange(hook, last)
                    return None
                except _native.CommFailed as error:
                    self._regroup(hook, error)
        except BaseException as error:  # the Future reports it to DDP
            hook._failure = error
            return error

    def _keep_gradients(self, part: _Part) -> None:
        self._parts.append(part)
        copies = part.entry.copies
        if copies.gradients is None or copies.gradients.shape != part.buffer.shape:
            copies.gradients = torch.empty_like(part.buffer)
        copies.gradients.copy_(part.buffer)

    def _exchange(self, hook: Any, last: bool) -> None:
        while self._exchanged < len(self._parts):
            self._reduce(hook, self._parts[self._exchanged])
            self._exchanged += 1
        if last and not self._finished:
            self._has_all = True
            self._norms = self._exchange_norms(hook._comm)
            self._finish()

    def _reduce(self, hook: Any, part: _Part) -> None:
        entry, copies = part.entry, part.entry.copies
        if entry.reducer is None:
            entry.reducer = hook._make_reducer(entry, part.buffer)
        if copies.before is None:
            copies.before = entry.reducer.save_state()
        hook._reduce(entry, part.buffer, part.addresses, 0)
        copies.after = entry.reducer.save_state(copies.after)

    def _exchange_norms(self, comm: Communicator) -> List[float]:
        """Returns the norm of each rank's residuals. On return every rank has all means."""
        squares = 0.0
        for part in self._parts:
            for _, kind, dtype, data in entries_of(part.entry.copies.after):
                if kind == "residual" and dtype == "F32" and len(data) > 0:
                    squares += float(torch.frombuffer(data, dtype=torch.float32).norm()) ** 2
        norms = torch.zeros(comm.world, dtype=torch.float32, device="cpu")
        norms[comm.rank] = squares ** 0.5
        comm.allreduce_(norms, "fp32:schedule=tree", "sum", tag=f"the end of step {self._step}")
        return [float(norm) for norm in norms]

    def _finish(self) -> None:
        for part in self._parts:
            copies = part.entry.copies
            copies.before, copies.after = copies.after, copies.before
        self._step += 1
        self._finished = True

    # ---- After a failure -----------------------------------------------------------------------------------

    def _regroup(self, hook: Any, cause: _native.CommFailed) -> None:
        """Forms a group of the survivors, which completes the step. Raises CommFailed on failure."""
        before, after = self._states(hook)
        for entry in list(hook._buckets.values()):
            if entry.reducer is not None:
                entry.reducer.close()
                entry.reducer = None
        while True:
            if hook._worker.stopping:
                raise cause
            world = hook._comm.world
            try:
                rest, survivors = hook._comm.shrink(hook._timeout_s)
            except _native.CommFailed as error:
                raise _native.CommFailed(f"{error} (after the failure: {cause})") from cause
            hook._take_communicator(rest)
            self._regroups = 0 if rest.world < world else self._regroups + 1
            if rest.world < self.min_ranks or self._regroups > 1:
                why = (f"; {rest.world} ranks are left, but min_ranks is {self.min_ranks}"
                       if rest.world < self.min_ranks else "")
                rest.abort(f"{cause}{why}")
                raise _native.CommFailed(f"{cause}{why}") from cause
            self._adopt_survivors(survivors, world, rest, cause)
            try:
                done = self._others_have_all(rest)
                break
            except _native.CommFailed as error:  # another rank died
                cause = error
        # The new group's reducers load this state of the old group.
        hook._carried = after if done else None if self._fresh else before
        if done:
            self._finish()
            return
        self._exchanged, self._has_all = 0, False
        for part in self._parts:
            part.buffer.copy_(part.entry.copies.gradients)

    def _states(self, hook: Any) -> Tuple[Optional[State], Optional[State]]:
        """Returns all parameters' state before this step, and after it if this rank has all means."""
        before = [hook._carried] if hook._carried is not None else []
        before += [unpack(entry.copies.before) for entry in list(hook._buckets.values())
                   if entry.copies.before is not None]
        after = [unpack(part.entry.copies.after) for part in self._parts] if self._has_all else []
        return _joined(before), _joined(after)

    def _others_have_all(self, comm: Communicator) -> bool:
        """Returns whether every rank has the means of this rank's step, so that no rank repeats it."""
        mine = torch.tensor([self._step % _STEPS, self._has_all], dtype=torch.float32, device="cpu")
        everybody = torch.empty(2 * comm.world, dtype=torch.float32, device="cpu")
        comm.all_gather(everybody, mine, "fp32", tag="how far the ranks are")
        ahead = [(int(step) - self._step) % _STEPS == 1 for step in everybody[::2]]
        here = [int(step) == self._step % _STEPS for step in everybody[::2]]
        return self._has_all and (any(ahead) or all(h and bool(has) for h, has in zip(here, everybody[1::2])))

    def _adopt_survivors(self, survivors: List[int], world: int, rest: Communicator,
                         cause: _native.CommFailed) -> None:
        gone = [rank for rank in range(world) if rank not in survivors]
        if rest.rank == 0:
            names = ", ".join(str(self.ranks[rank]) for rank in gone)
            norm = sum(self._norms[rank] ** 2 for rank in gone) ** 0.5 if self._norms else 0.0
            lost = f"; their residuals, of norm {norm:.4g}, are lost" if norm > 0 else ""
            _log.warning("%s in step %d; %d of %d ranks continue%s. Cause: %s",
                         f"lost rank{'s' if len(gone) > 1 else ''} {names}" if gone else "a call failed",
                         self._step, rest.world, world, lost, cause)
        self.ranks = [self.ranks[rank] for rank in survivors]
        self._norms = [self._norms[rank] for rank in survivors] if self._norms else []


def _joined(states: List[State]) -> Optional[State]:
    tensors: Dict[str, TensorState] = {}
    for state in states:
        tensors.update(state.tensors)
    return State(states[0].identity, states[0].steps, tensors) if tensors else None


def check_uses_no_process_group(ddp: Any) -> None:
    """Raises BadArgument if DDP uses its process group in every step: a process group cannot lose ranks."""
    modules: List[Any] = list(ddp.modules())
    remedies = []
    if ddp.broadcast_buffers and any(True for _ in ddp.buffers()):
        remedies.append("forward_sync_buffers=False" if hasattr(ddp, "forward_sync_buffers")
                        else "broadcast_buffers=False")
    if ddp.find_unused_parameters:
        remedies.append("find_unused_parameters=False")
    sparse = [name for name, module in ddp.named_modules()
              if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse]
    if sparse:
        remedies.append(f"sparse=False in {', '.join(sparse)}")
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in modules):
        remedies.append("BatchNorm in place of SyncBatchNorm")
    if remedies:
        raise _native.BadArgument("min_ranks: a step uses the process group, which cannot lose ranks: use "
                                  + " and ".join(remedies))
