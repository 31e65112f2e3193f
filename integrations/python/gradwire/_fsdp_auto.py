"""FSDP2's `gradients="auto"`: measures formats on the run's own gradients, and chooses one for all groups.

As in _auto.py, steps are averaged in FP32 until the choice. Each group's reduce-scatter counts as a whole,
because on the host it blocks backward. On a GPU, where it overlaps, a step gains less than predicted.
"""
from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Set

import torch

from gradwire._auto import OBSERVED, PLAIN, REPETITIONS, Request, choose, ms_between, now, root_errors

if TYPE_CHECKING:
    from gradwire._fsdp_comm import Options, ParamGroup

_log = logging.getLogger("gradwire")


class Sums(NamedTuple):
    """What one rank has measured of one format, summed over the groups."""

    ms: float = 0.0
    weighted: float = 0.0  # squared relative errors of parameters' shards, weighted by elements
    elements: float = 0.0


class FsdpAuto:
    """Measures and chooses for the groups of one model.

    Args:
        request: the formats, FP32 first, and the largest error.
        options_of: returns the options with another format of gradients.
        use: makes all groups use options.
    """

    def __init__(self, request: Request, options_of: "Callable[[str], Options]",
                 use: "Callable[[Options], None]") -> None:
        self.request = request
        self.choice: Optional[Dict[str, Any]] = None
        self._options = {spec: options_of(spec) for spec in self.request.specs}
        self._use = use
        self._seen: Set[Any] = set()  # groups of the present step
        self._begins: List[Any] = []  # by step
        self._measure_at = 1 + OBSERVED
        self._sums: Dict[str, Sums] = {}

    @property
    def measures(self) -> bool:
        """Returns whether the present step is the one that measures."""
        return self.choice is None and len(self._begins) == self._measure_at + 1

    def adopt(self, gradients: str) -> None:
        """Takes the choice of a loaded state, if it is one of the formats."""
        for spec, options in self._options.items():
            if options.gradients == gradients:
                self._use(options)
                self.choice = {"spec": spec, "loaded": True}

    def drop(self) -> None:
        """Reverses adopt()."""
        self._use(self._options[PLAIN])
        self.choice = None

    def called(self, group: "ParamGroup", buffer: torch.Tensor, comm: Any, stream: int) -> None:
        """Counts steps, and chooses at the begin of the step after the measurement. Collective."""
        if self.choice is not None:
            return
        if self._seen and group not in self._seen:
            self._seen.add(group)
            return
        self._seen = {group}
        if len(self._begins) == self._measure_at + 1:
            choice = self._chosen(buffer, comm, stream)
            if choice is None:  # measure in this step
                self._measure_at += 1
                self._sums.clear()
            else:
                self._use(self._options[choice["spec"]])
                self.choice = choice
                _log.info("auto: gradients in %s, predicted %.1f ms per step (fp32: %.1f)", choice["spec"],
                          choice["step_ms"], choice["fp32_step_ms"])
        self._begins.append(now(buffer))

    def measure(self, group: "ParamGroup", exact: torch.Tensor, buffer: torch.Tensor,
                reduce: "Callable[[torch.Tensor, torch.Tensor, Options], None]") -> None:
        """Measures each format on one group's gradients. Collective.

        Args:
            exact: their mean in FP32, this rank's shard.
            buffer: this rank's gradients.
            reduce: (output, buffer, options) reduces a buffer, which it may overwrite.
        """
        for spec, options in self._options.items():
            times, output = [], torch.empty_like(exact)
            for repetition in range(REPETITIONS):
                copied = buffer.clone()
                begin = now(buffer)
                reduce(output, copied, options)
                times.append((begin, now(buffer)))
                if repetition == 0:
                    weighted, elements = group.error_of(exact, output)
            ms = min(ms_between(*pair) for pair in times[1:])  # the first waits for the other ranks
            before = self._sums.get(spec, Sums())
            self._sums[spec] = Sums(before.ms + ms, before.weighted + weighted, before.elements + elements)

    def _chosen(self, buffer: torch.Tensor, comm: Any, stream: int) -> Optional[Dict[str, Any]]:
        begins = self._begins[1:2 + OBSERVED]
        numbers = [statistics.median(ms_between(a, b) for a, b in zip(begins, begins[1:]))]
        for spec in self.request.specs:
            numbers += self._sums[spec]
        mean = torch.tensor(numbers, dtype=torch.float32, device=buffer.device)
        comm.allreduce_(mean, "fp32", "avg", stream, "measurements of auto")
        step_ms, *rest = mean.double().tolist()
        sums = {spec: Sums(*rest[3 * s:3 * s + 3]) for s, spec in enumerate(self.request.specs)}
        errors = root_errors({spec: one.weighted for spec, one in sums.items()}, sums[PLAIN].elements)
        if errors is None:
            return None
        return choose(self.request, step_ms, [0.0], {spec: [one.ms] for spec, one in sums.items()}, errors)
