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

STEPS, WARM_UP = 60, 20


def train(spec):
    """Trains a new model; spec None: without Gradwire. Returns (loss, ms per step, hook.stats())."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024),
                                torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    ddp_model = DistributedDataParallel(model)
    hook = compress(ddp_model, spec) if spec else None
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own examples
    for step in range(STEPS):
        if step == WARM_UP:
            begin = time.perf_counter()
        x = torch.randn(64, 256, generator=data)
        loss = torch.nn.functional.cross_entropy(ddp_model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # averages the gradients
        optimizer.step()
    ms = 1000 * (time.perf_counter() - begin) / (STEPS - WARM_UP)
    stats = hook.stats() if hook else {}
    if hook:
        hook.close()
    return loss.item(), ms, stats


def main(rank=-1, spec="int8", rendezvous=""):
    where = {"init_method": rendezvous, "rank": rank, "world_size": 2} if rendezvous else {}
    dist.init_process_group("gloo", **where)  # under torchrun: its environment variables
    torch.set_num_threads(1)
    plain_loss, plain_ms, _ = train(None)
    loss, ms, stats = train(spec)
    if dist.get_rank() == 0:
        for name, *row in (("fp32", plain_ms, stats["dense_bytes"], plain_loss),
                           (spec, ms, stats["wire_bytes"], loss)):
            print("{:16} {:8.2f} ms per step {:12,} bytes  loss {:.4f}".format(name, *row))
        print(f"{spec} sends 1/{stats['ratio']:.2f} of the bytes; a step takes {ms / plain_ms:.2f} times as long")
    dist.destroy_process_group()


if __name__ == "__main__":
    SPEC = sys.argv[1] if len(sys.argv) > 1 else "int8"
    if "RANK" in os.environ:
        main(spec=SPEC)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, (SPEC, f"file://{folder}/ranks"), nprocs=2)
