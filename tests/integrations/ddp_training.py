"""Provides the scenarios of ddp_ranks.py with models and a training run with a hook."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.vision_transformer import VisionTransformer

from gradwire.torch import allreduce_hook

from rank import RANK, WORLD, check



class Task(NamedTuple):
    build: Callable[[], nn.Module]
    image: int
    batch: int


def small_vit() -> nn.Module:
    model = VisionTransformer(image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=128,
                              mlp_dim=256, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # torchvision's zeros would hide all earlier layers
    return model


# ResNet-18's 11 million parameters take minutes on 4 ranks, and test nothing more than on 2 ranks.
CONVOLUTIONS = "resnet18" if WORLD == 2 else "resnet10"
TASKS = {"resnet18": Task(lambda: resnet18(num_classes=10), 64, 4), "vit": Task(small_vit, 32, 4),
         "resnet10": Task(lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), 64, 4)}


def batch_of(task: Task, step: int, rank: int = RANK) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    return (torch.randn(task.batch, 3, task.image, task.image, generator=generator),
            torch.randint(10, (task.batch,), generator=generator))


class Run:
    """A model under DDP, with or without a hook."""

    def __init__(self, task: Task, hook: Any = None, function: Any = allreduce_hook,
                 model: Optional[nn.Module] = None, lr: float = 0.01, **ddp_options: Any) -> None:
        torch.manual_seed(7)
        self.task = task
        self.model = model if model is not None else task.build()
        self.ddp = DistributedDataParallel(self.model, broadcast_buffers=False, **ddp_options)
        if hook is not None:
            self.ddp.register_comm_hook(hook, function)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr, momentum=0.9)

    def step(self, step: int, accumulate: int = 1) -> None:
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        for k in range(accumulate):
            images, labels = batch_of(self.task, step * accumulate + k)
            if k + 1 < accumulate:
                with self.ddp.no_sync():
                    nn.functional.cross_entropy(self.ddp(images), labels).backward()
            else:
                nn.functional.cross_entropy(self.ddp(images), labels).backward()
        self.optimizer.step()

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters()]).clone()


def same_on_all_ranks(tensor: torch.Tensor, what: str) -> None:
    everybody = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(everybody, tensor.contiguous())
    check(all(torch.equal(everybody[0], other) for other in everybody), f"{what} differs between ranks")
