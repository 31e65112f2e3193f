"""The custom call of gradwire.jax when a program runs: the ranks that serve it, and its execution on the host or on CUDA."""
from __future__ import annotations

import functools
import json
import os
import threading
from typing import Any, Dict, List, Optional, Tuple

import jax

from gradwire import _jax_ffi, _native
from gradwire._core import Communicator

TARGET = "gradwire_average"
DTYPES = {"float32": _native.FLOAT32, "bfloat16": _native.BFLOAT16, "float16": _native.FLOAT16}
_BYTES = {_native.FLOAT32: 4, _native.BFLOAT16: 2, _native.FLOAT16: 2}


class Ranks:
    """The ranks of this process: a communicator for each of its devices."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.communicators: Dict[int, Tuple[Communicator, threading.Lock]] = {}  # by _jax_ffi.Call.device
        self.world = 0
        self.generation = 0  # counts init() and shutdown()
        self.traced_alone: Optional[bool] = None  # the codecs' programs that were traced are for a world of 1, or for more

    def set(self, communicators: Dict[int, Communicator], world: int) -> None:
        """Replaces the ranks. The codecs' programs for a world of 1 are traced again for a larger one, and vice versa."""
        if world > 0 and self.traced_alone is not None and self.traced_alone != (world == 1):
            jax.clear_caches()
            self.traced_alone = None
        self.communicators = {device: (comm, threading.Lock()) for device, comm in communicators.items()}
        self.world = world
        self.generation += 1
        self.process = os.getpid()

    def forget_parents(self) -> None:
        """In a fork: the communicators are those of the parent process."""
        if self.process != os.getpid():
            for communicator, _ in self.communicators.values():
                communicator.close()
            self.set({}, 0)


ranks = Ranks()


def check_mapped(devices: int) -> None:
    """Raises where a program that jax.shard_map maps over so many devices would leave ranks out."""
    if devices not in (ranks.world, len(ranks.communicators)):
        raise RuntimeError(f"gradwire.jax inside jax.shard_map over {devices} of {ranks.world} devices: a rank is "
                           f"a device, and every rank takes part. Use a mesh of all {ranks.world} devices, or one "
                           f"of the {len(ranks.communicators)} of each process")


@functools.lru_cache(maxsize=256)
def _parsed(plan: str) -> List[Dict[str, Any]]:
    return [dict(part) for part in json.loads(plan)]


def run_call(call: _jax_ffi.Call) -> None:
    communicator, lock = ranks.communicators.get(call.device, (None, None))
    if communicator is None or lock is None:
        raise RuntimeError(f"no communicator for device {call.device}: gradwire.jax.init() ran without it, or "
                           "gradwire.jax.shutdown() has ended it")
    for i, (given, result) in enumerate(zip(call.operands, call.results)):
        if given != result:  # every operand is aliased with its result
            raise RuntimeError(f"XLA did not alias operand {i}; report this")
    parts = _parsed(call.attributes["plan"])
    if parts[0]["devices"]:
        check_mapped(parts[0]["devices"])
    addresses, counts = call.results[1:], call.counts[1:]
    if not addresses:
        if communicator.world > 1:
            raise RuntimeError(f"{parts[0]['alone']} was compiled in a world of 1, without averages, and now there "
                               f"are {communicator.world} ranks: compile it again, after gradwire.jax.init()")
        return
    residuals = iter(addresses[len(parts):])
    with lock:  # of two computations at once on this device
        if call.stream:
            # An earlier call may have failed on its stream, which says nothing.
            _native.call("gw_comm_check", communicator._handle)
        for part, address, count in zip(parts, addresses, counts):
            residual = next(residuals) if part["keeps"] else None
            _run_part(communicator, part, address, count, residual, call.stream)


def _run_part(communicator: Communicator, part: Dict[str, Any], address: int, count: int,
              residual: Optional[int], stream: int) -> None:
    spec, tag = part["spec"], part["tag"]
    size = count * _BYTES[part["dtype"]]
    with jax.profiler.TraceAnnotation(f"gradwire {spec}: {tag}", spec=spec, bytes=size):
        _native.call("gw_call_tag", communicator._handle, _native.text(tag, "the name"))
        _native.call("gw_allreduce_residual", communicator._handle, address, count, part["dtype"],
                     _native.SUM if part["op"] == "sum" else _native.AVG, _native.text(spec, "the spec"),
                     residual, stream or None)


@functools.lru_cache(maxsize=None)
def register() -> None:
    """Makes the custom call known to XLA."""
    _jax_ffi.register(TARGET, run_call)
