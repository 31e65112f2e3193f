"""Describes a rank's place on a device mesh, and finds the states that were saved there."""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Tuple

import torch

from gradwire import _native

Place = Dict[str, Tuple[int, int]]  # (rank, ranks) by mesh dimension


def root_of(mesh: Any) -> Any:
    """Returns the mesh from which a mesh was sliced."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


def other_dimensions(meshes: Iterable[Tuple[Any, Any]]) -> Place:
    """Returns this rank's place on the dimensions along which gradients are not averaged.

    These are, for example, the dimensions of tensor and pipeline parallelism. Omits dimensions of one rank.

    Args:
        meshes: pairs of a mesh of ranks that average, and a mesh around it, both of this rank.
    """
    place: Place = {}
    for inner, outer in meshes:
        inside = torch.isin(outer.mesh, inner.mesh).nonzero()
        for name, size, positions in zip(outer.mesh_dim_names or (), outer.mesh.shape, inside.t()):
            if size > 1 and positions.unique().numel() == 1:
                place[name] = int(positions[0]), int(size)
    return place


def described(place: Place) -> str:
    each = ", ".join(f"{name} {rank} of {ranks}" for name, (rank, ranks) in place.items())
    return each or "data parallel ranks only"


def states_here(states: Sequence[Dict[str, Any]], places: Sequence[Place],
                mine: Place) -> List[Dict[str, Any]]:
    """Returns the states that were saved at this rank's place on the mesh's other dimensions.

    Args:
        states: states of one run.
        places: the place along which each state's gradients were averaged.
        mine: this rank's place on other_dimensions().

    Raises:
        BadArgument: the states are of several runs, of another mesh, or of other ranks of this mesh.
    """
    others: List[Place] = [{n: (int(r), int(ranks)) for n, (r, ranks) in s.get("mesh", {}).items()}
                           for s in states]
    whole = [described({**place, **other}) for place, other in zip(places, others)]
    for place, text, other in zip(places, whole, others):
        if (_sizes(place), _sizes(other)) != (_sizes(places[0]), _sizes(others[0])):
            raise _native.BadArgument(f"the states are of runs with {whole[0]} and with {text}: load the "
                                      "states of one run")
        if whole.count(text) > 1:
            raise _native.BadArgument(f"{len(states)} states for {len(set(whole))} places: several are of "
                                      f"{text}. Pass the states of one run, each rank's once")
    found = [state for state, other in zip(states, others) if other == mine]
    if found:
        return found
    got = "; ".join(sorted({described(other) for other in others}))
    if _sizes(others[0]) == _sizes(mine):
        raise _native.BadArgument(f"this rank is {described(mine)}, but the states are of {got}: load each "
                                  "rank's own state, or pass a list of all ranks' states")
    raise _native.BadArgument(
        f"the states are of another mesh: they are of {got}; this rank is of {described(mine)}. Only the "
        "number of data parallel ranks may change"
        + ("" if others[0] else ". An earlier version did not save these dimensions: if it saved the state "
           f"on this rank, set state['mesh'] = {mine}"))


def _sizes(place: Place) -> Place:
    return {name: (0, ranks) for name, (_, ranks) in place.items()}
