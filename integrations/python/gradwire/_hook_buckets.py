"""The buckets of the DDP hook, their reducers, and the state that moves from bucket to bucket."""
from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Optional

import torch

from gradwire._auto import BucketAuto
from gradwire._buckets import NATIVE, Bucket, Layout, Names, matrix, spec_for
from gradwire._communicator import Communicator
from gradwire._find_ddp import may_skip
from gradwire._hook_state import LossScale, add_missing, taken
from gradwire._process_group import Worker
from gradwire._reducer import Reducer, State, TensorState, pack, unpack

_log = logging.getLogger("gradwire")

_ROOM = 256 << 20  # bytes for a new communicator, which measures the links with 128 MiB


def make_room(buffer: torch.Tensor) -> None:
    """Empties PyTorch's cache if the GPU may lack free memory for a reducer of the bucket `buffer`.

    Call it before the reducer is created. Creation is collective, and ranks allocate after they have compared
    their arguments. If the GPU then refuses memory on one rank, that rank cannot repeat the creation, because
    the other ranks may already be in the next call.
    """
    if not buffer.is_cuda:
        return
    needed = 3 * 4 * buffer.numel() + _ROOM  # residual, workspace and encodings in FP32
    if torch.cuda.mem_get_info(buffer.device)[0] < needed:
        torch.cuda.empty_cache()


class HookBuckets:
    """The base of Hook that has its buckets.

    Attributes:
        spec: the spec of the buckets' reducers.
    """

    def __init__(self, spec: str, seed: int, auto: Optional[BucketAuto]) -> None:
        self.spec = spec
        self._seed = seed
        self._auto = auto  # chooses the spec; None: the spec was given
        self._names = Names()
        self._buckets: Dict[int, Bucket] = {}
        self._from_load = False  # the state in _carried was loaded; no warning about missing parameters yet
        self._carried: Optional[State] = None  # state of tensors whose buckets do not exist yet
        self._worker = Worker()
        self._scale: Optional[LossScale] = None
        self._skips: Optional[bool] = None  # whether steps may not use some parameters; None: not known yet
        self._sent = 0  # bytes, to add to those of the communicator: Hook.stats()
        self._keeps_copies = False  # buckets keep copies of their state from before a step

    def _communicator(self, buffer: torch.Tensor) -> Communicator:
        raise NotImplementedError

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Uses the model's parameter names, as Hook(model=model) does. Call it before the first step.

        Raises:
            BadArgument: another model's parameters have these names. A hook is for one model.
        """
        self._names.add_model(model)

    def _entry_for(self, bucket: Any, buffer: torch.Tensor) -> Bucket:
        index, parameters = bucket.index(), bucket.parameters()
        self._names.complete = self._names.complete or (index == 0 and 0 in self._buckets)
        entry = self._buckets.get(index)
        if entry is not None and len(entry.parameters) == len(parameters) and all(
                a is b for a, b in zip(entry.parameters, parameters)):
            return entry
        if entry is not None:  # DDP rebuilds its buckets once, after the first step
            self._dissolve(lambda i: i >= index)
            if self._auto is not None:
                self._auto.restart()
        self._communicator(buffer)  # in DDP's thread, because it uses the process group
        if self._skips is None:
            self._skips = may_skip(parameters)
        names = self._names.of(parameters)
        shapes = tuple(matrix(p) for p in parameters)
        entry = self._buckets[index] = Bucket(index, parameters, Layout(names, shapes), buffer.element_size())
        return entry

    def _make_reducer(self, entry: Bucket, buffer: torch.Tensor) -> Reducer:
        """Creates the bucket's reducer, with the state that is kept for its tensors."""
        layout = entry.layout
        make_room(buffer)
        comm = self._communicator(buffer)
        before = comm.bytes_sent
        # One reducer bucket per DDP bucket.
        reducer = Reducer(comm, spec_for(self.spec, buffer.dtype),
                          [(name, rows, cols) for name, (rows, cols) in zip(layout.names, layout.shapes)],
                          bucket_bytes=1 << 60, seed=self._seed, tag=f"DDP bucket {entry.index}",
                          skip_unused=bool(self._skips), dtype=NATIVE.get(buffer.dtype, "float32"))
        self._sent -= comm.bytes_sent - before  # to measure the links
        carried = self._carried
        if carried is None:
            return reducer
        fresh = unpack(reducer.save_state())
        missing = add_missing(carried, layout, fresh, self._names.are_a_models)
        if missing and self._from_load:
            _log.warning("the loaded state lacks %d parameters of a bucket, such as %r: their residuals "
                         "begin at zero", len(missing), missing[0])
            self._from_load = False
        reducer.load_state(pack(taken(carried, layout, fresh)))
        if not carried.tensors:
            self._carried = None
        return reducer

    def _dissolve(self, which: Callable[[int], bool]) -> None:
        """Removes buckets, and keeps their state in _carried for the buckets that replace them."""
        self._worker.drain()
        collected = self._collect(which)
        for index in [i for i in self._buckets if which(i)]:
            reducer = self._buckets.pop(index).reducer
            if reducer is not None:
                reducer.close()
        self._carried = collected

    def _use(self, spec: str) -> None:
        """Averages with another spec from now on. Call it in a job, before a step's first average."""
        self._carried = self._collect(lambda index: True)
        for entry in list(self._buckets.values()):  # DDP's thread may add buckets
            if entry.reducer is not None:
                entry.reducer.close()
                entry.reducer = None
        if self._scale is not None:
            self._scale.forget()  # states of the other spec
        self.spec = spec

    def _collect(self, which: Callable[[int], bool]) -> Optional[State]:
        identity, steps, carried = self._carried or State("", 0, {})
        tensors: Dict[str, TensorState] = dict(carried)
        for index, entry in list(self._buckets.items()):
            if which(index) and entry.reducer is not None:
                kept = entry.copies.before if self._keeps_copies else None
                state = unpack(kept if kept is not None else entry.reducer.save_state())
                identity, steps = state.identity, state.steps
                tensors.update(state.tensors)
        return State(identity, steps, tensors) if tensors else None
