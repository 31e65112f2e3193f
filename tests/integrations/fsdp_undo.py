"""Scenarios of close(), which undoes compress(), of compressing again, and of a compress() that fails."""
from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire
from fsdp_training import PLAIN, Run, difference, replicas_of, shard_blocks
from gradwire.fsdp import Compression, compress
from rank import WORLD, check, refused
from scenarios import scenario

ATTRIBUTES = ("_reduce_scatter_comm", "_all_gather_comm", "_all_reduce_hook", "mesh_info",
              "_prepare_reduce_scatter_inputs")


def list_of_modules(model: nn.Module) -> None:
    fully_shard([model.norm, model.head])
    shard_blocks(model)


def several_lists(model: nn.Module) -> None:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.norm, model.head])
    fully_shard(model)


def tied(model: nn.Module) -> None:
    model.head.weight = model.embedding.weight
    shard_blocks(model)


def two_names(model: nn.Module) -> None:
    """Shards a model that has the same block twice."""
    fully_shard(model.blocks[0])
    model.blocks[1] = model.blocks[0]
    fully_shard(model)


def hybrid(model: nn.Module) -> None:
    mesh = replicas_of(2)
    fully_shard([model.norm, model.head], mesh=mesh)
    shard_blocks(model, mesh=mesh)


def hybrid_shared(model: nn.Module) -> None:
    """Shards blocks and model with one shared FSDP description of the mesh."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard
    mesh = replicas_of(2)
    shared = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    shard_blocks(model, mesh=mesh, shard_placement_fn=lambda _: ShardPlacementResult(Shard(0), shared))


def internals(model: nn.Module) -> List[Tuple[Any, ...]]:
    """Returns the parts of FSDP that compress() changes, and the process groups of the meshes."""
    groups: Dict[int, Any] = {id(g): g for module in model.modules() if hasattr(module, "_get_fsdp_state")
                              for g in module._get_fsdp_state()._fsdp_param_groups if g.fsdp_params}
    return [tuple(getattr(group, name) for name in ATTRIBUTES) + tuple(vars(group.mesh_info).values())
            for group in groups.values()]


def same(a: List[Tuple[Any, ...]], b: List[Tuple[Any, ...]]) -> bool:
    return all(x is y for group, other in zip(a, b) for x, y in zip(group, other)) and len(a) == len(b)


@scenario()
def closing_and_compressing_again() -> None:
    for shard in (shard_blocks, list_of_modules, several_lists, tied, two_names, hybrid, hybrid_shared):
        name, native, ours = shard.__name__, Run(shard=shard), Run(shard=shard)
        untouched, made = internals(ours.model), len(dist.distributed_c10d._world.pg_map)
        for turn in range(2):
            handle = compress(ours.model, "int4", "int8", timeout_s=60)
            check(len(handle._groups) == len(untouched), f"{name}: {len(handle._groups)} groups")
            ours.steps(0, 2)
            check(handle.residual_bytes > 0, f"{name}: nothing was compressed")
            handle.close()
            handle.close()
            check(same(internals(ours.model), untouched), f"{name}: close() left {internals(ours.model)}")
            check(len(dist.distributed_c10d._world.pg_map) == made, f"{name}: close() left a process group")
            ours.take(native)
            weights = [run.steps(2 * turn, 2 * turn + 2) for run in (native, ours)]
            check(difference(*weights) == 0.0, f"{name}: training after close() differs")
        handle = compress(ours.model, **PLAIN, timeout_s=60)
        weights = [run.steps(4, 6) for run in (native, ours)]
        check(difference(*weights) <= 1e-6, f"{name}: compressed again in fp32, parameters differ")
        handle.close()


@scenario()
def closing_keeps_later_changes() -> None:
    """Checks that close() keeps attributes that the caller set after compress()."""
    ours = Run({"gradients": "int8"}, shard=hybrid if WORLD == 4 else shard_blocks)
    kept, calls = ours.model._get_fsdp_state()._fsdp_param_groups[0], []  # type: ignore[var-annotated]
    kept._all_reduce_hook = calls.append
    if hasattr(ours.model, "set_separate_reduce_scatter_group"):
        ours.model.set_separate_reduce_scatter_group(True)
    separate = getattr(kept.mesh_info, "reduce_scatter_process_group", None)
    ours.close()
    check(kept._all_reduce_hook == calls.append, "close() removed a hook that the caller had set")
    now = getattr(kept.mesh_info, "reduce_scatter_process_group", None)
    check(now is separate, "close() reset the process group")
    kept._all_reduce_hook = None
    ours.step(0)
    for call in (ours.handle.state_dict, lambda: ours.handle.load_state_dict({"version": 1})):
        refused(call, gradwire.BadHandle, "compress() again")


@scenario()
def a_failed_compress_changes_nothing() -> None:
    ours = Run(shard=hybrid if WORLD == 4 else list_of_modules)
    untouched, install, calls = internals(ours.model), Compression._install, []  # type: ignore[var-annotated]

    def fails(self: Compression, group: Any) -> None:
        if len(calls) == 2:
            raise gradwire.CommFailed("injected")
        calls.append(group)
        install(self, group)

    Compression._install = fails  # type: ignore[method-assign]
    try:
        refused(lambda: compress(ours.model, "int8", "bf16", timeout_s=60), gradwire.CommFailed, "injected")
    finally:
        Compression._install = install  # type: ignore[method-assign]
    check(len(calls) == 2 and same(internals(ours.model), untouched), "a failed compress() left changes")
    refused(lambda: compress(ours.model.norm), gradwire.BadArgument, "fully_shard([...])", "Linear")
    ours.step(0)
