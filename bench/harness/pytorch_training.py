"""A transformer in FSDP2 or DDP, with or without Gradwire, for the experiments fsdp_* and ddp_*.

A mode is {"native": {...}} or {"ours": {...}}. FSDP2: "native" has param_dtype and reduce_dtype, "ours" the
arguments of gradwire.fsdp.compress(); "replicas" is their number on a 2-D mesh. DDP: "native" has PyTorch's
hook and its rank and start, "ours" the spec. Reduce-scatter alone: "native" is True, "ours" is the spec.
"""
import gc
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire._process_group import communicator
from gradwire.fsdp import compress
from gradwire.torch import compress as compress_ddp

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT_S = 120
STEPS_TO_CHOOSE = 10  # the spec "auto" has chosen after fewer steps
SPEED_MODEL = {"width": 768, "depth": 4, "words": 1024, "length": 16}
LOSS_MODEL = {"width": 64, "depth": 2, "words": 509, "length": 32}
SMOKE_MODEL = {"width": 32, "depth": 1, "words": 18, "length": 4}


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
    """A language model with the names of torchtitan's models."""

    enable_weight_tying = False

    def __init__(self, width, depth, words, length):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(depth)})
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens) + self.position
        for block in self.layers.values():
            x = block(x)
        return self.lm_head(self.norm(x))


def sentences(number, words, length, generator):
    """Returns (number, length + 1) words. A word depends on the previous word, with noise."""
    tokens = [torch.randint(words, (number,), generator=generator)]
    while len(tokens) <= length:
        tokens.append((7 * tokens[-1] + torch.randint(3, (number,), generator=generator)) % words)
    return torch.stack(tokens, dim=1)


def shard(model, item):
    native = item.get("native") or {}
    policy = MixedPrecisionPolicy(**{key: getattr(torch, value) for key, value in native.items()})
    mesh = None
    if "replicas" in item:
        mesh = init_device_mesh("cpu", (item["replicas"], WORLD // item["replicas"]),
                                mesh_dim_names=("replicas", "shards"))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
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
    """Returns the bytes that this host's network interfaces, without loopback, have sent so far."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


class Run:
    """The training of a model in one mode."""

    def __init__(self, size, batch_size, item):
        torch.manual_seed(item.get("seed", 0))
        self.item, self.words, self.length, self.batch_size = item, size["words"], size["length"], batch_size
        wrap = replicate if item["wrap"] == "ddp" else shard
        self.model, self.handle = wrap(Transformer(**size), item)
        if item.get("optimizer") == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=item["lr"])
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=item.get("lr", 0.01),
                                             momentum=item.get("momentum", 0))

    def batch(self, number, rank=RANK):
        generator = torch.Generator().manual_seed(self.item.get("seed", 0) * 1_000_003 + number * 64 + rank)
        return sentences(self.batch_size, self.words, self.length, generator)

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


def timed(steps, warm_up, action):
    """Returns the wall time of each of `steps` calls after the warm-up, this process's CPU time per call
    (both in milliseconds), and the bytes sent per call. A barrier precedes each call."""
    times, cpu_ms = [], []
    for i in range(warm_up + steps):
        dist.barrier()
        if i == warm_up:
            sent = sent_bytes()
        begin, cpu_begin = time.monotonic(), time.process_time()
        action(i)
        if i >= warm_up:
            times.append(1000 * (time.monotonic() - begin))
            cpu_ms.append(1000 * (time.process_time() - cpu_begin))
    return {"step_ms": times, "cpu_ms": cpu_ms, "sent_bytes": (sent_bytes() - sent) / steps}


def _measured(options, items, measure_item):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for item in items:
        yield {**item, **measure_item(item)}
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def steps(options, wrap, modes, scatter_modes=None, elements=0):
    """Measures training steps, and reduce-scatter alone, interleaved in each repetition."""
    def measure_item(item):
        if item["what"] == "reduce_scatter":
            values = torch.randn(item["elements"], generator=torch.Generator().manual_seed(RANK))
            output = torch.empty(item["elements"] // WORLD)
            if "native" in item:
                return timed(options.steps, 1, lambda _: dist.reduce_scatter_single(
                    output, values, op=dist.ReduceOp.AVG))
            with communicator(timeout_s=TIMEOUT_S) as comm:
                return timed(options.steps, 1, lambda _: comm.reduce_scatter(output, values, item["ours"]))
        run = Run(SMOKE_MODEL if options.smoke else SPEED_MODEL, 1, item)
        auto = item["mode"].startswith("auto")
        out = {**timed(options.steps, options.warm_up + (STEPS_TO_CHOOSE if auto else 0), run.step),
               "parameters": sum(p.numel() for p in run.model.parameters()),
               "residual_bytes": getattr(run.handle, "residual_bytes", 0)}
        if auto:
            out["choice"] = run.handle.choice
        run.close()
        return out

    items = []
    for repetition in range(options.repetitions):
        items += [{"what": "step", "wrap": wrap, "mode": mode, "repetition": repetition, **how}
                  for mode, how in modes.items()]
        items += [{"what": "reduce_scatter", "mode": mode, "repetition": repetition,
                   "elements": 6400 if options.smoke else elements, **how}
                  for mode, how in (scatter_modes or {}).items()]
    return _measured(options, items, measure_item)


def losses(options, wrap, modes, optimizers):
    """Trains, and measures the loss on 16 held-out batches."""
    def measure_item(item):
        run = Run(SMOKE_MODEL if options.smoke else LOSS_MODEL, 8, item)
        for number in range(options.steps):
            loss = run.step(number)
        with torch.no_grad():
            held_out = statistics.fmean(float(run.loss(run.batch(1_000_000 + k, 0))) for k in range(16))
        run.close()
        return {"final_loss": held_out, "training_loss": loss}

    items = [{"what": "loss", "wrap": wrap, "mode": mode, "seed": seed, "steps": options.steps,
              "optimizer": name, **optimizer, **how}
             for seed in range(options.seeds) for name, optimizer in optimizers.items()
             for mode, how in modes.items()]
    return _measured(options, items, measure_item)
