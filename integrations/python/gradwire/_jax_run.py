"""The custom call of gradwire.jax when a program runs: its ranks, and its execution on the host or CUDA."""
from __future__ import annotations

import functools
import json
import os
import threading
from typing import Any, Dict, List, Optional, Tuple

import jax

from gradwire import _jax_ffi, _native
from gradwire._calls import call_options
from gradwire._communicator import Communicator

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
        # True if the traced programs of codecs are for a world of 1; None: no program was traced.
        self.traced_alone: Optional[bool] = None

    def set(self, communicators: Dict[int, Communicator], world: int) -> None:
        """Replaces the ranks. JAX retraces the codecs' programs if the world changes between 1 and more."""
        if world > 0 and self.traced_alone is not None and self.traced_alone != (world == 1):
            jax.clear_caches()
            self.traced_alone = None
        self.communicators = {device: (comm, threading.Lock()) for device, comm in communicators.items()}
        self.world = world
        self.generation += 1
        self.process = os.getpid()

    def forget_parents(self) -> None:
        """Drops the parent's communicators in a forked process."""
        if self.process != os.getpid():
            for communicator, _ in self.communicators.values():
                communicator.close()
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
    communicator, lock = ranks.communicators.get(call.device, (None, None))
    if communicator is None or lock is None:
        raise RuntimeError(f"no communicator for device {call.device}: gradwire.jax.init() did not include "
                           "it, or gradwire.jax.shutdown() closed it: call gradwire.jax.init() again")
    for i, (given, result) in enumerate(zip(call.operands, call.results)):
        if given != result:  # every operand is aliased with its result
            raise RuntimeError(f"XLA did not alias operand {i} with its result: report this bug")
    parts = _parsed(call.attributes["plan"])
    if parts[0]["devices"]:
        check_mapped(parts[0]["devices"])
    addresses, counts = call.results[1:], call.counts[1:]
    if not addresses:
        if communicator.world > 1:
            raise RuntimeError(f"{parts[0]['alone']} was compiled in a world of 1, without averages, but "
                               f"there are {communicator.world} ranks now: compile it again after "
                               "gradwire.jax.init()")
        return
    residuals = iter(addresses[len(parts):])
    with lock:  # serializes concurrent computations on this device
        if call.stream:
            # An earlier call may have failed on its stream, which reports no errors.
            _native.call("gw_comm_check", communicator._handle)
        for part, address, count in zip(parts, addresses, counts):
            residual = next(residuals) if part["keeps"] else None
            _run_part(communicator, part, address, count, residual, call.stream)


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
