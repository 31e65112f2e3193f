"""Tests gradwire.torch.compress(), also under torch.compile(), and the models that it rejects."""
from __future__ import annotations

from typing import Callable, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch import Hook, allreduce_hook, compress

from ddp_training import same_on_all_ranks
from rank import RANK, WORLD, check, refused, say

TODAY = hasattr(torch, "compile")  # PyTorch 1.13 has neither torch.compile() nor FSDP2


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def train(ddp: nn.Module, steps: int = 3) -> torch.Tensor:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def one_line_is_the_hook() -> None:
    ddp = DistributedDataParallel(model())
    spec = "int8:schedule=ring"  # schedule=auto could choose differently for each run
    hook = Hook(spec, model=ddp)
    ddp.register_comm_hook(hook, allreduce_hook)
    long = train(ddp)
    shorter = DistributedDataParallel(model())
    ours = compress(shorter, spec)
    check(
        isinstance(ours, Hook) and torch.equal(train(shorter), long),
        "compress() trains other weights than its hook")
    same_on_all_ranks(long, "the model")
    names = {name for name, _ in model().named_parameters()}
    check(ours.state_dict()["tensors"].keys() == names, f"names: {sorted(ours.state_dict()['tensors'])}")
    check(ours.stats()["wire_bytes"] < ours.stats()["dense_bytes"] / 2,
          f"nothing was compressed: {ours.stats()}")
    ours.close()
    hook.close()
    say("compress(ddp, 'int8') trains the same bits as the hook, under the model's names")


def it_averages_over_the_models_own_group() -> None:
    check(WORLD == 4, "this scenario needs 4 ranks")
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(model(), process_group=pairs[RANK % 2])
    hook = compress(ddp, "fp32")
    parameters = train(ddp, 1)
    everybody = [torch.empty_like(parameters) for _ in range(WORLD)]
    dist.all_gather(everybody, parameters)
    equal = [torch.equal(parameters, other) for other in everybody]
    check(equal == [rank % 2 == RANK % 2 for rank in range(WORLD)], f"same weights as ranks {equal}")
    hook.close()
    say("two models on two groups: each is averaged over its own")


def compiled_models_keep_their_names() -> None:
    if not TODAY:
        return
    eager = DistributedDataParallel(model())
    wanted = train(eager)
    for wrap in (lambda m: torch.compile(DistributedDataParallel(m), backend="aot_eager"),
                 lambda m: DistributedDataParallel(torch.compile(m, backend="aot_eager"))):
        compiled = wrap(model())
        hook = compress(compiled, "fp32")
        off = float((train(compiled) - wanted).abs().max())
        check(off <= 1e-6, f"compiled weights differ from eager ones by {off:.1e}")
        names = {name for name, _ in model().named_parameters()}
        check(hook.state_dict()["tensors"].keys() == names, f"names: {sorted(hook.state_dict()['tensors'])}")
        hook.close()
    say("compiled around DDP and inside: the same weights, and the model's own names")


class Fabric(nn.Module):
    """A wrapper like Lightning Fabric's."""

    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self._forward_module = ddp


class Trainer:
    """A trainer like transformers': it has the model and the wrapped model."""

    def __init__(self, ddp: nn.Module) -> None:
        self.model, self.model_wrapped, self.arguments = ddp.module, ddp, {"lr": 0.1}


class Lightning:
    """A trainer like Lightning's: its strategy has the model."""

    def __init__(self, ddp: nn.Module) -> None:
        self.strategy = Trainer(ddp)


def it_finds_the_one_ddp() -> None:
    for wrap in (Fabric, Trainer, Lightning, lambda ddp: ddp.module, lambda ddp: nn.Sequential(ddp)):
        ddp = DistributedDataParallel(model())
        hook = compress(wrap(ddp))
        train(ddp, 1)
        check(hook.spec == "int8" and hook.stats()["steps"] == 1, f"{wrap}: {hook.spec}, {hook.stats()}")
        hook.close()
    check(Hook().spec == "int8", "Hook() and compress() have different defaults")
    bad = gradwire.BadArgument
    two = nn.ModuleList([DistributedDataParallel(model()), DistributedDataParallel(model())])
    refused(lambda: compress(two), bad, "ModuleList has 2", "compress() for each")
    refused(lambda: compress(nn.DataParallel(model())), bad,
            "DataParallel(Sequential) is not a DistributedDataParallel")
    refused(lambda: compress(torch.optim.SGD(model().parameters(), lr=1.0)), bad, "SGD is not a model")
    say("compress() finds the one DDP in what it is given, and names what it got where there is none")


def the_profiler_shows_each_bucket() -> None:
    ddp = DistributedDataParallel(model())
    hook = compress(ddp, "int8:schedule=ring")
    train(ddp, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(ddp, 3)
    ranges = [event for event in profile.events() if event.name.startswith("gradwire ")]
    size = 4 * sum(p.numel() for p in ddp.parameters())
    name = f"gradwire int8:schedule=ring: DDP bucket 0, {size} bytes"
    check([event.name for event in ranges] == [name] * 3,
          f"{[event.name for event in ranges]}, not 3 of {name}")
    shortest, took = min(event.time_range.elapsed_us() for event in ranges), hook.stats()["comm_ms"] * 1e3
    check(shortest > 0 and took > 0, f"a range of {shortest} us, {took} us of communication")
    hook.close()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradwire.allreduce_(torch.ones(5), "bf16")
    names = [event.name for event in profile.events() if event.name.startswith("gradwire ")]
    check(names == ["gradwire bf16: allreduce_, 20 bytes"], f"{names}")
    say(f"torch.profiler: {name}")


def what_it_cannot_compress_is_refused() -> None:
    bad = gradwire.BadArgument
    refused(lambda: compress(model()), bad, "wrap the model first", "DistributedDataParallel(model)")
    refused(lambda: compress([model()]), bad, "list is not a model")  # type: ignore[arg-type]
    ddp = DistributedDataParallel(model())
    refused(lambda: compress(ddp, "int3"), bad, "int3")
    first = compress(ddp)
    refused(lambda: compress(ddp), bad, "hook")
    check(bool(train(ddp, 1).isfinite().all()), "the first hook no longer works")
    first.close()
    if TODAY:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        sharded = model()
        fully_shard(sharded)
        refused(lambda: compress(sharded), bad, "gradwire.fsdp.compress")
        refused(lambda: compress(FullyShardedDataParallel(model(), device_id=torch.device("cpu"))), bad,
                "FSDP1", "gradwire.fsdp.compress")
        python_reducer_is_refused()
    say("whatever is not a DistributedDataParallel is refused, with what to use")


def python_reducer_is_refused() -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp = DistributedDataParallel(model())
        refused(lambda: compress(ddp), gradwire.Unsupported, "python_reducer", "set it to True")
        hook = Hook("fp32")
        ddp.register_comm_hook(hook, allreduce_hook)
        if torch.__version__ >= (2, 9):  # earlier versions use python_reducer in compiled programs only
            refused(lambda: train(ddp, 1), gradwire.Unsupported, "python_reducer", "set it to True")

        @torch.compile(backend="aot_eager")
        def step() -> None:
            ddp(torch.ones(8, 16)).mean().backward()

        torch._dynamo.config.compiled_autograd = True
        refused(step, gradwire.Unsupported, "python_reducer", "set it to True")
        hook.close()
    finally:
        torch._dynamo.config.compiled_autograd = False
        torch._dynamo.config.optimize_ddp = True


SCENARIOS: List[Callable[[], None]] = [one_line_is_the_hook, it_averages_over_the_models_own_group,
                                       it_finds_the_one_ddp, the_profiler_shows_each_bucket,
                                       compiled_models_keep_their_names, what_it_cannot_compress_is_refused]
