"""Chooses and adds the residuals of saved states for a run with the same ranks or others."""
from __future__ import annotations

from typing import Any, Dict, Sequence, Set, Tuple

import torch

from gradwire import _native
from gradwire._fsdp_params import shards_of, unpadded
from gradwire._mesh import Place


def chosen(states: Sequence[Dict[str, Any]], mine: Place, params: Dict[str, Any],
           low_rank: Set[str]) -> Dict[str, Dict[str, Any]]:
    """Returns the entries that a rank loads, by parameter.

    Args:
        states: results of state_dict(), of different ranks.
        mine: the rank's place: its "shard" and "replica".
        params: FSDPParams by name.
        low_rank: the parameters whose replicas' residuals stay with replicas.

    Raises:
        BadArgument: a state that the rank needs is missing.
    """
    saved = states[0]
    ranks = {_rank(s)[0]: s for s in states}
    saved_world, (rank, world) = _rank(saved)[1], _rank(mine)
    same = all(saved[kind][1] == mine[kind][1] for kind in ("shard", "replica"))
    # Ranks whose residuals, and replicas whose residuals, this rank takes.
    from_ranks = range(rank, saved_world, world)
    shards = saved["shard"][1]
    from_replicas = range(mine["replica"][0], saved["replica"][1], mine["replica"][1])
    wanted = [rank] if same else list(from_ranks)
    if low_rank and not same:
        # Rank 0's factors, which are those of all ranks.
        wanted += [0, *(i * shards + s for i in from_replicas for s in range(shards))]
    missing = [r for r in wanted if r not in ranks]
    if missing:
        raise _native.BadArgument(
            f"rank {rank} of {world} needs the state of rank {missing[0]} of {saved_world}, but got the "
            f"states of ranks {sorted(ranks)}: "
            + ("load each rank's own state" if same else f"pass a list of all {saved_world} states"))
    if same:
        return dict(ranks[rank]["tensors"])
    tensors: Dict[str, Dict[str, Any]] = {}
    for r in from_ranks:
        for name, entry in ranks[r]["tensors"].items():
            kinds = ("residual",) if name in low_rank else ("residual", "replica_residual")
            if any(kind in entry for kind in kinds):
                whole = folded({k: entry[k] for k in kinds if k in entry}, ranks[r]["shard"], params[name])
                merged = tensors.setdefault(name, {"steps": entry["steps"],
                                                   "residual": torch.zeros_like(whole)})
                merged["residual"] += whole
    for name in low_rank.intersection(ranks[0]["tensors"] if low_rank else ()):
        first = ranks[0]["tensors"][name]
        merged = tensors.setdefault(name, {"steps": first["steps"]})
        merged.update({k: first[k] for k in ("factor", "factor_steps") if k in first})
        parts = [folded({"replica_residual": ranks[i * shards + s]["tensors"][name]["replica_residual"]},
                        (s, shards), params[name])
                 for i in from_replicas for s in range(shards) if "replica_residual" in first]
        if parts:
            at, count = mine["shard"]
            whole = torch.stack(parts).sum(0) / count
            merged["replica_residual"] = shards_of(whole, params[name], count).view(count, -1)[at].clone()
    return tensors


def _rank(place: Dict[str, Any]) -> Tuple[int, int]:
    """Returns (rank, ranks) over both axes."""
    (shard, shards), (replica, replicas) = place["shard"], place["replica"]
    return replica * shards + shard, replicas * shards


def folded(entry: Dict[str, Any], shard: Tuple[int, int], param: Any) -> torch.Tensor:
    """Returns the sum of an entry's residuals, in the whole parameter's shape.

    The replicas' residual is in units of the mean over the n ranks of the shards: it counts n times in units
    of one rank's gradient.
    """
    rank, rows = shard
    shape = param._orig_size
    whole: torch.Tensor = entry.get(
        "residual", torch.zeros(shape, dtype=torch.float32, device="cpu")).clone()
    if "replica_residual" in entry:
        flat = torch.zeros(rows, entry["replica_residual"].numel(), dtype=torch.float32, device="cpu")
        flat[rank] = rows * entry["replica_residual"]
        whole += unpadded(flat, shape, param.fsdp_placement.dim)
    return whole
