"""Runs a rank of torchrun_test.py for 200 steps. The rank continues when a machine is lost."""
from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import compress


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} is process {os.getpid()} and begins at step 0",
          flush=True)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    hook = compress(model, "int8", min_ranks=2)
    x = torch.randn(4, 64)
    for step in range(200):
        model(x).square().mean().backward()
        print(f"step {step} of 200, {len(hook.ranks)} ranks, loss 0", flush=True)
        time.sleep(0.1)
    print("done: 200 steps", flush=True)
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
