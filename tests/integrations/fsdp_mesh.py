"""Tests that states name every mesh dimension, such as those of tensor and pipeline parallelism."""
from __future__ import annotations

import tempfile
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
from gradwire._fsdp_state import folded
from gradwire.fsdp import Compression, compress
from gradwire.torch import Hook
from gradwire.torch import compress as compress_ddp

from rank import RANK, WORLD, check, refused, say

WIDTH = 32


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))


def _model(mesh: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Parts()
    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _sharded(mesh: Any, *along: str) -> Tuple[nn.Module, Compression]:
    model = _model(mesh)
    fully_shard(model, mesh=mesh[along])
    return model, compress(model, "int4", "fp32", dense=False, timeout_s=60)


def _mesh(**dimensions: int) -> Any:
    return init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def _train(model: nn.Module, mesh: Any) -> None:
    """Makes a backward. The input differs between ranks, but for ranks of tensor parallelism."""
    seed = mesh.get_local_rank("dp") if "tp" in mesh.mesh_dim_names else RANK
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()


def _everybodys(value: Any) -> List[Any]:
    values: List[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def _without_mesh(states: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [{key: value for key, value in state.items() if key != "mesh"} for state in states]


def _same(a: Dict[str, Any], b: Dict[str, Any]) -> bool:
    return a["tensors"].keys() == b["tensors"].keys() and all(
        torch.equal(entry[kind], b["tensors"][name][kind])
        for name, entry in a["tensors"].items() for kind in entry if kind != "steps")


def _sums(handle: Compression, group: Any) -> Dict[str, torch.Tensor]:
    """Returns the sum of each parameter's residuals over the data parallel ranks."""
    place, found = handle._place()["shard"], {}
    for name, (param, _) in handle._params.items():
        found[name] = folded(handle.state_dict()["tensors"].get(name, {}), place, param).double()
        dist.all_reduce(found[name], group=group)
    return found


def a_list_of_states_gives_each_rank_its_own() -> None:
    meshes = [(_mesh(dp=2, tp=2), "tp"), (_mesh(pp=2, dp=2), "pp")]
    whole = _mesh(world=4)
    if hasattr(whole, "_unflatten"):
        meshes.append((whole._unflatten(0, (2, 2), ("dp", "tp")), "tp"))
    for mesh, other in meshes:
        model, handle = _sharded(mesh, "dp")
        _train(model, mesh)
        state = handle.state_dict()
        check(state["mesh"] == {other: (mesh.get_local_rank(other), 2)}, f"mesh {state['mesh']}")
        states = _everybodys(state)
        check(not _same(states[0], states[RANK]) or RANK == 0, "all ranks have one state")
        loaded = _sharded(mesh, "dp")[1]
        for given in (states, states[::-1], state):
            loaded.load_state_dict(given)
            check(_same(loaded.state_dict(), state), f"{other}: another rank's residuals")
        for h in (handle, loaded):
            h.close()
    say("tensor and pipeline parallel ranks get their own residuals from a list of all states")


def states_of_another_place_are_refused() -> None:
    mesh = _mesh(dp=2, tp=2)
    model, handle = _sharded(mesh, "dp")
    _train(model, mesh)
    states, tp = _everybodys(handle.state_dict()), mesh.get_local_rank("tp")
    loaded, flat = _sharded(mesh, "dp")[1], _sharded(_mesh(dp=4, tp=1), "dp")[1]
    own = states[RANK]
    for target, given, words in (
        (loaded, states[RANK ^ 1], (f"this rank is tp {tp} of 2", f"of tp {1 - tp} of 2")),
        (loaded, [*states, own], ("5 states for 4 places", f"tp {tp} of 2", "one run")),
        (loaded, [*states, *states], ("8 states for 4 places", "one run")),
        (loaded, _without_mesh(states), ("4 states for 2 places", "one run")),
        (loaded, _without_mesh([own])[0], ("another mesh", f"state['mesh'] = {{'tp': ({tp}, 2)}}")),
        (loaded, [own, {**states[RANK ^ 2], "shard": (0, 3)}], ("shard 0 of 3", "one run")),
        (flat, states, ("another mesh", "tp 0 of 2; tp 1 of 2", "data parallel ranks only")),
        (flat, states[0], ("another mesh", "tp 0 of 2")),
    ):
        refused(lambda: target.load_state_dict(given), gradwire.BadArgument, *words)
    check(loaded.state_dict()["tensors"] == {}, "a refused state was loaded")
    loaded.load_state_dict({**_without_mesh([own])[0], "mesh": {"tp": (tp, 2)}})
    check(_same(loaded.state_dict(), own), "a state with its place added")
    for h in (handle, loaded, flat):
        h.close()
    # Without other dimensions, states need not have the key.
    model, handle = _sharded(_mesh(dp=4), "dp")
    _train(model, _mesh(dp=4))
    state = handle.state_dict()
    check(state["mesh"] == {}, f"mesh {state['mesh']}")
    for given in (_without_mesh(_everybodys(state)), _without_mesh([state])[0]):
        handle.load_state_dict(given)
        check(_same(handle.state_dict(), state), "a state without the key")
    handle.close()
    say("refused by name: another tensor parallel rank's state, two states of one place, another mesh")


def other_data_parallel_ranks_keep_each_tensor_parallel_ranks_sum() -> None:
    mesh, hybrid = _mesh(dp=2, tp=2), _mesh(replicas=2, shards=1, tp=2)
    model, handle = _sharded(mesh, "dp")
    _train(model, mesh)
    sums, states = _sums(handle, mesh.get_group("dp")), _everybodys(handle.state_dict())
    loaded = _sharded(hybrid, "replicas", "shards")[1]
    loaded.load_state_dict(states)
    for name, total in _sums(loaded, hybrid.get_group("replicas")).items():
        check(torch.allclose(total, sums[name], rtol=0, atol=1e-7) and float(total.norm()) > 0,
              f"{name}: the sum")
    for h in (handle, loaded):
        h.close()
    say("loaded with other data parallel ranks, each tensor parallel rank keeps its sum of residuals")


def the_hooks_state_names_its_tensor_parallel_rank() -> None:
    mesh = _mesh(dp=2, tp=2)
    ddps = [nn.parallel.DistributedDataParallel(_model(mesh), device_mesh=mesh["dp"]) for _ in range(2)]
    hook, other = (compress_ddp(ddp, "int4:dense=off", timeout_s=60) for ddp in ddps)
    _train(ddps[0], mesh)
    tp, dp, state = mesh.get_local_rank("tp"), mesh.get_local_rank("dp"), hook.state_dict(gather=False)
    check(state["mesh"] == {"tp": (tp, 2)}, f"mesh {state['mesh']}")
    gathered = _everybodys(hook.state_dict())  # by each data parallel group's rank 0
    for given in (gathered, [*gathered[:2]], gathered[tp], state):
        other.load_state_dict(given)
        check(_same_tensors(other.state_dict(gather=False), state), "another rank's state")
    refused(lambda: other.load_state_dict(gathered[1 - tp]), gradwire.BadArgument,
            f"this rank is tp {tp} of 2")
    refused(lambda: other.load_state_dict([state, state]), gradwire.BadArgument, "2 states for 1 places")
    with tempfile.TemporaryDirectory() as made:
        folder = _everybodys(made)[0]
        save({"hook": hook.checkpoint()}, checkpoint_id=folder)
        again, flat = Hook("int4:dense=off", model=ddps[1]), Hook("int4:dense=off", model=Parts())
        load({"hook": again.checkpoint(load_from=folder)}, checkpoint_id=folder)
        check(_same_tensors(again.state_dict(gather=False), state), f"checkpoint of dp {dp}, tp {tp}")
        refused(lambda: load({"hook": flat.checkpoint(load_from=folder)}, checkpoint_id=folder),
                gradwire.BadArgument, f"rank {RANK} of 4", "hooks of no ranks")
        dist.barrier()
    for h in (hook, other, again, flat):
        h.close()
    say("the DDP hook's states and checkpoints name the tensor parallel rank")


def _same_tensors(a: Dict[str, Any], b: Dict[str, Any]) -> bool:
    return a["tensors"].keys() == b["tensors"].keys() and all(
        torch.equal(entry["state"]["residual"], b["tensors"][name]["state"]["residual"])
        for name, entry in a["tensors"].items())
