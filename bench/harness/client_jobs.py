"""What the frameworks of docs/for-trainers.md train, for client_training.py and client_ray.py."""
from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import nn

Tensors = Tuple[torch.Tensor, torch.Tensor]


class Problem(NamedTuple):
    """A network, a loss and examples: `steps` batches per epoch for each rank.

    Attributes:
        network: the same weights on every rank, also in another process.
        examples: (number, seed) -> inputs and targets.
    """

    network: Callable[[], nn.Module]
    examples: Callable[[int, int], Tensors]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: int
    steps: int
    sgd: float
    adamw: float

    def data(self, world: int) -> Tensors:
        return self.examples(self.batch * world * self.steps, 2)

    def batches(self, rank: int, world: int) -> List[Tensors]:
        x, y = (t.view(self.steps, world, self.batch, *t.shape[1:]) for t in self.data(world))
        return [(x[step, rank], y[step, rank]) for step in range(self.steps)]


def _regression() -> Problem:
    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 1))

    def examples(number: int, seed: int) -> Tensors:
        x = torch.randn(number, 60, generator=torch.Generator().manual_seed(seed))
        return x, torch.sin(x[:, :1]) + x[:, 1:2]

    return Problem(network, examples, nn.functional.mse_loss, 8, 4, 0.1, 0.01)


def _language(size: str, batch: int, steps: int) -> Problem:
    from harness import pytorch_training
    sizes: Dict[str, int] = getattr(pytorch_training, size)

    def network() -> nn.Module:
        torch.manual_seed(1)
        return pytorch_training.Transformer(**sizes)

    def examples(number: int, seed: int) -> Tensors:
        tokens = pytorch_training.sentences(number, sizes["words"], sizes["length"],
                                            torch.Generator().manual_seed(seed))
        return tokens[:, :-1], tokens[:, 1:]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return Problem(network, examples, loss, batch, steps, 0.05, 0.002)


PROBLEMS: Dict[str, Callable[[], Problem]] = {
    "regression": _regression,
    "language": lambda: _language("LOSS_MODEL", 8, 300),
    "speed": lambda: _language("SPEED_MODEL", 1, 8),
    "tiny": lambda: _language("SMOKE_MODEL", 2, 4),
}


class Job(NamedTuple):
    """A training run.

    Attributes:
        spec: "": without Gradwire.
        folder: of the checkpoint after the first epoch. "": saves none.
        resume: continues after the first epoch, from the checkpoint. Ray: a worker is killed in the second
            epoch, and the record is that of the workers that replace it.
        used: called at the end with the framework's trainer, if there is one.
    """

    problem: str
    spec: str
    epochs: int = 1
    folder: str = ""
    resume: bool = False
    used: Callable[[Any], None] = lambda trainer: None


class Record:
    """The loss and the time of each step on this rank, and the weights at the end."""

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.times: List[float] = []
        self.weights: List[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss.detach()))
        self.times.append(time.monotonic())

    def end(self, model: nn.Module) -> "Record":
        self.weights = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # type: ignore
                        for p in model.parameters()]
        return self


def ranks() -> Tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train_loop(job: Job, record: Record, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
               save: Callable[[], None],
               before: Callable[[int, int], None] = lambda epoch, number: None) -> None:
    """Runs `step` on the batches of this rank, from the first epoch or, resumed, from the second."""
    batches = PROBLEMS[job.problem]().batches(*ranks())
    for epoch in range(int(job.resume), job.epochs):
        for number, (x, y) in enumerate(batches):
            before(epoch, number)
            record.add(step(x, y))
        if epoch == 0 and job.folder:
            save()
