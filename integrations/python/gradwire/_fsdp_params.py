"""FSDP2's modules, parameter groups and parameters, and the layout of a parameter in its buffers."""
from __future__ import annotations

from typing import Any, Dict, List, Sequence

import torch

from gradwire import _native


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
