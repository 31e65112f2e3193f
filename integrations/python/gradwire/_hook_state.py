"""The hook's state for torch.save() and torch.distributed.checkpoint, and for another world size."""
from __future__ import annotations

import ctypes
import logging
import re
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._buckets import Layout, is_number
from gradwire._memory import address_of
from gradwire._mesh import Place as MeshPlace, described, states_here
from gradwire._process_group import global_rank, normal_tensors
from gradwire._reducer import Entry, State, TensorState, pack, unpack
from gradwire._spec import split

# ---- Residuals in the gradients' loss scale ----------------------------------------------------------------
# The scaler multiplies the loss, and so the gradients, by a scale. update() changes the scale. After a
# step with non-finite gradients, which the optimizer skips, update() halves it. The skipped step sent part of
# the residuals, but no weight received that part, so it must return to the residuals.

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

# ---- State dictionaries ------------------------------------------------------------------------------------

StateDict = Dict[str, Any]

_log = logging.getLogger("gradwire")

# Keys: the types' names in safetensors files.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
# Finds rank and world size in a state's identity, or at the end of a key.
_RANK = re.compile(r"(?:(?<=; )|(?<=\.)|^)rank (\d+) of (\d+)(?=;|$)")


class Place(NamedTuple):
    """A rank and its world size."""

    rank: int
    world: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def _place_in(text: str) -> Optional[Place]:
    found = _RANK.search(text)
    return Place(int(found[1]), int(found[2])) if found else None


def saved_as(spec: str) -> List[str]:
    """Returns `spec` without residual=: states hold residuals in float32 for every residual type."""
    method, options = split(spec)
    return [method, *(option for option in options if not option.startswith("residual="))]


def to_dict(state: State, spec: str, place: Optional[Place]) -> StateDict:
    """Converts a state for Hook.state_dict().

    Args:
        place: the saving rank. `state` may be from another world size, loaded but not yet in a reducer.
    """
    identity = _RANK.sub(str(place), state.identity) if place is not None else state.identity
    return {"version": 2, "identity": identity, "steps": state.steps, "spec": spec,
            "tensors": {name: {"rows": t.rows, "cols": t.cols,
                               "state": {kind: tensor_of(entry) for kind, entry in t.entries.items()}}
                        for name, t in state.tensors.items()}}


def from_dict(state: StateDict) -> Optional[State]:
    """Reverses to_dict(). Returns None if no parameter has a state yet."""
    tensors = {}
    for name, t in state["tensors"].items():
        entries = {kind: entry_of(tensor) for kind, tensor in t["state"].items() if tensor.numel() > 0}
        tensors[name] = TensorState(t["rows"], t["cols"], entries)
    return State(state["identity"], state["steps"], tensors) if tensors else None


def tensor_of(entry: Entry) -> torch.Tensor:
    dtype = _DTYPES[entry.dtype]
    if not entry.data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(entry.data), dtype=dtype)


def entry_of(tensor: torch.Tensor) -> Entry:
    data = tensor.detach().to("cpu").contiguous()
    name = next(name for name, dtype in _DTYPES.items() if dtype == data.dtype)
    return Entry(name, ctypes.string_at(address_of(data), data.numel() * data.element_size()))


def check_names(state: StateDict, names: List[str]) -> None:
    """Raises BadArgument if a state has parameters, but none of these names."""
    saved = list(state["tensors"])
    if not saved or set(saved) & set(names):
        return
    if is_number(saved[0]):
        raise _native.BadArgument(f"the state has numbers in place of parameter names, such as {saved[0]!r}: "
                                  "load it into a Hook() without model=, not into the hook of compress()")
    raise _native.BadArgument(f"the state is of another model: it has {saved[0]!r}, but the hook's model has "
                              f"{names[0]!r}")


def add_missing(carried: State, layout: Layout, fresh: State, has_names: bool) -> List[str]:
    """Adds a new reducer's state to `carried` for those of a bucket's parameters that it lacks.

    Args:
        carried: the loaded state, which is changed.
        layout: the bucket.
        fresh: the state of a new reducer for the bucket.
        has_names: the parameters have the model's names.

    Returns:
        The names of the parameters that were missing.

    Raises:
        BadArgument: a parameter has another shape in `carried`, or unnamed parameters are missing.
    """
    missing = [name for name in layout.names if name not in carried.tensors]
    for name, (rows, cols) in zip(layout.names, layout.shapes):
        found = carried.tensors.get(name)
        if found is not None and (found.rows, found.cols) != (rows, cols):
            raise _native.BadArgument(f"the loaded state is of another model: {name!r} is {found.rows} x "
                                      f"{found.cols} in the state and {rows} x {cols} in the model")
    if missing and not has_names:
        raise _native.BadArgument(
            f"the loaded state lacks {len(missing)} parameters, such as {missing[0]!r}: it is of another "
            "model, or of other parameters of this model. Only names can tell: save and load with compress() "
            "or Hook(model=...)")
    carried.tensors.update((name, fresh.tensors[name]) for name in missing)
    return missing


def taken(carried: State, layout: Layout, fresh: State) -> State:
    """Removes a bucket's tensors from `carried`, and returns them as a state for the bucket's reducer.

    Args:
        carried: a state that has all tensors of the bucket, and is changed.
        layout: the bucket.
        fresh: the state of a new reducer for the bucket.
    """
    # The identity is "spec ...; rank ...". The hook has compared its spec. A reducer's spec depends on the
    # gradients' type.
    spec, separator, others = fresh.identity.partition("; ")
    identity = spec + separator + (carried.identity.partition("; ")[2] or others)
    tensors = {name: carried.tensors.pop(name) for name in layout.names}
    # A state of a world of 1 has no entries: that world has no residuals or factors.
    return State(identity, carried.steps, {
        name: tensor._replace(entries=tensor.entries or fresh.tensors[name].entries)
        for name, tensor in tensors.items()})


# ---- All ranks' states -------------------------------------------------------------------------------------

_PATIENCE_S = 10.0  # wait before a warning names the missing ranks


def gathered(state: StateDict, process_group: Any, key: str, timeout_s: float) -> StateDict:
    """Gathers the ranks' states on rank 0 of the group. Collective.

    Args:
        state: this rank's state.
        process_group: the group.
        key: a text that identifies the group: the same on its ranks, and unique.
        timeout_s: the longest wait for a rank.

    Returns:
        `state`; on rank 0 with the other ranks' states as "others".

    Raises:
        CommFailed: a rank did not call gathered() within timeout_s.
    """
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    _wait_for_all(f"gradwire/state/{key}", rank, world, timeout_s)
    states: List[Any] = [None] * world
    with normal_tensors():
        dist.gather_object(state, states if rank == 0 else None, dst=global_rank(process_group, 0),
                           group=process_group)
    return {**state, "others": states[1:]} if rank == 0 else state


def _wait_for_all(key: str, rank: int, world: int, timeout_s: float) -> None:
    """Blocks until all ranks call it. Uses the store: errors name ranks, and the group stays usable."""
    store = dist.distributed_c10d._get_default_store()
    mine = store.add(f"{key}/{rank}", 1)
    waited, warned, pause = 0.0, False, 0.001
    missing = [r for r in range(world) if r != rank]
    while True:
        missing = [r for r in missing if store.add(f"{key}/{r}", 0) < mine]
        if not missing:
            return
        text = (f"hook.state_dict() has waited {waited:.0f} s for rank {', '.join(map(str, missing))}: call "
                "it on every rank and save rank 0's result, or save hook.state_dict(gather=False) on every "
                "rank")
        if waited > timeout_s:
            store.add(f"{key}/{rank}", -1)
            raise _native.CommFailed(text)
        if waited > _PATIENCE_S and not warned:
            _log.warning("%s", text)
            warned = True
        begin = time.monotonic()
        time.sleep(pause)
        # During a much longer pause this process was stopped: do not count that time.
        waited += min(time.monotonic() - begin, pause + 0.4)
        pause = min(2 * pause, 0.1)


# ---- Another number of ranks -------------------------------------------------------------------------------


def ranks_for(place: Place, saved_world: int) -> List[int]:
    """Returns the ranks of the saved run whose states `place` needs.

    For an equal world size, returns the same rank. Otherwise returns the ranks whose residuals `place` takes
    over. If there are none, returns one rank, for the state that is the same on all ranks.
    """
    if saved_world == place.world:
        return [place.rank]
    return list(range(place.rank, saved_world, place.world)) or [place.rank % saved_world]


def for_rank(states: Sequence[StateDict], spec: str, place: Optional[Place], mesh: MeshPlace) -> StateDict:
    """Returns the state for `place`: the rank's saved state, or its share of another world size's states.

    Args:
        states: states that ranks saved.
        spec: the hook's spec.
        place: None if there is no process group yet. `states` must then be this rank's state alone.
        mesh: the rank's place on the mesh's other dimensions.

    Raises:
        BadArgument: a state is of another version, spec or mesh, a state that is needed is missing, or
            several are of one rank.
    """
    for state in states:
        if state.get("version") != 2:
            raise _native.BadArgument(f"the state has version {state.get('version')}; this package reads 2")
        if saved_as(state["spec"]) != saved_as(spec):
            raise _native.BadArgument(f"the state is for spec {state['spec']!r}, but the hook has {spec!r}")
        if state["steps"] > 0 and not state["tensors"]:
            raise _native.BadArgument("the state has no tensors. torch.distributed.checkpoint drops them "
                                      "from hook.state_dict(), which differs between ranks: save "
                                      "hook.checkpoint()")
    placed = [(p, s) for p, s in ((_place_in(s["identity"]), s) for s in states) if p is not None]
    # Before the first step, or backward() compares the states later.
    if len(states) == 1 and (place is None or not placed):
        return states[0]
    if place is None:
        raise _native.BadArgument(f"cannot load states of {len(states)} ranks without a process group: call "
                                  "torch.distributed.init_process_group() first")
    if not placed:
        return states[0]
    here = states_here([s for _, s in placed], [{"rank": p} for p, _ in placed], mesh)
    by_rank = {p.rank: s for p, s in placed if any(s is one for one in here)}
    world = placed[0][0].world
    wanted = ranks_for(place, world)
    missing = [Place(r, world) for r in wanted if r not in by_rank]
    if missing:
        raise _native.BadArgument(
            f"{place} needs the state of {missing[0]}, but got the states of ranks "
            f"{', '.join(map(str, sorted(by_rank)))}: "
            + "call hook.state_dict() on every rank and save rank 0's result, "
            + ("load each rank's own state" if place.world == world
               else f"pass a list of all {world} states")
            + ", or use hook.checkpoint() with torch.distributed.checkpoint")
    if place.world == world:
        return by_rank[place.rank]
    return _merged([by_rank[r] for r in wanted], with_residuals=place.rank < world)


def _merged(states: List[StateDict], with_residuals: bool) -> StateDict:
    tensors: Dict[str, Dict[str, Any]] = {}
    for name, first in states[0]["tensors"].items():
        kept = dict(first["state"])
        residuals = [r for s in states for r in [s["tensors"][name]["state"].get("residual")]
                     if r is not None and r.numel() > 0]
        kept.pop("residual", None)
        if with_residuals and residuals:
            kept["residual"] = torch.stack([r.float() for r in residuals]).sum(0)
        tensors[name] = {"rows": first["rows"], "cols": first["cols"], "state": kept}
    return {"version": 2, "identity": states[0]["identity"], "steps": states[0]["steps"],
            "spec": states[0]["spec"], "tensors": tensors}


# ---- torch.distributed.checkpoint --------------------------------------------------------------------------


class RankState:
    """The state that one rank saved.

    This is not a dictionary, because torch.distributed.checkpoint flattens dictionaries, and could restore a
    dictionary only into a hook that already has the same tensors.
    """

    def __init__(self, state: Optional[StateDict] = None) -> None:
        self.state = state


class Checkpoint:
    """A hook as torch.distributed.checkpoint's Stateful: see Hook.checkpoint()."""

    def __init__(self, hook: Any, load_from: Any = None) -> None:
        self._hook, self._load_from = hook, load_from

    def state_dict(self) -> Dict[str, RankState]:
        """Returns {"rank R of N": that rank's state}. For loading, the keys select the states to read.

        With tensor parallelism, for example, the key is "rank R of N; tp T of M".
        """
        place = self._hook._place()
        if place is None:
            raise _native.BadArgument("hook.checkpoint() needs torch.distributed.init_process_group() first")
        if self._load_from is None:
            return {f"{place}{self._others()}": RankState(self._hook.state_dict(gather=False))}
        world = self._saved_world(place)
        return {f"{Place(rank, world)}{self._others()}": RankState() for rank in ranks_for(place, world)}

    def _others(self) -> str:
        """Returns the end of a key that names the rank's place on other mesh dimensions."""
        return f"; {described(self._hook._mesh)}" if self._hook._mesh else ""

    def _saved_world(self, place: Place) -> int:
        reader = self._load_from
        if not hasattr(reader, "read_metadata"):
            from torch.distributed.checkpoint import FileSystemReader
            reader = FileSystemReader(reader)
        places = [_place_in(key) for key in reader.read_metadata().state_dict_metadata
                  if key.partition("; ")[2] == self._others()[2:]]
        worlds = sorted({p.world for p in places if p is not None})
        if place.world in worlds:
            return place.world
        if len(worlds) != 1:
            raise _native.BadArgument(f"cannot load the hook of {place}{self._others()} from "
                                      f"{self._load_from!r}, which has "
                                      f"hooks of {worlds or 'no'} ranks: expected a checkpoint of "
                                      "hook.checkpoint() from one world size")
        return worlds[0]

    def load_state_dict(self, loaded: Dict[str, RankState]) -> None:
        """Loads into the hook the states that were read."""
        states: List[StateDict] = [r.state for r in loaded.values() if r.state is not None]
        if not states:
            raise _native.BadArgument(f"the checkpoint has none of the states {sorted(loaded)}: pass "
                                      "hook.checkpoint(load_from=...) the same checkpoint")
        self._hook.load_state_dict(states)


def as_list(state: Union[StateDict, Sequence[StateDict]]) -> List[StateDict]:
    """Returns a list of one or several states, and the states gathered in each as "others"."""
    given = [state] if isinstance(state, dict) else list(state)
    # In a list of all ranks' results of hook.state_dict(), rank 0's has the others.
    given = [one for one in given if "others" in one] or given
    states: List[StateDict] = []
    for one in given:
        states.append({key: value for key, value in one.items() if key != "others"})
        states += one.get("others", [])
    if not states:
        raise _native.BadArgument("the list of states is empty: pass the states that ranks saved")
    return states
