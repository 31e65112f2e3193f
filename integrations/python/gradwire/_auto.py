"""The DDP hook's spec "auto": measures specs on the run's own gradients, and chooses one, or FP32, per bucket.

The hook averages in FP32 until it has chosen:

    1 or 2 steps     DDP makes its buckets, and the hook their reducers
    OBSERVED steps   when each bucket is ready, and the time from step to step
    one step         after the FP32 average of a bucket, each spec averages a copy of the mean, three times:
                     the time, and the error of one encode
    the next         begins with an average of the ranks' numbers, so that all ranks make the same choice

Buckets that backward hides even in FP32 stay in FP32: their tensors are in the chosen spec's dense=.

A spec's predicted step is the observed one, less what FP32's communication adds after the last bucket is
ready, plus what the spec's communication would add. Buckets are averaged one after another, each when it is
ready.
"""
from __future__ import annotations

import logging
import math
import re
import statistics
import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from gradwire import _native
from gradwire._buckets import Bucket, addresses_of
from gradwire._reducer import Reducer
from gradwire._spec import method_of, patterns, split, with_dense

if TYPE_CHECKING:
    from gradwire._hook_buckets import HookBuckets

GRAMMAR = "auto[:error=E][,allow=SPEC+SPEC...]"
PLAIN = "fp32"
_CANDIDATES = ("bf16", "int8", "int4", "powersgd:rank=4", "powersgd:rank=1")
OBSERVED = 5
REPETITIONS = 3
_TIE = 1.05  # steps within this factor are a tie, as in train --compression auto: the smallest error wins
_SAFETY = 0.4  # a bucket stays in FP32 if backward hides it even when shortened by this factor
_PIECE = 1 << 22  # elements that are compared at a time
_NAME = re.compile(r"(?!(auto|off)$)[^,+*?\[\]\\]+\*?")  # a name that dense= takes literally, or a prefix
_CHECKED = 20  # steps after the choice whose median is compared with the prediction

_log = logging.getLogger("gradwire")


class Request(NamedTuple):
    """A parsed "auto...": the largest relative L2 error of one encode, and the specs, FP32 first."""

    error: float
    specs: Tuple[str, ...]


def is_request(spec: str) -> bool:
    return method_of(spec) == "auto"


def parse(text: str) -> Request:
    """Parses a spec of GRAMMAR. Specs in allow= are not checked beyond the options that auto cannot use.

    Raises:
        BadArgument: the text is invalid.
    """
    def refuse(why: str) -> _native.BadArgument:
        return _native.BadArgument(f"compression spec {text!r}: {why}; write {GRAMMAR}")

    options, comma_allow, allowed = text[len("auto"):].lstrip(":").partition("allow=")
    error, given = 0.1, set()
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key != "error":
            raise refuse(f"unknown option {option!r}")
        if key in given:
            raise refuse(f"{key!r} is given twice")
        given.add(key)
        try:
            error = float(value)
        except ValueError:
            error = -1
        if not 0 <= error <= 1e6:
            raise refuse(f"error={value!r} is not a number from 0 to 1e6")
    specs = allowed.split("+") if comma_allow else list(_CANDIDATES)
    for spec in specs:
        method, own = split(spec)
        if not method:
            raise refuse("allow= has an empty spec")
        unsuited = [o for o in own if o.partition("=")[0] in ("start", "ramp", "momentum")]
        if unsuited or method in ("auto", "dion"):
            raise refuse(f"auto cannot choose {spec}" + (f", because of {unsuited[0]}" if unsuited else ""))
        if specs.count(spec) > 1:
            raise refuse(f"{spec} is allowed twice")
    return Request(error, (PLAIN, *(spec for spec in specs if spec != PLAIN)))


def exposed_ms(ready: Sequence[float], durations: Sequence[float]) -> float:
    """Returns the time from the last bucket's gradients to the end of its average.

    Args:
        ready: when each bucket's gradients are ready, in the buckets' order.
        durations: the time that each bucket's average takes.
    """
    end = 0.0
    for begin, duration in zip(ready, durations):
        end = max(end, begin) + duration
    return max(0.0, end - ready[-1])


def hidden_buckets(ready: Sequence[float], durations: Sequence[float], plain: Sequence[float]) -> int:
    """Returns how many of the first buckets may take FP32's time without a longer step.

    Args:
        ready: when each bucket is ready.
        durations: the time of each bucket's average with the chosen spec.
        plain: the same in FP32.
    """
    sooner = [_SAFETY * each for each in ready]
    limit, count = exposed_ms(sooner, durations), 0
    for more in range(1, len(ready)):
        if exposed_ms(sooner, [*plain[:more], *durations[more:]]) > limit:
            break
        count = more
    return count


def choose(request: Request, step_ms: float, ready: Sequence[float],
           durations: Mapping[str, Sequence[float]], errors: Mapping[str, float]) -> Dict[str, Any]:
    """Returns the choice, as in Hook.choice.

    Args:
        request: the specs, FP32 first, and the largest error.
        step_ms: a step in FP32.
        ready: when each bucket is ready.
        durations: by spec, the time of each bucket's average.
        errors: by spec, the relative L2 error of one encode.
    """
    plain = exposed_ms(ready, durations[PLAIN])
    table: List[Dict[str, Any]] = []
    for spec in request.specs:
        exposed = exposed_ms(ready, durations[spec])
        table.append({"spec": spec, "error": errors[spec], "communicate_ms": sum(durations[spec]),
                      "exposed_ms": exposed, "step_ms": max(0.0, step_ms - plain) + exposed})
    within = [row for row in table if row["spec"] == PLAIN or row["error"] <= request.error]
    shortest = min(row["step_ms"] for row in within)
    best = min((row for row in within if row["step_ms"] <= _TIE * shortest), key=lambda row: row["error"])
    return {**best, "fp32_step_ms": table[0]["step_ms"], "fp32_buckets": 0, "candidates": table,
            "measured_step_ms": None}


def now(buffer: torch.Tensor) -> Any:
    """Returns this time on the host, or an event on the current stream of the buffer's device."""
    if not buffer.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(1000 * (end - begin))
    end.synchronize()
    return float(begin.elapsed_time(end))


class _Trial(NamedTuple):
    """What one rank has measured on one bucket, by spec."""

    durations: List[float]
    errors: List[float]  # squared relative errors of the bucket's tensors, weighted by elements
    elements: int  # of the tensors that are not all zero


def relative_error(counts: Sequence[int], exact: torch.Tensor, mean: torch.Tensor) -> Tuple[float, int]:
    """Returns the sum of tensors' squared relative errors, weighted by elements, and the elements.

    Args:
        counts: the elements of each tensor, which are one after another in `exact` and `mean`.
    """
    weighted, elements, at = 0.0, 0, 0
    for count in counts:
        norm = change = 0.0
        for begin in range(at, at + count, _PIECE):
            end = min(begin + _PIECE, at + count)
            values = exact[begin:end].double()
            difference = mean[begin:end].double() - values
            norm += float(values.dot(values))
            change += float(difference.dot(difference))
        if norm != 0:
            weighted += count * change / norm
            elements += count
        at += count
    return weighted, elements


def root_errors(weighted: Mapping[str, float], elements: float) -> Optional[Dict[str, float]]:
    """Returns relative L2 errors from sums of relative_error(), by spec.

    NaN for a spec that makes finite gradients NaN, which choose() leaves out. None if FP32's is NaN, because a
    gradient was, or if all gradients were zero.
    """
    if elements == 0 or not math.isfinite(weighted[PLAIN]):
        return None
    return {spec: math.sqrt(one / elements) if math.isfinite(one) else math.nan
            for spec, one in weighted.items()}


class Auto:
    """Measures and chooses for a hook. Backward's thread calls called() and restart(), jobs the rest."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.request = parse(text)
        self.choice: Optional[Dict[str, Any]] = None
        self._step, self._last = -1, 1 << 30  # the step and the bucket of the last call
        self._observe_from = 1
        self._measure_at = 1 + OBSERVED
        self._ready: Dict[int, Dict[int, Any]] = {}  # by step and bucket
        self._trials: Dict[int, _Trial] = {}  # by bucket
        self._after: List[Any] = []  # begins of the steps after the choice

    @property
    def undecided(self) -> bool:
        return self.choice is None

    def adopt(self, spec: str) -> None:
        """Takes the choice of a loaded state: one of the request's specs, perhaps with more dense tensors."""
        self.choice = {"spec": spec, "loaded": True}

    def restart(self) -> None:
        """Observes again, because DDP has made other buckets."""
        self._ready.clear()
        self._trials.clear()
        self._observe_from = self._step + 2  # the next step makes reducers
        self._measure_at = self._observe_from + OBSERVED

    def called(self, entry: Bucket, buffer: torch.Tensor) -> None:
        """Notes the time at which a bucket is ready."""
        entry.opens_step = entry.index <= self._last  # not always bucket 0, which may be sparse
        self._step += entry.opens_step
        self._last = entry.index
        entry.step = self._step
        if self.undecided:
            if self._observe_from <= self._step <= self._measure_at:
                self._ready.setdefault(self._step, {})[entry.index] = now(buffer)
        elif entry.opens_step:
            self._check(buffer)

    def _check(self, buffer: torch.Tensor) -> None:
        """Measures the first steps after the choice."""
        choice = self.choice
        if choice is None or "step_ms" not in choice or choice["measured_step_ms"] is not None:
            return
        self._after.append(now(buffer))
        if len(self._after) < _CHECKED + 1:
            return
        measured = statistics.median(ms_between(a, b) for a, b in zip(self._after, self._after[1:]))
        choice["measured_step_ms"] = measured
        self._after.clear()
        log = _log.warning if measured > 1.1 * max(choice["step_ms"], choice["fp32_step_ms"]) else _log.info
        log("auto: %s takes %.1f ms per step; predicted were %.1f, and %.1f for fp32", choice["spec"],
            measured, choice["step_ms"], choice["fp32_step_ms"])

    # ---- In the hook's jobs --------------------------------------------------------------------------------

    def before(self, hook: "HookBuckets", entry: Bucket, buffer: torch.Tensor, stream: int) -> None:
        """Chooses if all is measured. Call it before each average of a bucket."""
        if not self.undecided or not entry.opens_step or entry.step != self._measure_at + 1:
            return
        comm = hook._communicator(buffer)
        if comm.world == 1:
            return
        choice = self._chosen(hook, comm, buffer, stream)
        if choice is None:  # measure in this step
            self._measure_at += 1
            self._trials.clear()
            return
        hook._use(choice["spec"])
        self.choice = choice
        _log.info("auto: %s, %d of %d buckets in fp32, predicted %.1f ms per step (fp32: %.1f)",
                  choice["spec"], choice["fp32_buckets"], len(hook._buckets), choice["step_ms"],
                  choice["fp32_step_ms"])

    def after(self, hook: "HookBuckets", entry: Bucket, buffer: torch.Tensor, stream: int) -> None:
        """Measures if it is time. Call it when `buffer` has the bucket's mean."""
        if not self.undecided or entry.step != self._measure_at or hook._communicator(buffer).world == 1:
            return
        exact = buffer if entry.staging is None else entry.staging
        mean = torch.empty_like(exact)
        addresses = addresses_of(entry.layout, buffer, mean)
        durations, errors, elements = [], [], 0
        counts = [rows * cols for rows, cols in entry.layout.shapes]
        for spec in self.request.specs:
            reducer = hook._new_reducer(entry, buffer, spec)
            times = []
            for repetition in range(REPETITIONS):
                mean.copy_(exact)
                begin = now(buffer)
                reducer.allreduce_at(addresses, stream)
                times.append((begin, now(buffer)))
                if repetition == 0:
                    error, elements = relative_error(counts, exact, mean)
                    errors.append(error)
            # The first waits for the other ranks.
            durations.append(min(ms_between(*pair) for pair in times[1:]))
            reducer.close()
        self._trials[entry.index] = _Trial(durations, errors, elements)

    def _chosen(self, hook: "HookBuckets", comm: Any, buffer: torch.Tensor,
                stream: int) -> Optional[Dict[str, Any]]:
        """Returns the choice from all ranks' numbers; None if a gradient was not finite, or all were zero.

        Collective.
        """
        order = sorted(self._trials)
        trials = [self._trials[index] for index in order]
        steps = [self._ready[self._observe_from + s] for s in range(OBSERVED + 1)]
        begins = [step[order[0]] for step in steps]
        numbers = [statistics.median(ms_between(a, b) for a, b in zip(begins, begins[1:]))]
        for index in order:
            numbers.append(statistics.median(ms_between(step[order[0]], step[index]) for step in steps))
        for trial in trials:
            numbers += [*trial.durations, *trial.errors, trial.elements]
        mean = torch.tensor(numbers, dtype=torch.float32, device=buffer.device)
        reducer = Reducer(comm, PLAIN, [("measurements of auto", len(numbers), 1)])
        reducer.allreduce([mean], stream)
        found = mean.double().tolist()
        reducer.close()
        return self._from(found, [hook._buckets[index].layout.names for index in order])

    def _from(self, numbers: List[float], names: Sequence[Sequence[str]]) -> Optional[Dict[str, Any]]:
        specs, buckets = self.request.specs, len(names)
        step_ms, ready = numbers[0], numbers[1:1 + buckets]
        size = 2 * len(specs) + 1
        trials = [numbers[1 + buckets + b * size:][:size] for b in range(buckets)]
        elements = sum(trial[-1] for trial in trials)
        durations = {spec: [trial[s] for trial in trials] for s, spec in enumerate(specs)}
        weighted = {spec: [trial[len(specs) + s] for trial in trials] for s, spec in enumerate(specs)}
        errors = root_errors({spec: sum(each) for spec, each in weighted.items()}, elements)
        if errors is None:
            return None
        choice = choose(self.request, step_ms, ready, durations, errors)
        spec = choice["spec"]
        count = hidden_buckets(ready, durations[spec], durations[PLAIN])
        dense = patterns([name for bucket in names for name in bucket],
                         [name for bucket in names[:count] for name in bucket])
        if spec == PLAIN or not dense or "dense=" in spec:
            return choice
        if not all(map(_NAME.fullmatch, dense)):
            _log.info("auto: no buckets in fp32, because of a parameter's name among %s", dense)
            return choice

        def mixed(of: Mapping[str, Sequence[float]]) -> List[float]:
            return [*of[PLAIN][:count], *of[spec][count:]]

        exposed = exposed_ms(ready, mixed(durations))
        return {**choice, "spec": with_dense(spec, dense), "fp32_buckets": count,
                "error": math.sqrt(sum(mixed(weighted)) / elements),
                "communicate_ms": sum(mixed(durations)), "exposed_ms": exposed,
                "step_ms": choice["step_ms"] - choice["exposed_ms"] + exposed}
