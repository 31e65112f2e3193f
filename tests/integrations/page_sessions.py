"""Defines the type of the sessions of page_examples.py, and training in PyTorch."""
from __future__ import annotations

import os
from typing import Any, Callable, List, NamedTuple

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS = 30


class Session(NamedTuple):
    """Some examples of a page, which run in one set of ranks.

    Attributes:
        world: the number of ranks; 0: runs in the test's process.
        run: (the examples' texts, HOST:PORT for a rendezvous); for world 0 (texts, the build folder).
        examples: the beginning of each example.
        missing: returns why the session cannot run with this version of the framework; "" if it can.
    """

    world: int
    run: Callable[..., None]
    examples: List[str]
    missing: Callable[[], str] = lambda: ""


def needs_torch(*oldest: int) -> Callable[[], str]:
    def missing() -> str:
        import torch
        found = tuple(int(part) for part in torch.__version__.split(".")[:2])
        return ("" if found >= oldest
                else f"PyTorch {torch.__version__} is older than {'.'.join(map(str, oldest))}")

    return missing


def torch_model() -> Any:
    import torch
    torch.manual_seed(1)  # the same on every rank

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(300, 300) for _ in range(2)])
            self.head = torch.nn.Linear(300, 1)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = torch.relu(block(x))
            return self.head(x)

    return Model()


def train_torch(model: Any) -> None:
    """Trains, and checks that the loss falls or stays small."""
    import torch
    optimizer = torch.optim.Adam(model.parameters(), 0.002)
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(RANK))  # different on every rank

    def step(_: int) -> float:
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = [step(number) for number in range(STEPS)]
    assert losses[-1] < max(losses[0] / 2, 0.02), losses


def same_on_all_ranks(values: Any) -> None:
    import torch.distributed as dist
    everyones: List[Any] = [None] * WORLD
    dist.all_gather_object(everyones, values)
    assert all(v == everyones[0] for v in everyones)
