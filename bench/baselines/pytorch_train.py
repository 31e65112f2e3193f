"""The baseline of the experiment slow_links: PyTorch's DDP over gloo, one process per rank.

argv[1] is JSON: {"threads", "model": {image_size, patch, depth, heads, width, mlp, classes}, "batch_size",
"lr", "momentum", "timeout_s", "warmup", "steps", "hook": null | "fp16" | "bf16" | "powersgd" | "alone",
"rank": of "powersgd", "bucket_mb": MB or null for one bucket, "output": a file}. The ranks start as under
torchrun. Rank 0 writes {"step_ms": [...], "buckets", "loss": of the last step, "parameters", "torch",
"torchvision"} into the output.

"alone" trains without DistributedDataParallel. The settings are the fastest that were measured: gradients
as views of the buckets, a static graph, gradients set to None between steps, SGD that updates one parameter
at a time.
"""
import datetime
import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torchvision
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

ONE_BUCKET_MB = 1 << 20
START = 2  # the earliest step at which PyTorch's PowerSGD may begin


def wrap(model, config):
    """Returns DDP with the configuration's hook."""
    # The first bucket has a separate limit of 1 MB, which would split one bucket into two.
    first_mb = ONE_BUCKET_MB if config["bucket_mb"] is None else 1
    dist._DEFAULT_FIRST_BUCKET_BYTES = first_mb << 20
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=config["bucket_mb"] or ONE_BUCKET_MB,
                                                    gradient_as_bucket_view=True, static_graph=True,
                                                    broadcast_buffers=False)
    hook = config["hook"]
    if hook == "powersgd":
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=config["rank"], start_powerSGD_iter=START,
            use_error_feedback=True, warm_start=True, random_seed=0), powerSGD_hook.powerSGD_hook)
    elif hook is not None:
        ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    return ddp


def train(config):
    torch.set_num_threads(config["threads"])
    torch.manual_seed(0)
    sizes, side = config["model"], config["model"]["image_size"]
    model = torchvision.models.VisionTransformer(
        image_size=side, patch_size=sizes["patch"], num_layers=sizes["depth"], num_heads=sizes["heads"],
        hidden_dim=sizes["width"], mlp_dim=sizes["mlp"], num_classes=sizes["classes"]).train()
    # Every step uses the same images. PyTorch thus needs no time to load images, which favors PyTorch.
    images = torch.randn(config["batch_size"], 3, side, side)
    labels = torch.arange(config["batch_size"]) % sizes["classes"]
    ddp = model if config["hook"] == "alone" else wrap(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    starts = []
    dist.barrier()
    for _ in range(config["warmup"] + config["steps"]):
        starts.append(time.perf_counter())
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    starts.append(time.perf_counter())
    dist.barrier()
    buckets = 0
    if ddp is not model:
        data = ddp._get_ddp_logging_data()
        buckets = len((data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))
    steps = [(b - a) * 1e3 for a, b in zip(starts, starts[1:])]
    return {"step_ms": steps[config["warmup"]:], "buckets": buckets, "loss": loss.item(),
            "parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__,
            "torchvision": torchvision.__version__}


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=settings["timeout_s"]))
    result = train(settings)
    if dist.get_rank() == 0:
        pathlib.Path(settings["output"]).write_text(json.dumps(result))
    dist.destroy_process_group()
