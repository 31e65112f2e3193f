"""Provides the scenarios of fsdp_ranks.py with a small sharded transformer.

Trains it with or without Gradwire.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradwire._fsdp_state import folded
from gradwire.fsdp import Compression, compress

from rank import RANK, WORLD, check

WORDS, WIDTH, LENGTH, BATCH = 60, 64, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small transformer. `words` is not divisible by the tests' world sizes, so that shards are uneven."""

    def __init__(self, words: int = WORDS + 1, blocks: int = 2) -> None:
        super().__init__()
        self.words = words
        self.embedding, self.position = nn.Embedding(words, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.use_spare = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        if self.use_spare:
            x = x + self.spare(x)
        return self.head(self.norm(x))


def batch_of(step: int, words: int, rank: int = RANK) -> torch.Tensor:
    """Returns (BATCH, LENGTH + 1) words, which differ between steps and ranks.

    Each word is a function of the previous word, plus noise.
    """
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    tokens = [torch.randint(words, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.randint(3, (BATCH,), generator=generator)
        tokens.append((7 * tokens[-1] + 3 + noise) % words)
    return torch.stack(tokens, dim=1)


def loss_of(model: nn.Module, step: int, words: int) -> torch.Tensor:
    tokens = batch_of(step, words)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def new_model(**options: Any) -> Transformer:
    torch.manual_seed(7)
    return Transformer(**options)


class Run:
    """A sharded model and its optimizer.

    arguments: the arguments of compress(); None: PyTorch's collectives.
    """

    def __init__(self, arguments: Optional[Dict[str, Any]] = None, *, model: Optional[Transformer] = None,
                 lr: float = 0.01, before: Callable[[nn.Module],
                                                    None] = lambda model: None, **options: Any) -> None:
        self.model = model if model is not None else new_model()
        before(self.model)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.handle: Optional[Compression] = None
        if arguments is not None:
            self.handle = compress(self.model, **{"timeout_s": 120, **arguments})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def backward(self, step: int, accumulate: int = 1) -> float:
        for k in range(accumulate):
            self.model.set_requires_gradient_sync(k + 1 == accumulate)
            loss = loss_of(self.model, step * accumulate + k, self.model.words)
            loss.backward()
        return float(loss.detach())

    def step(self, step: int, accumulate: int = 1, clip: float = 0.0) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(step, accumulate)
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        return loss

    def parameters(self) -> Dict[str, torch.Tensor]:
        return {n.replace("_orig_mod.", ""): whole(p.detach()) for n, p in self.model.named_parameters()}

    def gradients(self) -> Dict[str, torch.Tensor]:
        return {
            n.replace("_orig_mod.", ""): whole(p.grad)
            for n, p in self.model.named_parameters() if p.grad is not None
        }

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(a: Dict[str, torch.Tensor], b: Dict[str, torch.Tensor]) -> float:
    check(a.keys() == b.keys(), f"parameters {sorted(a.keys() ^ b.keys())} are in one run only")
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total


def residual_sums(handle: Compression) -> Dict[str, torch.Tensor]:
    """Returns the sum over ranks of each parameter's residual, in float64."""
    place, tensors = handle._place()["shard"], handle.state_dict()["tensors"]
    everybody: List[Any] = [None] * WORLD
    dist.all_gather_object(everybody, sorted(tensors))
    names = sorted({name for names in everybody for name in names})  # a rank may have loaded nothing
    return {name: sum_over_ranks(folded(tensors.get(name, {}), place, handle._params[name][0]))
            for name in names}
