"""Compressed training under torchrun, which restarts all ranks when one dies, or when machines join or leave.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # see docs/for-pytorch.md
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 restarts.py --folder runs/a
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-endpoint node0:29400 --rdzv-id a restarts.py --folder /shared/runs/a     # on each machine

Each start continues from the newest checkpoint in the folder, from any number of ranks. A step's batch is the
same for any number of ranks. Kill a rank (`kill -9`) to see a restart.
"""
import argparse
import os
import pathlib
import shutil
import time
import zlib

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import compress

BATCH = 48  # inputs per step, over all ranks


def batch_of(step):
    """Returns this rank's share of a step's inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 64, generator=generator)
    y = torch.stack([torch.sin(x[:, :8].sum(1)), x[:, 8:16].prod(1)], 1)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return x[mine], y[mine]


def newest(folder):
    """Returns the complete checkpoint with the most steps, or None."""
    found = [path for path in folder.glob("step-*") if path.suffix != ".part"]
    return max(found, key=lambda path: int(path.name[len("step-"):]), default=None)


def save(folder, step, model, optimizer, hook):
    """Writes a checkpoint folder, and renames it when all ranks' files are complete."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = folder / f"step-{step}.part"
    part.mkdir(parents=True, exist_ok=True)
    # Residuals differ between ranks, so each rank saves its residuals.
    torch.save(hook.state_dict(gather=False), part / f"hook-{rank}-of-{world}")
    if rank == 0:
        torch.save({"step": step, "world": world, "model": model.state_dict(),
                    "optimizer": optimizer.state_dict()}, part / "training")
    dist.barrier()
    if rank == 0:
        os.replace(part, folder / f"step-{step}")


def load(checkpoint, model, optimizer, hook):
    """Loads a checkpoint. Returns the next step."""
    training = torch.load(checkpoint / "training")
    model.load_state_dict(training["model"])
    optimizer.load_state_dict(training["optimizer"])
    if dist.get_world_size() > 1:  # a single rank does not compress
        saved = training["world"]  # for another world size, the sum of all residuals is preserved
        hook.load_state_dict([torch.load(checkpoint / f"hook-{rank}-of-{saved}") for rank in range(saved)])
    return training["step"]


@record  # torchrun reports a rank's error
def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True,
                        help="for checkpoints; shared by all machines")
    parser.add_argument("--spec", default="int8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--pause-s", type=float, default=0.0,
                        help="pause after each step, which leaves time to kill a rank")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:  # remove incomplete checkpoints of ranks that died
        for part in arguments.folder.glob("*.part"):
            shutil.rmtree(part)
    dist.barrier()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256),
                                torch.nn.Tanh(), torch.nn.Linear(256, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    ddp_model = DistributedDataParallel(model)
    hook = compress(ddp_model, arguments.spec)
    checkpoint = newest(arguments.folder)
    begin = load(checkpoint, model, optimizer, hook) if checkpoint is not None else 0
    print(f"rank {rank} of {world} is process {os.getpid()} and begins at step {begin}", flush=True)

    for step in range(begin, arguments.steps):
        x, y = batch_of(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp_model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} of {arguments.steps}, {world} ranks, loss {float(mean) / world:.9f}",
                  flush=True)
        if (step + 1) % arguments.checkpoint_every == 0:
            save(arguments.folder, step + 1, model, optimizer, hook)
        time.sleep(arguments.pause_s)

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    sums = [None] * world
    dist.all_gather_object(sums, zlib.crc32(weights.numpy().tobytes()))
    if rank == 0:
        print(f"done: {arguments.steps} steps, {world} ranks, weights {', '.join(f'{s:08x}' for s in sums)}",
              flush=True)
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
