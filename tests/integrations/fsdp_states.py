"""Scenarios of FSDP2's states: for other ranks and meshes, and named by every dimension of a mesh."""
from __future__ import annotations

import os
import pathlib
import tempfile
from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
import laws
from fsdp_training import Sharded, gradients_of, replicas_of, residuals
from gradwire.fsdp import compress
from gradwire.torch import Hook
from gradwire.torch import compress as compress_ddp
from rank import RANK, WORLD, check, refused, say
from scenarios import scenario

INT4, LOW_RANK = {"gradients": "int4", "dense": False}, {"replicas": "powersgd:rank=2"}
# The replicas (0: all ranks shard) that save and load, by number of ranks.
SAVED = {"flat": 0, "hybrid": 2, "low_rank": 2}
LOADED = {2: (("flat", 0), ("hybrid", 0), ("low_rank", 2), ("low_rank", 1)),
          4: (("hybrid", 0), ("low_rank", 4)), 8: (("flat", 0), ("low_rank", 4))}


@scenario(4, 2, 8, 4, ends=True)
def states_continue_on_other_ranks_and_meshes() -> None:
    """The first 4 ranks save states, which later ranks load."""
    folder = pathlib.Path(os.environ["SCENARIO_FOLDER"])
    saves = not (folder / "saved").exists()
    dist.barrier()  # before a rank creates the file
    for kind, replicas in SAVED.items() if saves else LOADED[WORLD]:
        # A matrix of 90 columns has shards of columns on 2 ranks and of rows on 4.
        for by_columns in (False, True):
            run = Sharded(replicas_of(replicas) if replicas else None,
                          LOW_RANK if kind == "low_rank" else INT4, by_columns=by_columns)
            name = f"{folder}/{kind}-{by_columns}"
            if not saves:
                loads(run, f"{kind} from 4 to {WORLD} ranks, {replicas} replicas, {by_columns=}", name)
            else:
                for step in range(3):
                    run.step(gradients_of(0, step))
                torch.save((run.handle.state_dict(), run.residuals()), f"{name}-{RANK}")
            run.handle.close()
    (folder / "saved").touch()
    dist.barrier()


def loads(run: Sharded, what: str, name: str) -> None:
    states, saved = zip(*(torch.load(f"{name}-{rank}", weights_only=False) for rank in range(4)))
    run.handle.load_state_dict(list(states))
    loaded, zeros = laws.of_all_ranks(run.residuals()), {n: 0 * r for n, r in saved[0].items()}
    check(sum(bool(sum(each[n] for each in saved).any()) for n in zeros) >= 3, f"{what}: no residuals")
    for n in zeros:
        before, after = (sum(each[n] for each in everyones) for everyones in (saved, loaded))
        laws.near(f"{what}: the sum of {n}", after, before, 1e-6)
    for n, factor in run.factors().items():
        check(torch.equal(factor, states[0]["tensors"][f"0.{n}"]["factor"]), f"{what}: another factor of {n}")
    check(bool(run.factors()) == ("low_rank" in what), f"{what}: {run.factors().keys()}")
    run.step_without_loss(what, gradients_of(0, 3))
    if RANK < 4 and WORLD != 4:
        others = [state for r, state in enumerate(states) if r % WORLD != RANK]
        refused(lambda: run.handle.load_state_dict(others), ValueError, "pass a list of all")


# ---- Tensor and pipeline parallelism -----------------------------------------------------------------------

WIDTH = 32


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))


def mesh_of(**dimensions: int) -> Any:
    return init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def model_on(mesh: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Parts()
    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded(mesh: Any, *along: str) -> Any:
    model = model_on(mesh)
    fully_shard(model, mesh=mesh[along])
    handle: Any = compress(model, "int4", "fp32", dense=False, timeout_s=60)
    handle.model = model
    return handle


def trained(mesh: Any, *along: str) -> Any:
    """Returns a handle after one backward."""
    handle = sharded(mesh, *along)
    backward(handle.model, mesh)
    return handle


def backward(model: nn.Module, mesh: Any) -> None:
    """The input differs between ranks, but for ranks of tensor parallelism."""
    seed = mesh.get_local_rank("dp") if "tp" in mesh.mesh_dim_names else RANK
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def without_mesh(states: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [{key: value for key, value in state.items() if key != "mesh"} for state in states]


def same(a: Dict[str, Any], b: Dict[str, Any]) -> bool:
    return laws.same_bits(a["tensors"], b["tensors"])


@scenario(4)
def a_list_of_states_gives_each_rank_its_own() -> None:
    """Also on other data parallel ranks, where each tensor parallel rank keeps its sum of residuals."""
    meshes = [(mesh_of(dp=2, tp=2), "tp"), (mesh_of(pp=2, dp=2), "pp")]
    flat = mesh_of(world=4)
    if hasattr(flat, "_unflatten"):
        meshes.append((flat._unflatten(0, (2, 2), ("dp", "tp")), "tp"))
    for mesh, other in meshes:
        handle, loaded = trained(mesh, "dp"), sharded(mesh, "dp")
        state = handle.state_dict()
        check(state["mesh"] == {other: (mesh.get_local_rank(other), 2)}, f"mesh {state['mesh']}")
        states = laws.of_all_ranks(state)
        check(not same(states[0], states[RANK]) or RANK == 0, "all ranks have one state")
        for given in (states, states[::-1], state):
            loaded.load_state_dict(given)
            check(same(loaded.state_dict(), state), f"{other}: another rank's residuals")
        if mesh is meshes[0][0]:
            hybrid = sharded(mesh_of(replicas=2, shards=1, tp=2), "replicas", "shards")
            hybrid.load_state_dict(states)
            place = [(mesh.get_local_rank("tp"), residuals(each)) for each in (handle, hybrid)]
            for name in place[0][1]:
                before, after = (sum(r[name] for tp, r in laws.of_all_ranks(one) if tp == one[0])
                                 for one in place)
                laws.near(f"the sum of {name}", after, before, 1e-6)
                check(bool(before.any()), f"{name} has no residual")
            hybrid.close()
        for each in (handle, loaded):
            each.close()


@scenario(4)
def states_of_another_place_are_refused() -> None:
    mesh = mesh_of(dp=2, tp=2)
    handle, loaded, flat = trained(mesh, "dp"), sharded(mesh, "dp"), sharded(mesh_of(dp=4, tp=1), "dp")
    states, tp = laws.of_all_ranks(handle.state_dict()), mesh.get_local_rank("tp")
    own = states[RANK]
    for target, given, words in (
        (loaded, states[RANK ^ 1], (f"this rank is tp {tp} of 2", f"of tp {1 - tp} of 2")),
        (loaded, [*states, own], ("5 states for 4 places", f"tp {tp} of 2", "one run")),
        (loaded, [*states, *states], ("8 states for 4 places", "one run")),
        (loaded, without_mesh(states), ("4 states for 2 places", "one run")),
        (loaded, without_mesh([own])[0], ("another mesh", f"state['mesh'] = {{'tp': ({tp}, 2)}}")),
        (loaded, [own, {**states[RANK ^ 2], "shard": (0, 3)}], ("shard 0 of 3", "one run")),
        (flat, states, ("another mesh", "tp 0 of 2; tp 1 of 2", "data parallel ranks only")),
        (flat, states[0], ("another mesh", "tp 0 of 2"))):
        refused(lambda: target.load_state_dict(given), gradwire.BadArgument, *words)
    check(loaded.state_dict()["tensors"] == {}, "a refused state was loaded")
    loaded.load_state_dict({**without_mesh([own])[0], "mesh": {"tp": (tp, 2)}})
    check(same(loaded.state_dict(), own), "a state with its place added")
    # Without other dimensions, states need not have the key.
    alone = trained(mesh_of(dp=4), "dp")
    state = alone.state_dict()
    check(state["mesh"] == {}, f"mesh {state['mesh']}")
    for given in (without_mesh(laws.of_all_ranks(state)), without_mesh([state])[0]):
        alone.load_state_dict(given)
        check(same(alone.state_dict(), state), "a state without the key")
    for each in (handle, loaded, flat, alone):
        each.close()
    say("refused by name: another tensor parallel rank's state, two states of one place, another mesh")


@scenario(4)
def the_hooks_state_names_its_tensor_parallel_rank() -> None:
    mesh = mesh_of(dp=2, tp=2)
    ddps = [nn.parallel.DistributedDataParallel(model_on(mesh), device_mesh=mesh["dp"]) for _ in range(2)]
    hook, other = (compress_ddp(ddp, "int4:dense=off", timeout_s=60) for ddp in ddps)
    backward(ddps[0], mesh)
    tp, state = mesh.get_local_rank("tp"), hook.state_dict(gather=False)
    check(state["mesh"] == {"tp": (tp, 2)}, f"mesh {state['mesh']}")
    gathered = laws.of_all_ranks(hook.state_dict())  # by each data parallel group's rank 0
    for given in (gathered, [*gathered[:2]], gathered[tp], state):
        other.load_state_dict(given)
        check(same(other.state_dict(gather=False), state), "another rank's state")
    for given, words in ((gathered[1 - tp], f"this rank is tp {tp} of 2"),
                         ([state, state], "2 states for 1 places")):
        refused(lambda: other.load_state_dict(given), gradwire.BadArgument, words)
    with tempfile.TemporaryDirectory() as made:
        folder = laws.of_all_ranks(made)[0]
        save({"hook": hook.checkpoint()}, checkpoint_id=folder)
        again, flat = Hook("int4:dense=off", model=ddps[1]), Hook("int4:dense=off", model=Parts())
        load({"hook": again.checkpoint(load_from=folder)}, checkpoint_id=folder)
        check(same(again.state_dict(gather=False), state), f"the checkpoint of tp {tp}")
        refused(lambda: load({"hook": flat.checkpoint(load_from=folder)}, checkpoint_id=folder),
                gradwire.BadArgument, f"rank {RANK} of 4", "hooks of no ranks")
        dist.barrier()
    for each in (hook, other, again, flat):
        each.close()
