"""DistributedDataParallel over the registered backend: compiled, with PyTorch's hooks, with uneven inputs."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import register_backend

from rank import RANK, WORLD, check, say


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))


def group_of_small_tensors() -> Any:
    """Creates a group that compresses tensors of any size, except tensors of one element or other types."""
    register_backend("int8", reduce_scatter="int8", all_gather="bf16", min_bytes=1, name="small")
    return dist.new_group(backend="small")


def train(step: Callable[[torch.Tensor], torch.Tensor], parameters: List[torch.Tensor],
          steps: int = 4) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        optimizer.zero_grad()
        step(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def near(trained: nn.Module, wanted: torch.Tensor, what: str, limit: float = 0.05) -> None:
    """Checks that the weights are close to `wanted`, and the same on every rank.

    limit: the largest difference, relative to the distance that training moved the weights.
    """
    off = float((flat(trained) - wanted).norm() / (wanted - flat(model())).norm())
    check(off < limit, f"{what}: the weights are {off:.1e} off")
    first = flat(trained)
    dist.broadcast(first, 0)
    check(torch.equal(first, flat(trained)), f"{what}: the weights differ from rank 0's")


def compiled_models_train_as_over_gloo() -> None:
    gloo, small = dist.new_group(backend="gloo"), group_of_small_tensors()
    plain = DistributedDataParallel(model(), process_group=gloo)
    train(plain, list(plain.parameters()))
    cases: Dict[str, Callable[[nn.Module], nn.Module]] = {
        "around": lambda m: torch.compile(
            DistributedDataParallel(m, process_group=small), backend="aot_eager"),
        "inside": lambda m: DistributedDataParallel(
            torch.compile(m, backend="aot_eager"), process_group=small),
        "without the optimizer for DDP": lambda m: torch.compile(
            DistributedDataParallel(m, process_group=small), backend="aot_eager")}
    for name, wrap in cases.items():
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = "without" not in name
        before, net = small.compressed, model()
        train(wrap(net), list(net.parameters()))
        check(small.compressed > before, f"compiled {name}: nothing was compressed")
        near(net, flat(plain), f"compiled {name}")
    torch._dynamo.config.optimize_ddp = True
    say("torch.compile() around DDP and inside: trained as over Gloo")


def hooks_of_pytorch_work() -> None:
    gloo, small = dist.new_group(backend="gloo"), group_of_small_tensors()
    hooks: List[Tuple[Callable[[Any], Any], Any]] = [
        (lambda group: group, default_hooks.allreduce_hook),
        (lambda group: group, default_hooks.bf16_compress_hook),
        (lambda group: powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2),
         powerSGD_hook.powerSGD_hook),  # its callbacks start sums and wait for them
        (lambda group: group, quantization_hooks.quantization_pertensor_hook)]
    for state_of, hook in hooks:
        trained = []
        for group in (gloo, small):
            ddp = DistributedDataParallel(model(), process_group=group)
            ddp.register_comm_hook(state_of(group), hook)
            train(ddp, list(ddp.parameters()))
            trained.append(ddp)
        near(trained[1], flat(trained[0]), hook.__name__, 0.1)
    say("PyTorch's hooks over the backend, PowerSGD's among them")


def uneven_inputs_are_joined() -> None:
    gloo, small = dist.new_group(backend="gloo"), group_of_small_tensors()
    for static in (True, False):
        trained = []
        for group in (gloo, small):
            ddp = DistributedDataParallel(model(), process_group=group)
            with ddp.join(divide_by_initial_world_size=static):
                train(ddp, list(ddp.parameters()), steps=2 * RANK)  # rank 0 has no inputs
            trained.append(ddp)
        near(trained[1], flat(trained[0]), f"join(divide_by_initial_world_size={static})")
    before = small.compressed
    one = torch.ones(1)
    work = dist.all_reduce(one, group=small, async_op=True)
    work.wait()
    check(float(one) == WORLD and small.compressed == before, "a single number was compressed")
    say("uneven inputs under join(), dividing by all ranks and by those that are left")


def the_profiler_shows_calls() -> None:
    small = group_of_small_tensors()
    values, whole = torch.ones(WORLD * 6), torch.empty(WORLD * WORLD * 6)
    calls: List[Tuple[str, int, Callable[[], Any]]] = [
        ("gradwire int8: all_reduce", WORLD * 24, lambda: dist.all_reduce(values, group=small)),
        ("gradwire int8: reduce_scatter", WORLD * 24,
         lambda: dist.reduce_scatter_tensor(torch.empty(6), values, group=small)),
        ("gradwire bf16: all_gather", WORLD * WORLD * 24,
         lambda: dist.all_gather_into_tensor(whole, values, group=small))
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _, _, call in calls:
            call()
    names = [event.name for event in profile.events() if event.name.startswith("gradwire ")]
    check(names == [f"{name}, {size} bytes" for name, size, _ in calls], f"ranges: {names}")
    say(f"torch.profiler: {', '.join(names)}")


SCENARIOS: List[Callable[[], None]] = [compiled_models_train_as_over_gloo, hooks_of_pytorch_work,
                                       uneven_inputs_are_joined, the_profiler_shows_calls]
