"""The baseline of the experiment slow_links: PyTorch's DDP over gloo, one process per rank.

argv[1] is JSON: {"rendezvous": a file shared by all ranks, "threads", "model": {image_size, patch, depth,
heads, width, mlp, classes}, "batch_size", "lr", "momentum", "timeout_s"}; RANK and WORLD_SIZE are in the
environment. Reads one JSON command per line from stdin, the same on every rank, and answers with one line of
JSON on stdout:

    {"hook": null | "fp16" | "bf16" | "powersgd" | "alone", "rank": r, "bucket_mb": MB or null for one bucket,
     "warmup", "steps"}
    -> {"step_ms": [...], "buckets": n, "loss": of the last step}, or {"error": reason}

"alone" trains without DistributedDataParallel. The settings are the fastest that were measured: gradients
as views of the buckets, a static graph, gradients set to None between steps, SGD that updates one parameter
at a time.
"""
import copy
import datetime
import json
import os
import sys
import time

ONE_BUCKET_MB = 1 << 20


def answer(**fields):
    print(json.dumps(fields), flush=True)


try:
    import torch
    import torch.distributed as dist
    import torchvision
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
except ImportError as error:
    answer(missing=str(error))
    sys.exit(0)


def build(model):
    return torchvision.models.VisionTransformer(
        image_size=model["image_size"], patch_size=model["patch"], num_layers=model["depth"],
        num_heads=model["heads"],
        hidden_dim=model["width"], mlp_dim=model["mlp"], num_classes=model["classes"])


class Baseline:
    START = 2  # the earliest step at which PyTorch's PowerSGD may begin

    def __init__(self, config):
        self.config = config
        torch.set_num_threads(config["threads"])
        torch.manual_seed(0)
        self.model = build(config["model"])
        side = config["model"]["image_size"]
        # Every step uses the same images. PyTorch thus needs no time to load images, which favors PyTorch.
        self.images = torch.randn(config["batch_size"], 3, side, side)
        self.labels = torch.arange(config["batch_size"]) % config["model"]["classes"]

    def parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def wrap(self, model, command):
        """Returns DDP with the command's hook."""
        megabytes = command.get("bucket_mb") or ONE_BUCKET_MB
        # The first bucket has a separate limit of 1 MB, which would split one bucket into two.
        first_mb = ONE_BUCKET_MB if command.get("bucket_mb") is None else 1
        dist._DEFAULT_FIRST_BUCKET_BYTES = first_mb << 20
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes,
                                                        gradient_as_bucket_view=True, static_graph=True,
                                                        broadcast_buffers=False)
        hook = command["hook"]
        if hook == "powersgd":
            ddp.register_comm_hook(powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=command["rank"], start_powerSGD_iter=self.START,
                use_error_feedback=True, warm_start=True, random_seed=0), powerSGD_hook.powerSGD_hook)
        elif hook is not None:
            ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
        return ddp

    def run(self, command):
        model = copy.deepcopy(self.model)
        model.train()
        alone = command["hook"] == "alone"
        ddp = model if alone else self.wrap(model, command)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.config["lr"],
                                    momentum=self.config["momentum"])
        starts, loss = [], None
        dist.barrier()
        for _ in range(command["warmup"] + command["steps"]):
            starts.append(time.perf_counter())
            loss = torch.nn.functional.cross_entropy(ddp(self.images), self.labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        starts.append(time.perf_counter())
        dist.barrier()
        buckets = 0
        if not alone:
            data = ddp._get_ddp_logging_data()
            buckets = len((data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))
        steps = [(b - a) * 1e3 for a, b in zip(starts, starts[1:])]
        return {"step_ms": steps[command["warmup"]:], "buckets": buckets, "loss": loss.item()}


def main():
    config = json.loads(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{config['rendezvous']}",
                            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
                            timeout=datetime.timedelta(seconds=config["timeout_s"]))
    baseline = Baseline(config)
    answer(torch=torch.__version__, torchvision=torchvision.__version__, parameters=baseline.parameters())
    for line in sys.stdin:
        try:
            answer(**baseline.run(json.loads(line)))
        except RuntimeError as error:
            answer(error=str(error).splitlines()[0][:200])


if __name__ == "__main__":
    main()
