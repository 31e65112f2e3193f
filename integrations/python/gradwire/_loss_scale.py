"""What a GradScaler does to residuals, which have the scale of the gradients that they come from.

The scaler multiplies the loss, and so the gradients, by a scale. update() changes it, and halves it after a step with
gradients that were not finite, which the optimizer has skipped. What that step has sent of the residuals is in nobody's
weights, so it must be in the residuals of the next step.
"""
from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, Tuple

import torch

from gradwire import _native
from gradwire._state import State, TensorState, unpack


def follow(scaler: Any, rescale: "Callable[[float, bool], None]") -> Callable[[], None]:
    """Calls `rescale(new scale / old scale, skipped)` after each update() of a scaler that changes its scale or skips a step.

    Args:
        scaler: a torch.amp.GradScaler, or another object with get_scale() and update().
        rescale: a bound method, of which only a weak reference is kept. It is also called with (1.0, False), after every
            update() that changes nothing, to say that the optimizer has taken the step.

    Returns:
        Restores the scaler's own update().
    """
    if not callable(getattr(scaler, "get_scale", None)) or not callable(getattr(scaler, "update", None)):
        raise _native.BadArgument(f"scaler is a {type(scaler).__name__}, which has no get_scale() and update(): pass the "
                                  "torch.amp.GradScaler that scales the loss")
    original = scaler.update
    weak: Any = weakref.WeakMethod(rescale)

    @functools.wraps(original)
    def update(new_scale: Any = None) -> None:
        before = float(scaler.get_scale())
        original(new_scale)
        call = weak()
        if call is not None:
            after = float(scaler.get_scale())
            # update() lowers the scale only where a step was skipped; PyTorch's examples tell it by this, too.
            call(after / before if before > 0 else 1.0, new_scale is None and after < before)

    def restore() -> None:
        nonlocal weak
        weak = lambda: None  # for where another hook has replaced update() since
        if vars(scaler).get("update") is update:
            del scaler.update

    scaler.update = update
    return restore


class LossScale:
    """The scaler of a DDP hook, and the state from before the step, which comes back where the step is skipped."""

    def __init__(self, hook: Any, scaler: Any) -> None:
        self._hook = weakref.ref(hook)
        # By the names in a bucket, in the order of the step. DDP may regroup its buckets within a step of several backwards.
        self._before: Dict[Tuple[str, ...], bytearray] = {}
        self._memory: Dict[Tuple[str, ...], bytearray] = {}  # of the step before, to be used again
        self.end = follow(scaler, self._changed)

    def keep(self, entry: Any) -> None:
        """Before a bucket is reduced."""
        names = entry.layout.names
        if names not in self._before:
            self._before[names] = entry.reducer.save_state(self._memory.pop(names, None))

    def forget(self) -> None:
        """The step's state is no longer what the hook has."""
        self._before, self._memory = {}, self._before

    def _changed(self, factor: float, skipped: bool) -> None:
        hook = self._hook()
        if hook is not None and hook._failure is None and (factor != 1 or skipped):
            hook._worker.drain()
            state = hook._collect(lambda index: True)
            if state is not None:
                hook._replace_state(scaled(self._undone(state) if skipped else state, factor))
        self.forget()

    def _undone(self, state: State) -> State:
        tensors: Dict[str, TensorState] = {}
        steps = state.steps
        for blob in self._before.values():
            before = unpack(blob)
            steps = min(steps, before.steps)
            for name, tensor in before.tensors.items():
                tensors.setdefault(name, tensor)
        return State(state.identity, steps, {**state.tensors, **tensors})


def scaled(state: State, factor: float) -> State:
    """`state` with every residual multiplied by `factor`."""
    def entry_scaled(kind: str, entry: Any) -> Any:
        if kind != "residual" or not entry.data or factor == 1:
            return entry
        values = torch.frombuffer(bytearray(entry.data), dtype=torch.float32).mul_(factor)
        return entry._replace(data=values.numpy().tobytes())

    return state._replace(tensors={
        name: tensor._replace(entries={kind: entry_scaled(kind, entry) for kind, entry in tensor.entries.items()})
        for name, tensor in state.tensors.items()})
