"""Models under DistributedDataParallel with a hook, for the suite ddp."""
from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any, Callable, Dict, Iterator, List, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laws
from gradwire.torch import Hook, allreduce_hook
from rank import RANK, WORLD

TODAY = hasattr(torch, "compile")  # PyTorch 2; Debian 12 has 1.13


def network() -> nn.Module:
    """Returns a model with a convolution, normalizations, and matrices for PowerSGD; 270 kB."""
    torch.manual_seed(7)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.Flatten(),
                         nn.Linear(784, 64), nn.LayerNorm(64), *hidden, nn.Linear(64, 10))


def small() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def ddp_of(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wraps a model. bucket_kb: the size of all buckets, also of DDP's first, which otherwise has 1 MiB."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES
    bucket_kb = options.pop("bucket_kb", None)
    if bucket_kb is not None:
        options["bucket_cap_mb"] = bucket_kb / 1024
        dist._DEFAULT_FIRST_BUCKET_BYTES = int(bucket_kb * 1024)
    try:
        return DistributedDataParallel(model, **options)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(ddp: nn.Module, steps: int = 3, lr: float = 0.1) -> torch.Tensor:
    """Trains a model of 16 inputs, such as small(). Returns the weights."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    return flat(ddp)


def residuals(hook: Hook) -> Dict[str, torch.Tensor]:
    return {name: t["state"]["residual"] for name, t in hook.state_dict(gather=False)["tensors"].items()
            if t["state"].get("residual", torch.empty(0)).numel() > 0}


class Run:
    """A model under DDP, with or without a hook, and its training.

    hook: a spec, a Hook, or None; options: of DistributedDataParallel, and bucket_kb.
    """

    network: Callable[[], nn.Module] = staticmethod(network)

    def __init__(self, hook: Any = None, function: Any = allreduce_hook, lr: float = 0.01,
                 **options: Any) -> None:
        self.model = self.network()
        self.ddp = ddp_of(self.model, **{"broadcast_buffers": False, **options})
        self.hook: Any = Hook(hook) if isinstance(hook, str) else hook
        if self.hook is not None:
            self.hook.name_parameters(self.model)
        if hook is not None:
            self.ddp.register_comm_hook(self.hook, function)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr, momentum=0.9)

    def loss(self, model: nn.Module, number: int, rank: int = RANK) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number * 1000 + rank)
        images = torch.randn(4, 3, 16, 16, generator=generator)
        return nn.functional.cross_entropy(model(images), torch.randint(10, (4,), generator=generator))

    def step(self, number: int, accumulate: int = 1) -> None:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        for k in range(accumulate):
            with self.ddp.no_sync() if k + 1 < accumulate else contextlib.nullcontext():
                self.loss(self.ddp, number * accumulate + k).backward()
        self.optimizer.step()

    def steps(self, first: int, end: int) -> torch.Tensor:
        for number in range(first, end):
            self.step(number)
        return flat(self.model)

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters()]).clone()

    def named(self, values: "Dict[str, torch.Tensor] | None" = None) -> laws.Arrays:
        """Returns an array for each parameter: of `values`, or its gradient; zeros for missing ones."""
        return {name: (values.get(name, torch.zeros(p.numel())) if values is not None else
                       torch.zeros_like(p) if p.grad is None else p.grad).flatten().double().numpy().copy()
                for name, p in self.model.named_parameters()}

    def gradient_of(self, number: int, rank: int = RANK) -> laws.Arrays:
        """Returns the gradient of a rank without DDP."""
        alone = copy.deepcopy(self.model)
        alone.zero_grad(set_to_none=True)
        self.loss(alone, number, rank).backward()
        return {name: (torch.zeros_like(p) if p.grad is None else p.grad).flatten().double().numpy()
                for name, p in alone.named_parameters()}

    def step_without_loss(self, number: int, limit: float = 1e-5, dead: Sequence[int] = ()) -> None:
        """Makes a step, in which ranks may die. Checks that no gradient or residual of the others is lost.

        dead: ranks without residuals that die in the step after all ranks have the means, which include the
        gradients of these ranks.
        """
        before, given = self.named(residuals(self.hook)), self.gradient_of(number)
        extra = [self.gradient_of(number, rank) for rank in dead]
        self.step(number)
        laws.nothing_is_lost(
            f"{self.hook.spec}, step {number}, ranks {self.hook.ranks}", given, before, self.named(),
            self.named(residuals(self.hook)), limit,
            {name: sum(each[name] for each in extra) for name in given} if extra else None,
            self.everyones, len(self.hook.ranks) + len(dead))

    def everyones(self, value: Any) -> List[Any]:
        """Returns the values of the ranks that the hook averages over: the survivors, with min_ranks."""
        if self.hook is None or len(self.hook.ranks) == WORLD:
            return laws.of_all_ranks(value)
        import numpy as np
        import pickle
        comm, mine = self.hook._comm, np.frombuffer(pickle.dumps(value), np.uint8).astype(np.float32)
        if comm.world == 1:
            return [value]
        sizes = np.zeros(comm.world, np.float32)
        comm.all_gather(sizes, np.array([mine.size], np.float32), "fp32")
        everything = np.zeros(int(sizes.sum()), np.float32)
        counts = [int(size) for size in sizes]
        comm.all_gather(everything, mine, "fp32", counts=counts)
        ends = np.cumsum(counts)
        return [pickle.loads(everything[end - count:end].astype(np.uint8).tobytes())
                for end, count in zip(ends, counts)]

    def same_weights(self) -> None:
        laws.ranks_agree("the model", flat(self.model).numpy(), everyones=self.everyones)

    def state(self) -> Dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                              "hook": self.hook.state_dict(gather=False)})

    def load(self, state: Dict[str, Any], hook: bool = True) -> "Run":
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if hook:
            self.hook.load_state_dict(state["hook"])
        return self


class Experts(Run):
    """A common layer and one of four others, with find_unused_parameters; or frozen parameters."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.common = nn.Linear(48, 48, bias=False)
            self.experts = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(4))

        def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
            return self.experts[expert](self.common(inputs))

    network = Network
    # The expert of all ranks in each step. None: the ranks use different experts.
    PLAN = (0, 1, 2, 3, 1, 0, None, 2, None, 0, 1)

    def __init__(self, spec: Any, in_place: bool = False) -> None:
        super().__init__(spec, find_unused_parameters=True, gradient_as_bucket_view=in_place)

    def loss(self, model: nn.Module, number: int, rank: int = RANK) -> torch.Tensor:
        expert = self.PLAN[number]
        inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(100 * number + rank))
        return model(inputs, rank % 4 if expert is None else expert).square().mean()

    def used(self, number: int) -> List[str]:
        expert = self.PLAN[number]
        chosen = {rank % 4 for rank in range(WORLD)} if expert is None else {expert}
        common = ["common.weight"] if self.model.common.weight.requires_grad else []
        return [*common, *(f"experts.{e}.weight" for e in sorted(chosen))]


class Warnings(logging.Handler):
    """Collects Gradwire's log messages, also in a with block."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: List[str] = []
        logging.getLogger("gradwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> List[str]:
        return self.texts

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("gradwire").removeHandler(self)


@contextlib.contextmanager
def closing(*things: Any) -> Iterator[Any]:
    """Closes hooks and communicators at the end of a block without an error."""
    yield things[0] if len(things) == 1 else things
    for thing in things:
        thing.close()
