"""Tests that close() undoes compress(): PyTorch's collectives are restored, and compress() works again."""
from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.fsdp import Compression, compress

from fsdp_training import Run, difference, loss_of, new_model
from rank import WORLD, check, refused, say

ATTRIBUTES = ("_reduce_scatter_comm", "_all_gather_comm", "_all_reduce_hook", "mesh_info",
              "_prepare_reduce_scatter_inputs")


class Model:
    """A model sharded in one of several ways, and its optimizer."""

    def __init__(self, shard: Callable[[nn.Module], None]) -> None:
        self.model = new_model()
        shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, step, self.model.words).backward()
            self.optimizer.step()

    def take(self, other: "Model") -> None:
        self.model.load_state_dict({name: value.clone() for name, value in other.model.state_dict().items()})
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    parameters = Run.parameters


def plain(model: nn.Module, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def list_of_modules(model: nn.Module) -> None:
    fully_shard([model.norm, model.head])
    plain(model)


def several_lists(model: nn.Module) -> None:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.norm, model.head])
    fully_shard(model)


def tied(model: nn.Module) -> None:
    model.head.weight = model.embedding.weight
    plain(model)


def two_names(model: nn.Module) -> None:
    """Shards a model that has the same block twice."""
    fully_shard(model.blocks[0])
    model.blocks[1] = model.blocks[0]
    fully_shard(model)


def _mesh() -> Any:
    return init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicas", "shards"))


def hybrid(model: nn.Module) -> None:
    plain(model, mesh=_mesh())


def hybrid_list(model: nn.Module) -> None:
    mesh = _mesh()
    fully_shard([model.norm, model.head], mesh=mesh)
    plain(model, mesh=mesh)


def hybrid_shared(model: nn.Module) -> None:
    """Shards blocks and model with one shared FSDP description of the mesh."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard
    mesh = _mesh()
    shared = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    plain(model, mesh=mesh, shard_placement_fn=lambda _: ShardPlacementResult(Shard(0), shared))


def _groups(model: nn.Module) -> List[Any]:
    found: Dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            found.update({id(g): g for g in module._get_fsdp_state()._fsdp_param_groups if g.fsdp_params})
    return list(found.values())


def _internals(model: nn.Module) -> List[Tuple[Any, ...]]:
    """Returns the parts of FSDP that compress() changes, and the process groups of the meshes."""
    return [tuple(getattr(group, name) for name in ATTRIBUTES) + tuple(vars(group.mesh_info).values())
            for group in _groups(model)]


def _same(a: List[Tuple[Any, ...]], b: List[Tuple[Any, ...]]) -> bool:
    return all(x is y for group, other in zip(a, b) for x, y in zip(group, other)) and len(a) == len(b)


def closing_and_compressing_again() -> None:
    kinds = [plain, list_of_modules, several_lists, tied, two_names]
    if WORLD == 4:
        kinds += [hybrid, hybrid_list, hybrid_shared]
    for shard in kinds:
        name = shard.__name__
        native, ours = Model(shard), Model(shard)
        untouched, made = _internals(ours.model), len(dist.distributed_c10d._world.pg_map)
        for turn in range(2):
            handle = compress(ours.model, "int4", "int8", timeout_s=60)
            found = len(handle._groups)
            check(found == len(untouched), f"{name}: {found} groups, not {len(untouched)}")
            ours.train(range(2))
            check(handle.residual_bytes > 0, f"{name}: nothing was compressed")
            handle.close()
            handle.close()
            check(_same(_internals(ours.model), untouched), f"{name}: close() left {_internals(ours.model)}")
            check(len(dist.distributed_c10d._world.pg_map) == made, f"{name}: close() left a process group")
            ours.take(native)
            for trained in (native, ours):
                trained.train(range(2 * turn, 2 * turn + 2))
            same = difference(native.parameters(), ours.parameters()) == 0.0
            check(same, f"{name}: training after close() differs")
        handle = compress(ours.model, "fp32", "fp32", timeout_s=60)
        for trained in (native, ours):
            trained.train(range(4, 6))
        worst = difference(native.parameters(), ours.parameters())
        check(worst <= 1e-6, f"{name}: compressed again in fp32, parameters differ by {worst:.1e}")
        handle.close()
        say(f"{name}: after close() bit for bit as without compress(); compressed again within {worst:.1e}")


def closing_keeps_later_changes() -> None:
    """Checks that close() keeps attributes that the caller set after compress()."""
    ours = Model(hybrid if WORLD == 4 else plain)
    handle = compress(ours.model, "int8", "bf16", timeout_s=60)
    kept, calls = ours.model._get_fsdp_state()._fsdp_param_groups[0], []
    kept._all_reduce_hook = calls.append
    if hasattr(ours.model, "set_separate_reduce_scatter_group"):
        ours.model.set_separate_reduce_scatter_group(True)
    separate = getattr(kept.mesh_info, "reduce_scatter_process_group", None)
    handle.close()
    check(kept._all_reduce_hook == calls.append, "close() removed a hook that the caller had set")
    now = getattr(kept.mesh_info, "reduce_scatter_process_group", None)
    check(now is separate, "close() reset the process group")
    kept._all_reduce_hook = None
    ours.train(range(1))
    for call in (handle.state_dict, lambda: handle.load_state_dict({"version": 1})):
        refused(call, gradwire.BadHandle, "compress() again")


def a_failed_compress_changes_nothing() -> None:
    ours = Model(hybrid_list if WORLD == 4 else list_of_modules)
    untouched, install, calls = _internals(ours.model), Compression._install, []

    def fails(self: Compression, group: Any) -> None:
        if len(calls) == 2:
            raise gradwire.CommFailed("injected")
        calls.append(group)
        install(self, group)

    Compression._install = fails  # type: ignore[method-assign]
    try:
        compress(ours.model, "int8", "bf16", timeout_s=60)
        check(False, "the injected failure was swallowed")
    except gradwire.CommFailed:
        pass
    finally:
        Compression._install = install  # type: ignore[method-assign]
    check(len(calls) == 2 and _same(_internals(ours.model), untouched), "a failed compress() left changes")
    refused(lambda: compress(ours.model.norm), gradwire.BadArgument, "fully_shard([...])", "Linear")
    ours.train(range(1))
