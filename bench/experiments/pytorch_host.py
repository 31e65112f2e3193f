"""One rank of bench/experiments/pytorch.py: a transformer in FSDP2 or DDP, with or without Gradwire.

    pytorch_host.py PLAN.json      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment

PLAN.json: {"results": file to which rank 0 appends a line of JSON per item, "model": {width, depth, words,
length}, "batch_size", "items": [...]}. The items, in order, on all ranks:

    {"what": "step", "mode", "native": {"param_dtype", "reduce_dtype"} | "ours": {of compress()}, "warmup",
    "steps"} {"what": "reduce_scatter", "mode", "elements", "native": true | "spec", "warmup", "steps"}
    {"what": "loss", "mode", "seed", "steps", "lr", "optimizer", "native" | "ours" as above}

With "wrap": "ddp", "native" is {} or {"hook", "rank", "start"}, and "ours" is {"spec"}.
"""
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"))
from gradwire._process_group import communicator  # noqa: E402
from gradwire.fsdp import compress  # noqa: E402
from gradwire.torch import compress as compress_ddp  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT_S = 120


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
                         .reshape(b, n, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width, depth, words, length):
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(model, item):
    native = item.get("native") or {}
    policy = MixedPrecisionPolicy(**{key: getattr(torch, value) for key, value in native.items()})
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, compress(model, timeout_s=TIMEOUT_S, **item["ours"]) if "ours" in item else None


def replicate(model, item):
    native = item.get("native") or {}
    # PyTorch's PowerSGD needs a single bucket on Gloo.
    ddp = DistributedDataParallel(model, **({"bucket_cap_mb": 1000} if "rank" in native else {}))
    if native.get("hook") == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=native["rank"],
                                            start_powerSGD_iter=native["start"])
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif native:
        ddp.register_comm_hook(None, getattr(default_hooks, native["hook"]))
    return ddp, compress_ddp(ddp, item["ours"]["spec"], timeout_s=TIMEOUT_S) if "ours" in item else None


def sent_bytes():
    """Returns the bytes sent by this host's network interfaces so far, without loopback."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


class Run:
    """A model in one mode."""

    def __init__(self, plan, item):
        torch.manual_seed(item.get("seed", 0))
        self.plan, self.item, self.words = plan, item, plan["model"]["words"]
        wrap = replicate if item.get("wrap") == "ddp" else shard
        self.model, self.handle = wrap(Transformer(**plan["model"]), item)
        if item.get("optimizer") == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=item["lr"])
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=item.get("lr", 0.01),
                                             momentum=item.get("momentum", 0))

    def batch(self, number, rank=RANK):
        """Returns (batch, length + 1) words. Each is a function of the previous word, with some noise."""
        generator = torch.Generator().manual_seed(self.item.get("seed", 0) * 1_000_003 + number * 64 + rank)
        shape = (self.plan["batch_size"],)
        tokens = [torch.randint(self.words, shape, generator=generator)]
        while len(tokens) <= self.plan["model"]["length"]:
            noise = torch.randint(3, shape, generator=generator)
            tokens.append((7 * tokens[-1] + noise) % self.words)
        return torch.stack(tokens, dim=1)

    def loss(self, tokens):
        logits = self.model(tokens[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step(self, number):
        self.optimizer.zero_grad()
        loss = self.loss(self.batch(number))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def close(self):
        if self.handle is not None:
            self.handle.close()


def timed(item, action):
    """Returns the milliseconds of each of item["steps"] calls after the warm-up, and of this rank's cores
    during them. All ranks begin together."""
    times, cpu_ms = [], []
    for i in range(item["warmup"] + item["steps"]):
        dist.barrier()
        if i == item["warmup"]:
            sent = sent_bytes()
        begin, cpu_begin = time.monotonic(), time.process_time()
        action(i)
        if i >= item["warmup"]:
            times.append(1000 * (time.monotonic() - begin))
            cpu_ms.append(1000 * (time.process_time() - cpu_begin))
    return {"step_ms": times, "cpu_ms": cpu_ms, "sent_bytes": (sent_bytes() - sent) / item["steps"]}


def measure_step(plan, item):
    run = Run(plan, item)
    out = {**timed(item, run.step), "parameters": sum(p.numel() for p in run.model.parameters()),
           "residual_bytes": getattr(run.handle, "residual_bytes", 0)}
    run.close()
    return out


def measure_reduce_scatter(plan, item):
    values = torch.randn(item["elements"], generator=torch.Generator().manual_seed(RANK))
    output = torch.empty(item["elements"] // WORLD)
    if item.get("native"):
        return timed(item, lambda _: dist.reduce_scatter_single(output, values, op=dist.ReduceOp.AVG))
    with communicator(timeout_s=TIMEOUT_S) as comm:
        return timed(item, lambda _: comm.reduce_scatter(output, values, item["spec"]))


def measure_loss(plan, item):
    """Trains, and returns the loss on 16 held-out batches."""
    run = Run(plan, item)
    for number in range(item["steps"]):
        loss = run.step(number)
    with torch.no_grad():
        held_out = statistics.fmean(float(run.loss(run.batch(1_000_000 + k, 0))) for k in range(16))
    run.close()
    return {"final_loss": held_out, "training_loss": loss}


MEASURES = {"step": measure_step, "reduce_scatter": measure_reduce_scatter, "loss": measure_loss}


def main():
    plan = json.loads(pathlib.Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, item in enumerate(plan["items"]):
        result = {**item, **MEASURES[item["what"]](plan, item)}
        gc.collect()
        if RANK == 0:
            with open(plan["results"], "a") as out:
                out.write(json.dumps(result) + "\n")
            shown = (
                f"{statistics.median(result['step_ms']):9.1f} ms, cores"
                f" {statistics.median(result['cpu_ms']):9.1f} ms"
                if "step_ms" in result
                else f"loss {result['final_loss']:.4f}"
            )
            print(f"[{number + 1}/{len(plan['items'])}] {item['what']:15}{item['mode']:44} {shown}",
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
