"""The custom call of gradwire.jax when a program runs: its ranks, and its execution on the host or CUDA."""
from __future__ import annotations

import functools
import json
import os
import threading
from typing import Any, Dict, List, NamedTuple, Optional

import jax

from gradwire import _jax_ffi, _native
from gradwire._calls import call_options
from gradwire._communicator import Communicator
from gradwire._reducer import Reducer

TARGET = "gradwire_average"
DTYPES = {"float32": _native.FLOAT32, "bfloat16": _native.BFLOAT16, "float16": _native.FLOAT16}
_BYTES = {_native.FLOAT32: 4, _native.BFLOAT16: 2, _native.FLOAT16: 2}


_KEPT_REDUCERS = 8  # per rank: each has a copy of its program's residuals


class Rank(NamedTuple):
    """The rank of a device."""

    communicator: Communicator
    lock: threading.Lock
    reducers: Dict[str, Reducer]  # by plan, the most recently used last

    def close(self) -> None:
        for reducer in self.reducers.values():
            reducer.close()
        self.communicator.close()


class Ranks:
    """The ranks of this process, one for each of its devices."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.communicators: Dict[int, Rank] = {}  # by _jax_ffi.Call.device
        self.world = 0
        self.generation = 0  # counts init() and shutdown()

    def set(self, communicators: Dict[int, Communicator], world: int) -> None:
        """Closes the ranks and replaces them."""
        for rank in self.communicators.values():
            rank.close()
        self.communicators = {device: Rank(comm, threading.Lock(), {})
                              for device, comm in communicators.items()}
        self.world = world
        self.generation += 1
        self.process = os.getpid()

    def forget_parents(self) -> None:
        """Drops the parent's communicators in a forked process."""
        if self.process != os.getpid():
            self.set({}, 0)


ranks = Ranks()


def check_mapped(devices: int) -> None:
    """Raises RuntimeError if jax.shard_map over this number of devices would leave ranks out."""
    if devices not in (ranks.world, len(ranks.communicators)):
        raise RuntimeError(f"gradwire.jax is inside jax.shard_map over {devices} of {ranks.world} devices, "
                           "but all ranks must take part, and each device is a rank: use a mesh of all "
                           f"{ranks.world} devices, or of the {len(ranks.communicators)} devices of each "
                           "process")


@functools.lru_cache(maxsize=256)
def _parsed(plan: str) -> List[Dict[str, Any]]:
    return [dict(part) for part in json.loads(plan)]


def run_call(call: _jax_ffi.Call) -> None:
    rank = ranks.communicators.get(call.device)
    if rank is None:
        raise RuntimeError(f"no communicator for device {call.device}: gradwire.jax.init() did not include "
                           "it, or gradwire.jax.shutdown() closed it: call gradwire.jax.init() again")
    for i, (given, result) in enumerate(zip(call.operands, call.results)):
        if given != result:  # every operand is aliased with its result
            raise RuntimeError(f"XLA did not alias operand {i} with its result: report this bug")
    plan = call.attributes["plan"]
    parts = _parsed(plan)
    if parts[0]["devices"]:
        check_mapped(parts[0]["devices"])
    addresses, counts = call.results[1:], call.counts[1:]
    with rank.lock:  # serializes concurrent computations on this device
        if call.stream:
            # An earlier call may have failed on its stream, which reports no errors.
            _native.call("gw_comm_check", rank.communicator._handle)
        if "tensors" in parts[0]:
            _run_step(rank, plan, parts[0], addresses, call.stream)
            return
        residuals = iter(addresses[len(parts):])
        for part, address, count in zip(parts, addresses, counts):
            residual = next(residuals) if part["keeps"] else None
            _run_part(rank.communicator, part, address, count, residual, call.stream)


def _run_step(rank: Rank, plan: str, step: Dict[str, Any], addresses: List[int], stream: int) -> None:
    spec, tag, tensors = step["spec"], step["tag"], step["tensors"]
    count = len(tensors)
    # Creation is collective: the ranks make the same calls in the same order.
    reducer = rank.reducers.pop(plan, None) or Reducer(
        rank.communicator, spec, [(f"array {i}", rows, cols) for i, (rows, cols, *_) in enumerate(tensors)],
        tag=tag)
    rank.reducers[plan] = reducer
    if len(rank.reducers) > _KEPT_REDUCERS:
        rank.reducers.pop(next(iter(rank.reducers))).close()
    states, given = (_native.State * count)(), iter(addresses[1 + count:])
    for kind, field in ((2, "residual"), (3, "factor")):
        for state, tensor in zip(states, tensors):
            if tensor[kind]:
                setattr(state, field, next(given))
    size = 4 * sum(tensor[0] * tensor[1] for tensor in tensors)
    with jax.profiler.TraceAnnotation(f"gradwire {spec}: {tag}", spec=spec, bytes=size):
        reducer.apply_at(Reducer.addresses_of(addresses[1:1 + count]), states, addresses[0], stream)


def _run_part(communicator: Communicator, part: Dict[str, Any], address: int, count: int,
              residual: Optional[int], stream: int) -> None:
    spec, tag = part["spec"], part["tag"]
    size = count * _BYTES[part["dtype"]]
    with jax.profiler.TraceAnnotation(f"gradwire {spec}: {tag}", spec=spec, bytes=size):
        _native.call("gw_allreduce", communicator._handle, address, count, part["dtype"],
                     _native.SUM if part["op"] == "sum" else _native.AVG, _native.text(spec, "the spec"),
                     stream or None, call_options(tag, residual))


@functools.lru_cache(maxsize=None)
def register() -> None:
    """Registers the custom call with XLA."""
    _jax_ffi.register(TARGET, run_call)
