"""Keeps residuals in the gradients' loss scale when a GradScaler changes it.

The scaler multiplies the loss, and so the gradients, by a scale. update() changes the scale. After a step
with non-finite gradients, which the optimizer skips, update() halves it. The skipped step sent part of the
residuals, but no weight received that part, so it must return to the residuals.
"""
from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from gradwire import _native
from gradwire._state import State, TensorState, pack, unpack

# The kinds of state that grow with the gradients' scale.
_IN_UNITS_OF_GRADIENTS = ("residual", "estimate", "deviation", "velocity")

# Arguments: new scale / old scale, and whether the step was skipped.
Follower = Callable[[float, bool], None]


class _Update:
    """Replaces a scaler's update() and notifies followers. Copies of the scaler have no followers."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.own = vars(scaler).get("update")  # the instance's update(), if it differs from the class's
        self.followers: List[Tuple[Any, Any]] = []  # weak references to (Follower, optimizer)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        before = float(self.scaler.get_scale())
        live = [(weak(), self._skipped(optimizer)) for weak, optimizer in self.followers]
        original = self.own or type(self.scaler).update.__get__(self.scaler)
        result = original(*arguments, **named)
        after = float(self.scaler.get_scale())
        is_set = any(value is not None for value in (*arguments, *named.values()))
        for follower, skipped in live:
            if follower is not None:
                # update() lowers the scale only after a skipped step; PyTorch's examples also rely on this.
                follower(after / before if before > 0 else 1.0,
                         skipped if skipped is not None else after < before and not is_set)
        return result

    def _skipped(self, optimizer: Any) -> Optional[bool]:
        """Returns whether the scaler skipped this optimizer's step; None: unknown."""
        found = getattr(self.scaler, "_found_inf_per_device", None)
        enabled = getattr(self.scaler, "is_enabled", None)  # a disabled GradScaler skips no step
        if (optimizer is None or optimizer() is None or found is None
                or (enabled is not None and not enabled())):
            return None
        # A wrapper, such as accelerate's, passes the wrapped optimizer to the scaler.
        stepped = [optimizer(), getattr(optimizer(), "optimizer", None)]
        return any(float(infinite) != 0 for each in stepped if each is not None
                   for infinite in found(each).values())

    def __reduce__(self) -> Any:
        return _Update, (self.scaler,)


def follow(scaler: Any, optimizer: Any, follower: Follower) -> Callable[[], None]:
    """Calls `follower` after each update() of the scaler.

    Args:
        scaler: a torch.amp.GradScaler, or another object with get_scale() and update().
        optimizer: the optimizer whose skipped steps count. None: a lower scale means that a step was skipped.
        follower: a bound method; only a weak reference is held.

    Returns:
        A function that stops the calls.

    Raises:
        BadArgument: `scaler` has no get_scale() and update().
    """
    if not callable(getattr(scaler, "get_scale", None)) or not callable(getattr(scaler, "update", None)):
        raise _native.BadArgument(f"scaler is a {type(scaler).__name__} without get_scale() and update(): "
                                  "pass the torch.amp.GradScaler that scales the loss")
    if not isinstance(vars(scaler).get("update"), _Update):
        scaler.update = _Update(scaler)
    update = scaler.update
    entry = (weakref.WeakMethod(follower), weakref.ref(optimizer) if optimizer is not None else None)
    update.followers.append(entry)

    def end() -> None:
        update.followers[:] = [other for other in update.followers if other is not entry]
        if not update.followers and vars(scaler).get("update") is update:
            del scaler.update
            if update.own is not None:
                scaler.update = update.own

    return end


class LossScale:
    """The scaler of a DDP hook, and snapshots of the state before a step, restored if the step is skipped."""

    def __init__(self, hook: Any, scaler: Any, optimizer: Any) -> None:
        self._hook = weakref.ref(hook)
        # Keys: the names in a bucket. DDP may rebuild its buckets within a step of several backwards.
        self._before: Dict[Tuple[str, ...], bytearray] = {}
        self._memory: Dict[Tuple[str, ...], bytearray] = {}  # the previous step's snapshots, reused as memory
        self.end = follow(scaler, optimizer, self._changed)

    def keep(self, buckets: List[Any]) -> None:
        """Saves the state of all `buckets` before one is reduced.

        The first call of a step saves the state of all buckets, because nothing is enqueued at that time.
        Saving waits for the communicator's stream.
        """
        for entry in buckets:
            names = entry.layout.names
            if entry.reducer is not None and names not in self._before:
                self._before[names] = entry.reducer.save_state(self._memory.pop(names, None))

    def forget(self) -> None:
        """Drops the snapshots, because the hook's state was replaced or updated."""
        self._before, self._memory = {}, self._before

    def _changed(self, factor: float, skipped: bool) -> None:
        hook = self._hook()
        if hook is not None and hook._failure is None and (factor != 1 or skipped):
            hook._worker.drain()
            before = [unpack(blob) for blob in self._before.values()] if skipped else []
            for entry in hook._buckets.values():
                if entry.reducer is not None:
                    state = unpack(entry.reducer.save_state())
                    entry.reducer.load_state(pack(scaled(undone(state, before), factor)))
            if hook._carried is not None:
                hook._carried = scaled(undone(hook._carried, before), factor)
        self.forget()


def undone(state: State, before: List[State]) -> State:
    """Returns `state` with its tensors restored from the first state in `before` that has them."""
    tensors: Dict[str, TensorState] = {}
    for earlier in before:
        for name, tensor in earlier.tensors.items():
            if name in state.tensors:
                tensors.setdefault(name, tensor)
    steps = min([state.steps, *(earlier.steps for earlier in before)])
    return State(state.identity, steps, {**state.tensors, **tensors})


def scaled(state: State, factor: float) -> State:
    """Returns `state` with all values in units of gradients multiplied by `factor`."""
    def entry_scaled(kind: str, entry: Any) -> Any:
        if kind not in _IN_UNITS_OF_GRADIENTS or not entry.data or factor == 1:
            return entry
        values = torch.frombuffer(bytearray(entry.data), dtype=torch.float32).mul_(factor)
        return entry._replace(data=values.numpy().tobytes())

    return state._replace(tensors={
        name: tensor._replace(entries={kind: entry_scaled(kind, entry)
                                       for kind, entry in tensor.entries.items()})
        for name, tensor in state.tensors.items()})
