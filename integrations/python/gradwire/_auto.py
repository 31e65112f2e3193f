"""The spec "auto" of the DDP hook and FSDP2: averages in FP32 until gw_choose() has compared the specs.

    1 or 2 steps     DDP makes its buckets, and the hook their reducers
    OBSERVED steps   a step's time without communication, and what of backward hides communication
    one step         the library tries each spec on this step's gradients, and chooses
    the next         uses the choice
"""
from __future__ import annotations

import logging
import statistics
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from gradwire import _native
from gradwire._buckets import Bucket, spec_for
from gradwire._communicator import Communicator
from gradwire._reducer import choose
from gradwire._spec import info_of, method_of, with_options

GRAMMAR = "auto[:error=E][,allow=SPEC+SPEC...]"
PLAIN = "fp32"
_CANDIDATES = ("bf16", "int8", "int4", "powersgd:rank=4", "powersgd:rank=1")
OBSERVED = 5
_CHECKED = 20  # steps after the choice whose median is compared with the prediction

_log = logging.getLogger("gradwire")


class Request(NamedTuple):
    """A parsed "auto...": the largest relative L2 error of one encode, and the specs, FP32 first."""

    error: float
    specs: Tuple[str, ...]


def is_request(spec: str) -> bool:
    return method_of(spec) == "auto"


def parse(text: str, candidates: Sequence[str] = _CANDIDATES) -> Request:
    """Parses a spec of GRAMMAR; without allow= of `candidates`.

    Raises:
        BadArgument: the text is invalid, or the library cannot choose one of the specs.
    """
    options, comma_allow, allowed = text[len("auto"):].lstrip(":").partition("allow=")
    error = 0.1
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        try:
            error = float(value) if key == "error" else -1
        except ValueError:
            error = -1
        if not 0 <= error <= 1e6:
            raise _native.BadArgument(f"compression spec {text!r}: {option!r} is not error=E with E from 0 "
                                      f"to 1e6; write {GRAMMAR}")
    specs = [PLAIN, *(spec for spec in (allowed.split("+") if comma_allow else candidates) if spec != PLAIN)]
    with Communicator() as alone:
        choose(alone, specs, {"probe": torch.zeros(1, dtype=torch.float32, device="cpu")})
    return Request(error, tuple(specs))


def now(buffer: torch.Tensor) -> Any:
    """Returns this time on the host, or an event on the current stream of the buffer's device."""
    if not buffer.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(1000 * (end - begin))
    end.synchronize()
    return float(begin.elapsed_time(end))


class Auto:
    """Observes steps and asks the library to choose.

    Attributes:
        choice: see Hook.choice.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.choice: Optional[Dict[str, Any]] = None
        self._next: Optional[Dict[str, Any]] = None  # the choice from the next step on
        self._step = -1
        self._observe_from, self._measure_at = 1, 1 + OBSERVED
        self._begins: Dict[int, Any] = {}  # by step: when the first gradients were ready
        self._exposed: Dict[int, List[Tuple[Any, Any]]] = {}  # by step: communication outside of backward

    def restart(self) -> None:
        """Observes again, because DDP has made other buckets."""
        self._observe_from = self._step + 2  # the next step makes reducers
        self._measure_at = self._observe_from + OBSERVED

    def adopt(self, spec: str) -> None:
        """Takes the choice of a loaded state."""
        self.choice = {"spec": spec, "loaded": True}

    def _open_step(self, buffer: torch.Tensor) -> None:
        self._step += 1
        if self.choice is None:
            self._begins[self._step] = now(buffer)

    def _settled(self) -> Optional[str]:
        """Returns the chosen spec in the first step that uses it."""
        if self._next is None:
            return None
        self.choice, self._next = self._next, None
        self._begins.clear()
        self._exposed.clear()
        _log.info("auto: %s, predicted %.1f ms per step (fp32: %.1f)", self.choice["spec"],
                  self.choice["step_ms"], self.choice["fp32_step_ms"])
        return str(self.choice["spec"])

    def _measures(self, step: int) -> bool:
        return self.choice is None and self._next is None and step == self._measure_at

    def _choose(self, comm: Communicator, specs: Sequence[str], gradients: Mapping[str, Any],
                backward_ms: float = 0, share: float = 1, **options: Any) -> None:
        """Chooses from the next step on. Tries again in the next step if a gradient is zero or not finite.

        Args:
            specs: the request's, as the library's reducers get them.
            backward_ms: what of a step hides communication.
            share: the part of a step's gradients that `gradients` are.
        """
        steps = range(self._observe_from, self._observe_from + OBSERVED)
        compute_ms = max(0.0, share * statistics.median(
            _ms_between(self._begins[s], self._begins[s + 1])
            - sum(_ms_between(*pair) for pair in self._exposed.get(s, [])) for s in steps))
        try:
            found = choose(comm, specs, gradients, error=self.request.error or 1e-300, compute_ms=compute_ms,
                           backward_ms=min(backward_ms, compute_ms), **options)
        except _native.BadArgument as error:
            if "call gw_choose again" not in str(error):
                raise
            self._measure_at += 1
            return
        trials = [found.trials[spec] for spec in specs]
        table = [{"spec": spec, "error": trial.error, "communicate_ms": trial.communicate_ms / share,
                  "exposed_ms": trial.exposed_ms / share, "step_ms": (compute_ms + trial.exposed_ms) / share}
                 for spec, trial in zip(self.request.specs, trials)]
        self._next = {**table[list(specs).index(found.spec)], "fp32_step_ms": table[0]["step_ms"],
                      "candidates": table, "measured_step_ms": None}


class BucketAuto(Auto):
    """Chooses for a DDP hook. Backward's thread calls called() and restart(), jobs the rest."""

    def __init__(self, text: str) -> None:
        super().__init__(parse(text))
        self.text = text
        self._last = 1 << 30  # the bucket of the last call
        self._ready: Dict[int, Any] = {}  # by step: when the last bucket was ready
        self._kept: List[Tuple[Bucket, torch.Tensor]] = []  # the measured step's buckets, and their means
        self._after: List[Any] = []  # begins of the steps after the choice

    def called(self, entry: Bucket, buffer: torch.Tensor) -> None:
        """Notes the time at which a bucket is ready."""
        entry.opens_step = entry.index <= self._last  # not always bucket 0, which may be sparse
        self._last = entry.index
        if entry.opens_step:
            self._open_step(buffer)
            self._check(buffer)
        entry.step = self._step
        if self.choice is None:
            self._ready[self._step] = now(buffer)

    def _check(self, buffer: torch.Tensor) -> None:
        """Measures the first steps after the choice."""
        choice = self.choice
        if choice is None or "step_ms" not in choice or choice["measured_step_ms"] is not None:
            return
        self._after.append(now(buffer))
        if len(self._after) < _CHECKED + 1:
            return
        measured = statistics.median(_ms_between(a, b) for a, b in zip(self._after, self._after[1:]))
        choice["measured_step_ms"] = measured
        self._after.clear()
        log = _log.warning if measured > 1.1 * max(choice["step_ms"], choice["fp32_step_ms"]) else _log.info
        log("auto: %s takes %.1f ms per step; predicted were %.1f, and %.1f for fp32", choice["spec"],
            measured, choice["step_ms"], choice["fp32_step_ms"])

    def before(self, entry: Bucket) -> Optional[str]:
        """Returns the chosen spec before the first average that uses it."""
        return self._settled() if entry.opens_step else None

    def after(self, comm: Communicator, entry: Bucket, buffer: torch.Tensor, is_last: bool, seed: int,
              stream: int) -> None:
        """Observes, or chooses after the measured step's last bucket. `buffer` has the bucket's mean."""
        if self.choice is not None or comm.world == 1:
            return
        if is_last:
            self._exposed[entry.step] = [(self._ready[entry.step], now(buffer))]
        if not self._measures(entry.step):
            return
        if entry.opens_step:
            self._kept.clear()
        self._kept.append((entry, buffer if entry.staging is None else entry.staging))
        if not is_last:
            return
        gradients: Dict[str, torch.Tensor] = {}
        for bucket, mean in self._kept:
            counts = [rows * cols for rows, cols in bucket.layout.shapes]
            for name, shape, part in zip(bucket.layout.names, bucket.layout.shapes, mean.split(counts)):
                gradients[name] = part.view(shape)
        sizes = [mean.numel() for _, mean in self._kept]
        self._kept.clear()
        # The first bucket is ready at the begin of what is observed.
        steps = range(self._observe_from, self._observe_from + OBSERVED)
        span = statistics.median(_ms_between(self._begins[s], self._ready[s]) for s in steps)
        backward_ms = span / (1 - sizes[0] / sum(sizes)) if len(sizes) > 1 else 0.0
        self._choose(comm, [spec_for(spec, buffer.dtype) for spec in self.request.specs], gradients,
                     backward_ms, bucket_bytes=4 * max(sizes), seed=seed, stream=stream)


class GroupAuto(Auto):
    """Chooses one format for the parameter groups of FSDP2.

    The library compares allreduces of one group's gradients, of the group of median size, with that group's
    share of a step. A reduce-scatter sends half as much, so a step counts twice. On the host the exchange
    blocks backward. On a GPU, where it overlaps, a step gains less than predicted.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._sizes: Dict[Any, int] = {}  # of the groups' gradients
        self._seen: Set[Any] = set()  # groups of the present step

    def called(self, group: Any, buffer: torch.Tensor) -> Optional[str]:
        """Counts steps. Returns the chosen spec before the first reduce-scatter that uses it."""
        if self.choice is not None:
            return None
        opens = not self._seen or group in self._seen
        self._seen = {group} if opens else self._seen | {group}
        self._sizes[group] = buffer.numel()
        if opens:
            self._open_step(buffer)
        return self._settled() if opens else None

    def measures(self, group: Any) -> bool:
        by_size = sorted(self._sizes, key=lambda each: self._sizes[each])
        return self._measures(self._step) and group is by_size[len(by_size) // 2]

    def reduced(self, begin: Any, buffer: torch.Tensor) -> None:
        """Notes the time of a reduce-scatter in FP32."""
        if self.choice is None:
            self._exposed.setdefault(self._step, []).append((begin, now(buffer)))

    def measure(self, comm: Communicator, group: Any, gradients: Mapping[str, torch.Tensor],
                stream: int) -> None:
        """Chooses, from this rank's gradients of a group. Collective."""
        share = 2 * self._sizes[group] / sum(self._sizes.values())
        # A shard of a parameter is not a vector that stays dense.
        specs = [spec if info_of(spec).exact else with_options(spec, "dense=off")
                 for spec in self.request.specs]
        self._choose(comm, specs, gradients, share=share, stream=stream)
