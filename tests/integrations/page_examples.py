#!/usr/bin/env python3
"""The first example of a page in docs/, run as printed by two ranks, which then train with it.

usage: page_examples.py PAGE    for-pytorch, for-fsdp or for-jax; by the Python that has the framework
"""
from __future__ import annotations

import functools
import os
import pathlib
import sys
from typing import Any, Callable, Dict, List

import launch

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
WORLD, STEPS = 2, 30


def first_example(page: str) -> str:
    """The first indented lines of the page."""
    lines: List[str] = []
    for line in (DOCS / f"{page}.md").read_text().splitlines():
        if line.startswith("    ") or (lines and not line):
            lines.append(line[4:])
        elif lines:
            break
    return "\n".join(lines)


def learns(step: Callable[[int], float]) -> None:
    losses = [step(number) for number in range(STEPS)]
    assert losses[-1] < losses[0] / 2, losses


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
    import torch
    optimizer = torch.optim.Adam(model.parameters(), 0.002)
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))  # each its own examples

    def step(_: int) -> float:
        loss = torch.nn.functional.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    learns(step)


def same_on_all_ranks(values: Any) -> None:
    import torch.distributed as dist
    everyones: List[Any] = [None] * WORLD
    dist.all_gather_object(everyones, values)
    assert all(v == everyones[0] for v in everyones)


def for_pytorch(example: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    names: Dict[str, Any] = {"DistributedDataParallel": DistributedDataParallel, "model": torch_model()}
    exec(example, names)
    train_torch(names["ddp_model"])
    same_on_all_ranks([p.detach().tolist() for p in names["ddp_model"].parameters()])
    stats = names["hook"].stats()
    assert 0 < stats["wire_bytes"] < stats["dense_bytes"] / 3, stats


def for_fsdp(example: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    names: Dict[str, Any] = {"fully_shard": fully_shard, "model": torch_model()}
    exec(example, names)
    train_torch(names["model"])
    with torch.no_grad():
        same_on_all_ranks([p.full_tensor().tolist() for p in names["model"].parameters()])
    assert names["handle"].residual_bytes > 0


def for_jax(example: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import multihost_utils
    # What a launcher tells it elsewhere.
    jax.distributed.initialize = functools.partial(
        jax.distributed.initialize, f"127.0.0.1:{os.environ['MASTER_PORT']}", WORLD, int(os.environ["RANK"]))
    names: Dict[str, Any] = {"jax": jax, "optax": optax}
    exec(example, names)
    optimizer = names["optimizer"]
    weights = jnp.zeros((300, 300))
    state = optimizer.init(weights)
    generator = np.random.default_rng(int(os.environ["RANK"]))

    @jax.jit
    def update(weights: Any, state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(weights)
        updates, state = optimizer.update(gradient, state, weights)
        return loss, optax.apply_updates(weights, updates), state

    for number in range(10 * STEPS):
        loss, weights, state = update(weights, state, generator.standard_normal((64, 300), np.float32))
        first = float(loss) if number == 0 else first
    assert float(loss) < 0.7 * first, (first, float(loss))
    everyones = np.asarray(multihost_utils.process_allgather(np.asarray(weights)))
    assert (everyones[0] == everyones[1]).all()
    names["gradwire"].jax.shutdown()


def main() -> int:
    page = sys.argv[1]
    example = first_example(page)
    if "RANK" in os.environ:
        {"for-pytorch": for_pytorch, "for-fsdp": for_fsdp, "for-jax": for_jax}[page](example)
        return 0
    print(example, flush=True)
    codes = launch.run_ranks(pathlib.Path(__file__), WORLD, [page], timeout_s=200)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
