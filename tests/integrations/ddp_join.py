"""Tests uneven inputs under ddp.join() with the hook: a rank without further inputs contributes zeros."""
from __future__ import annotations

from typing import Callable, List

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import compress

from ddp_training import same_on_all_ranks
from rank import RANK, WORLD, check, say


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))


def train(ddp: nn.Module, steps: int, static: bool) -> torch.Tensor:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK)
    with ddp.join(divide_by_initial_world_size=static):
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 32, generator=generator)).square().mean().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def uneven_inputs_are_joined_as_with_torchs_hook() -> None:
    for steps in (2 * RANK, 3 + RANK):  # rank 0 without inputs, then all ranks with inputs
        for static in (True, False):
            theirs = DistributedDataParallel(model(), bucket_cap_mb=0.02)
            theirs.register_comm_hook(None, default_hooks.allreduce_hook)
            wanted = train(theirs, steps, static)
            moved = float((wanted - torch.cat([p.detach().flatten() for p in model().parameters()])).norm())
            for spec, limit in (("fp32", 1e-6), ("int8", 0.05)):
                ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
                hook = compress(ddp, spec)
                trained = train(ddp, steps, static)
                off = float((trained - wanted).norm()) / moved
                check(off < limit, f"{spec}: weights are {off:.1e} from those of PyTorch's hook")
                same_on_all_ranks(trained, f"{spec}: the model")
                most = 2 * (WORLD - 1) if steps == 2 * RANK else 3 + WORLD - 1
                check(hook.stats()["steps"] == most, f"{spec}: {hook.stats()['steps']} steps, not {most}")
                hook.close()
    dist.barrier()
    say("join(): as with PyTorch's allreduce_hook, which divides by all ranks")


SCENARIOS: List[Callable[[], None]] = [uneven_inputs_are_joined_as_with_torchs_hook]
