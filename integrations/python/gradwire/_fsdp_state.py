"""Chooses and adds the residuals of saved states for a run with the same ranks or others."""
from __future__ import annotations

from typing import Any, Dict, List, Sequence, Set, Tuple

import torch

from gradwire import _native
from gradwire._mesh import Place

# ---- FSDP2's modules, parameter groups and parameters ------------------------------------------------------


def fsdp_module_class() -> Any:
    try:
        from torch.distributed.fsdp import FSDPModule
    except Exception:  # PyTorch 1.13 raises ValueError on Python 3.11
        FSDPModule = None
    if not all(hasattr(FSDPModule, f"set_custom_{name}") for name in ("reduce_scatter", "all_gather")):
        raise _native.Unsupported("gradwire.fsdp needs PyTorch 2.9 or later, with "
                                  "set_custom_reduce_scatter() and set_custom_all_gather(); this is "
                                  f"{torch.__version__}")
    return FSDPModule


def param_groups(modules: Sequence[Any]) -> List[Any]:
    """Returns the modules' parameter groups, without duplicates: fully_shard([a, b]) makes one group."""
    found: Dict[int, Any] = {}
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        if len(groups) > 1:
            raise _native.Unsupported(f"a {type(module).__name__} has {len(groups)} parameter groups on "
                                      "different meshes (shard_placement_fn), for which PyTorch accepts no "
                                      "custom collectives: call fully_shard() on its parts separately")
        # A group is empty if all parameters belong to blocks that are sharded separately.
        found.update({id(group): group for group in groups if group.fsdp_params})
    return list(found.values())


def plain_name(name: str) -> str:
    """Returns a name without the parts that torch.compile() and activation checkpointing insert."""
    for inserted in ("_orig_mod", "_checkpoint_wrapped_module"):
        name = ".".join(part for part in name.split(".") if part != inserted)
    return name


def name_of(param: Any, prefixes: Dict[int, str]) -> str:
    info = param._module_info
    if id(info.module) not in prefixes:
        raise _native.BadArgument(f"a parameter group has {info.param_name!r} of a "
                                  f"{type(info.module).__name__} outside the model: pass compress() the "
                                  "model that contains all modules of fully_shard([...])")
    prefix = prefixes[id(info.module)]
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


# ---- A whole parameter, and its layout in FSDP's buffers: rows of padded shards ----------------------------


def unpadded(flat: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """Returns (rows, padded shard) as a tensor of the parameter's shape."""
    rows = flat.shape[0]
    padded = list(shape)
    padded[dim] = -(-shape[dim] // rows)
    chunks = flat.view(rows, *padded)
    if dim == 0:
        return chunks.reshape(rows * padded[0], *shape[1:])[:shape[0]].clone()
    return torch.cat(list(chunks), dim=dim)  # FSDP2 requires an even division of other dimensions


def whole_of(flat: torch.Tensor, param: Any, rows: int) -> torch.Tensor:
    return unpadded(flat.view(rows, -1), param._orig_size, param.fsdp_placement.dim)


def shards_of(whole: torch.Tensor, param: Any, rows: int) -> torch.Tensor:
    """Inverts whole_of(): returns a tensor of shape (rows * padded shard,)."""
    if param.fsdp_placement.dim == 0:
        flat = torch.zeros(rows * param.padded_sharded_param_size.numel(), dtype=torch.float32,
                           device=whole.device)
        flat[:whole.numel()].copy_(whole.reshape(-1))
        return flat
    return torch.stack(torch.chunk(whole, rows, dim=param.fsdp_placement.dim)).reshape(-1)

# ---- States ------------------------------------------------------------------------------------------------


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
    same = all(saved[kind][1] == mine[kind][1] for kind in ("shard", "replica")) and all(
        _dim(entry, params[name]) == params[name].fsdp_placement.dim
        for name, entry in saved["tensors"].items() if "replica_residual" in entry)
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
                whole = folded({k: entry[k] for k in (*kinds, "dim") if k in entry}, ranks[r]["shard"],
                               params[name])
                merged = tensors.setdefault(name, {"steps": entry["steps"],
                                                   "residual": torch.zeros_like(whole)})
                merged["residual"] += whole
    for name in low_rank.intersection(ranks[0]["tensors"] if low_rank else ()):
        first = ranks[0]["tensors"][name]
        merged = tensors.setdefault(name, {"steps": first["steps"]})
        merged.update({k: first[k] for k in ("factor", "factor_steps") if k in first})
        parts = [folded({k: ranks[i * shards + s]["tensors"][name][k]
                         for k in ("replica_residual", "dim") if k in first}, (s, shards), params[name])
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
    whole: torch.Tensor = entry.get("residual", torch.zeros(shape, dtype=torch.float32, device="cpu")).clone()
    if "replica_residual" in entry:
        flat = torch.zeros(rows, entry["replica_residual"].numel(), dtype=torch.float32, device="cpu")
        flat[rank] = rows * entry["replica_residual"]
        whole += unpadded(flat, shape, _dim(entry, param))
    return whole


def _dim(entry: Dict[str, Any], param: Any) -> int:
    """Returns the dimension along which the parameter was sharded; that of `param` if a state lacks it."""
    return int(entry.get("dim", param.fsdp_placement.dim))
