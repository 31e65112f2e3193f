"""The examples of docs/for-fsdp.md."""
from __future__ import annotations

from typing import Any, Dict, List

from page_sessions import RANK, Session, same_on_all_ranks, torch_model, train_torch


def compressed(example: str) -> Dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    names: Dict[str, Any] = {"torch": torch, "fully_shard": fully_shard, "model": torch_model(), "rank": RANK}
    exec(example, names)
    return names


def trains(names: Dict[str, Any]) -> None:
    import torch
    train_torch(names["model"])
    with torch.no_grad():
        same_on_all_ranks([p.full_tensor().tolist() for p in names["model"].parameters()])
    assert names["handle"].residual_bytes > 0


def saves(examples: List[str], _: str) -> None:
    import torch.distributed as dist
    names = compressed(examples[0])
    trains(names)
    exec(examples[1], names)
    trains(names)
    dist.barrier()


def loads(examples: List[str], _: str) -> None:
    names = compressed(examples[0])
    exec(examples[1], names)
    trains(names)


def over_replicas(examples: List[str], _: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from gradwire.fsdp import compress
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    names: Dict[str, Any] = {"compress": compress, "model": fully_shard(torch_model(), mesh=mesh)}
    exec(examples[0], names)
    trains(names)


PRELOAD = ["torch"]
SESSIONS = {
    "4 ranks save": Session(4, saves, ["from gradwire.fsdp import compress", "torch.save("]),
    "2 ranks load": Session(2, loads,
                            ["from gradwire.fsdp import compress", "handle.load_state_dict([torch.load("]),
    "2 replicas of 2 ranks": Session(4, over_replicas, [
        'handle = compress(model, gradients="int8", weights="bf16", replicas=']),
}
NOT_RUN: List[Any] = []
