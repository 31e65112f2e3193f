"""Trains a small network with Gradwire in one of the frameworks of docs/for-trainers.md, on the CPU.

    torchrun --standalone --nproc-per-node 2 frameworks.py FRAMEWORK [SPEC]
    python frameworks.py ray [SPEC]        # Ray starts the ranks

FRAMEWORK is lightning, accelerate, transformers, ray, deepspeed, torchtitan or megatron; SPEC is int8 unless
given. Prints the loss of the first and the last step. Exits with 1 if the loss did not fall.
"""
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire.torch

WORLD = int(os.environ.get("WORLD_SIZE", 2))
STEPS, BATCH, RATE = 60, 16, 0.1


class Network(nn.Module):
    tok_embeddings = norm = None  # torchtitan's names
    enable_weight_tying = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)  # the same weights on every rank
        self.layers = nn.ModuleDict({"0": nn.Sequential(nn.Linear(64, 128), nn.Tanh())})
        self.lm_head = nn.Linear(128, 1)

    def forward(self, x):
        return self.lm_head(self.layers["0"](x))


def examples():
    x = torch.randn(STEPS * BATCH * WORLD, 64, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, x[:, :1] + torch.sin(x[:, 1:2]))


def batches():
    """Returns the batches of this rank, for frameworks that do not divide the examples."""
    return DataLoader(examples(), BATCH, sampler=DistributedSampler(examples()))


def train(model, loader, step):
    """Returns the loss of every step."""
    losses = []
    for x, y in loader:
        loss = mse_loss(model(x), y)
        step(loss)
        losses.append(float(loss.detach()))
    return losses


def sgd(model, backward=torch.Tensor.backward):
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step(loss):
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    return step


def lightning(spec):
    import lightning.pytorch as pl
    from gradwire.lightning import Compress
    losses = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = Network()

        def training_step(self, batch, _):
            loss = mse_loss(self.network(batch[0]), batch[1])
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), RATE)

    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy="ddp", max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, callbacks=[Compress(spec)])
    trainer.fit(Module(), DataLoader(examples(), BATCH))
    return losses


def accelerate(spec):
    import gradwire.accelerate
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(Network(), DataLoader(examples(), BATCH))
    gradwire.accelerate.compress(accelerator, model, spec)
    return train(model, loader, sgd(model, accelerator.backward))


def transformers(spec):
    from gradwire.transformers import Compress
    from transformers import Trainer, TrainingArguments
    losses = []

    class Model(Network):
        def forward(self, x, labels):
            loss = mse_loss(super().forward(x), labels)
            losses.append(float(loss.detach()))
            return {"loss": loss}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", num_train_epochs=1,
                                      per_device_train_batch_size=BATCH, learning_rate=0.01,
                                      save_strategy="no", report_to=[], disable_tqdm=True)
        Trainer(Model(), arguments, callbacks=[Compress(spec)],
                train_dataset=[{"x": x, "labels": y} for x, y in examples()]).train()
    return losses


def ray_worker(config):
    import ray.train.torch
    model = ray.train.torch.prepare_model(Network())
    gradwire.torch.compress(model, config["spec"])
    losses = train(model, batches(), sgd(model))
    if ray.train.get_context().get_world_rank() == 0:
        torch.save(losses, config["file"])


def ray(spec):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "losses.pt")
        TorchTrainer(ray_worker, train_loop_config={"spec": spec, "file": file},
                     run_config=RunConfig(storage_path=folder),
                     scaling_config=ScalingConfig(num_workers=WORLD)).fit()
        return torch.load(file)


def deepspeed(spec):
    os.environ["DS_ACCELERATOR"] = "cpu"
    gradwire.torch.register_backend(spec, reduce_scatter=spec, min_bytes=1024)
    dist.init_process_group("gradwire")
    import deepspeed
    model = Network()
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": 2}, "steps_per_print": 1 << 30}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), RATE),
                                           config=config, dist_init_required=False)

    def step(loss):
        engine.backward(loss)
        engine.step()

    return train(engine, batches(), step)


def torchtitan(spec):
    import gradwire.fsdp
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    dist.init_process_group("gloo")
    model, mesh = Network(), dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    gradwire.fsdp.compress(model, gradients=spec, weights="bf16")
    # torchtitan sums gradients, and divides the loss.
    return train(model, batches(), sgd(model, lambda loss: (loss / WORLD).backward()))


def megatron(spec):
    # Megatron allocates its gradients on the current GPU.
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    gradwire.torch.register_backend(spec, reduce_scatter=spec, min_bytes=1024)
    dist.init_process_group("gradwire")
    parallel_state.initialize_model_parallel()
    model = DistributedDataParallel(TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1),
                                    DistributedDataParallelConfig(grad_reduce_in_fp32=True), Network())
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step(loss):
        loss.backward()
        model.finish_grad_sync()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad_buffer()

    model.zero_grad_buffer()
    return train(model, batches(), step)


FRAMEWORKS = {f.__name__: f for f in (lightning, accelerate, transformers, ray, deepspeed, torchtitan,
                                      megatron)}


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in FRAMEWORKS:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    losses = FRAMEWORKS[sys.argv[1]](*(sys.argv[2:] or ["int8"]))
    first, last = (sum(some) / len(some) for some in (losses[:5], losses[-5:]))
    if os.environ.get("RANK", "0") == "0":
        print(f"{sys.argv[1]}: {len(losses)} steps, the loss fell from {first:.3f} to {last:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if not last < first / 2:
        sys.exit(f"{sys.argv[1]}: the loss did not fall")


if __name__ == "__main__":
    main()
