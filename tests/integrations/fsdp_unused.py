"""Tests parameters that no rank, or only some ranks, use in a step: nothing is lost, and their state waits."""
from __future__ import annotations

import copy
from typing import Any, Dict, Tuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradwire.fsdp import compress

from fsdp_low_rank import Matrices, gradients_of, mean, meshes, name_of
from fsdp_training import residual_sums, whole
from rank import RANK, WORLD, check, say

SHAPES = {"even": (96, 64), "uneven": (61, 40), "bias": (50,)}
# The experts in use, by step, and those with a zero gradient on odd ranks.
USED = ((0, 1), (0,), (1,), (1,), (), (0, 1), (0,), (0, 1))
ZERO = ((), (), (1,), (), (), (0,), (0,), ())

Gradients = Dict[str, torch.Tensor]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Matrices(SHAPES) for _ in range(2))

    def forward(self, gradients: Dict[int, Gradients]) -> torch.Tensor:
        return sum(self.experts[i](own) for i, own in gradients.items())


def _gradients(step: int) -> Dict[int, Gradients]:
    found = {i: gradients_of(i, step, SHAPES) for i in USED[step]}
    for i in ZERO[step] if RANK % 2 else ():
        found[i] = {name: torch.zeros_like(g) for name, g in found[i].items()}
    return found


def _violation(mesh: Any, blockwise: bool, arguments: Dict[str, Any]) -> float:
    """Returns the largest share of a parameter's sum of gradients that is neither applied nor in residuals."""
    model = Experts()
    for expert in model.experts if blockwise else ():
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = compress(model, **{"weights": "fp32", "dense": False, "timeout_s": 60, **arguments})
    lost, total = {}, {}
    for step in range(len(USED)):
        before, own = copy.deepcopy(handle.state_dict()["tensors"]), _gradients(step)
        model.zero_grad(set_to_none=step % 2 == 0)
        if own:
            model(own).backward()
        after = handle.state_dict()["tensors"]
        for name, parameter in model.named_parameters():
            i, short = int(name.split(".")[1]), name.rpartition(".")[2]
            if i not in own:
                for kind in {"residual", "replica_residual", "factor"} & before.get(name, {}).keys():
                    check(torch.equal(before[name][kind], after[name][kind]),
                          f"{kind} of {name}, step {step}")
                continue
            went_in = WORLD * mean({short: own[i][short]})[short]
            lost[name] = lost.get(name, 0) + went_in - WORLD * whole(parameter.grad).double()
            total[name] = total.get(name, 0) + went_in
    sums = residual_sums(handle)
    kept = [float(e.norm()) for e in sums.values()]
    check(max(kept) > 0, "nothing was lost in any format, so nothing was compressed")
    handle.close()
    return max(float((lost[name] - sums.get(name, 0)).norm() / total[name].norm()) for name in total)


def unused_parameters_keep_their_state_and_lose_nothing() -> None:
    cases: Tuple[Tuple[Any, Dict[str, Any]], ...] = tuple(
        (None, {"gradients": spec}) for spec in ("int8", "int4:rotate=hadamard", "topk:k=4,of=64"))
    cases += tuple((mesh, {"gradients": gradients, "replicas": replicas}) for mesh in meshes()
                   for gradients, replicas in (("fp32", "powersgd:rank=2"), ("int8", "int4"),
                                               ("int8", "powersgd:rank=2,wire=int8")))
    for mesh, arguments in cases:
        for blockwise in (True, False):
            worst = _violation(mesh, blockwise, arguments)
            what = f"{name_of(mesh) if mesh is not None else WORLD}, {arguments}, {blockwise=}"
            check(worst < 1e-6, f"{what}: lost {worst:.1e}")
            say(f"{what}: after 8 steps lost {worst:.1e}")
