#!/usr/bin/python3
"""Tests PyTorch's tensors on a GPU: allreduce_(), the DDP hook and FSDP2, with ranks that share one GPU.

usage: device_test.py WORLD cuda|cpu [SCENARIO...]     cpu: the same on the host, which tests this program

NCCL rejects two ranks on one GPU, unless the ranks seem to be on different hosts. The ranks then send through
sockets, as between nodes. PyTorch's process group is Gloo, which accepts CUDA tensors.
"""
from __future__ import annotations

import os
import pathlib
import sys
import traceback
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import nn

import laws
import launch

SPECS = ["fp32", "bf16", "fp8", "int8", "int4", "mxfp4", "sign", "qsgd:bits=4,block=128", "eden", "topk",
         "powersgd:rank=2", "powersgd:rank=4,wire=bf16", "randk:ratio=0.25"]


def model_on(device: torch.device) -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(),
                         nn.Linear(256, 10)).to(device)


def train(what: str, model: nn.Module, device: torch.device, steps: int = 8) -> torch.Tensor:
    """Trains, and checks that the loss falls. Returns the weights, whole and on the host."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), x[:, :10].argmax(dim=1).to(device))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert steps < 8 or losses[-1] < losses[0], f"{what}: losses {losses}"
    if dist.get_rank() == 0:
        print(f"  {what}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    return torch.cat([getattr(p, "full_tensor", lambda: p)().detach().flatten()
                      for p in model.parameters()]).cpu()


def allreduce_gives_the_bits_of_the_host(device: torch.device) -> None:
    import gradwire.torch
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 4099, 1 << 20):
            for spec in ("fp32", "bf16", "fp8", "int8", "int4", "sign"):
                what, spec = f"{spec} {dtype} {count}", f"{spec}:schedule=two_shot"
                mine = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
                here = gradwire.torch.allreduce_(mine.clone().to(device), spec).cpu()
                laws.ranks_agree(what, here.float().numpy())
                assert torch.equal(here, gradwire.torch.allreduce_(mine, spec)), f"{what}: other bits"


def hooks_train(device: torch.device) -> None:
    import gradwire.torch
    ids = None if device.type == "cpu" else [device.index]

    def ddp() -> nn.Module:
        return nn.parallel.DistributedDataParallel(model_on(device), device_ids=ids, bucket_cap_mb=0.1)

    plain = train("without a hook", ddp(), device)
    for spec in SPECS:
        model = ddp()
        hook = gradwire.torch.compress(model, spec)
        weights = train(spec, model, device)
        stats = hook.stats()  # right after backward and the optimizer, without a synchronization
        assert stats["wire_bytes"] > 0 and stats["comm_ms"] >= 0, f"{spec}: {stats}"
        laws.ranks_agree(f"{spec}: parameters", weights.numpy())
        assert spec != "fp32" or torch.allclose(weights, plain, atol=1e-4), "fp32 is not plain DDP"
        hook.load_state_dict(hook.state_dict())
        train(f"{spec}, loaded", model, device, steps=2)
        hook.check()
        hook.close()


def fsdp_trains(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import gradwire.fsdp
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for spec in ("fp32", "bf16", "int8", "int4"):
        model = model_on(device)
        for layer in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(layer, mesh=mesh)
        handle = gradwire.fsdp.compress(model, spec)
        train(f"fully_shard, {spec}", model, device)
        handle.close()


SCENARIOS: Dict[str, Callable[[torch.device], None]] = {
    function.__name__: function
    for function in (allreduce_gives_the_bits_of_the_host, hooks_train, fsdp_trains)
}


def run_rank(kind: str, names: List[str]) -> int:
    rank = int(os.environ["RANK"])
    os.environ.update(NCCL_HOSTID=f"{os.getppid()}-{rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="=lo",
                      NCCL_IB_DISABLE="1", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_NVLS_ENABLE="0",
                      NCCL_MAX_CTAS="2")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    failed = 0
    for name in names:
        try:
            SCENARIOS[name](device)
            result = "ok"
        except Exception:  # run the next scenario anyway
            traceback.print_exc()
            result, failed = "FAILED", 1
        print(f"rank {rank}: {name}: {result}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return failed


def main() -> int:
    if "RANK" in os.environ:
        return run_rank(sys.argv[2], sys.argv[3:])
    world, kind, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(SCENARIOS)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        names = [name for name in names if name != "fsdp_trains"]
    codes = launch.run_ranks(pathlib.Path(__file__), world, [str(world), kind, *names], timeout_s=200)
    print("PASSED" if not any(codes) else f"FAILED: ranks ended with {codes}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
