"""Trains with DistributedDataParallel, in FP32 and with compressed gradients, and compares time and bytes.

    python ddp.py [SPEC]                      # starts two ranks on this machine; SPEC: int8
    torchrun --nproc-per-node 4 ddp.py [SPEC]

Ranks on one machine do not wait for a network, so compression saves bytes but seldom time. Run the program on
two machines (docs/running.md), or ask `python -m gradwire.doctor --model` what your model would gain.
"""
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import compress


def train(spec, steps=60, warm_up=20):
    """Trains a new model; spec None: without Gradwire. Returns its loss, ms per step, and hook.stats()."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024),
                                torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    ddp_model = DistributedDataParallel(model)
    hook = compress(ddp_model, spec) if spec else None
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own examples
    for step in range(steps):
        if step == warm_up:
            begin = time.perf_counter()
        x = torch.randn(64, 256, generator=data)
        loss = torch.nn.functional.cross_entropy(ddp_model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # averages the gradients
        optimizer.step()
    return loss.item(), 1000 * (time.perf_counter() - begin) / (steps - warm_up), hook and hook.stats()


def main(rank=-1, spec="int8", rendezvous="env://"):
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2 if rank >= 0 else -1)
    torch.set_num_threads(1)
    (plain_loss, plain_ms, _), (loss, ms, stats) = train(None), train(spec)
    if dist.get_rank() == 0:
        row = "{:16} {:8.2f} ms per step {:12,} bytes  loss {:.4f}"
        print(row.format("fp32", plain_ms, stats["dense_bytes"], plain_loss))
        print(row.format(spec, ms, stats["wire_bytes"], loss))
        print(f"{spec} sends 1/{stats['ratio']:.2f} of the bytes; a step takes {ms / plain_ms:.2f} times as long")
    dist.destroy_process_group()


if __name__ == "__main__":
    SPEC = sys.argv[1] if len(sys.argv) > 1 else "int8"
    if "RANK" in os.environ:  # set by torchrun
        main(spec=SPEC)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, (SPEC, f"file://{folder}/ranks"), nprocs=2)
