"""The examples of docs/for-trainers.md."""
from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, Callable, Dict, List

from page_sessions import RANK, WORLD, Session, same_on_all_ranks, torch_model, train_torch

# As torchrun sets them: the frameworks then start no processes.
os.environ.update(LOCAL_RANK=str(RANK), LOCAL_WORLD_SIZE=str(WORLD), GROUP_RANK="0",
                  TORCHELASTIC_RUN_ID="test")


def needs(module: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(module) else f"{module} is not installed"


def same_weights(model: Any) -> None:
    same_on_all_ranks([p.tolist() for p in model.parameters()])


def dataset() -> Any:
    import torch
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :1])


def lightning(examples: List[str], _: str) -> None:
    import lightning.pytorch as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch_model()

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    names: Dict[str, Any] = {"Trainer": functools.partial(
        pl.Trainer, accelerator="cpu", devices=WORLD, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)}
    exec(examples[0], names)
    module = Module()
    names["trainer"].fit(module, torch.utils.data.DataLoader(dataset(), batch_size=8))
    same_weights(module)


def fabric(examples: List[str], _: str) -> None:
    import gradwire.torch
    import torch
    from lightning.fabric import Fabric
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    fabric.launch()
    model = torch_model()
    names: Dict[str, Any] = {"gradwire": gradwire, "fabric": fabric}
    names["model"], names["optimizer"] = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    exec(examples[0].splitlines()[0], names)
    train_torch(names["model"])
    exec(examples[0].splitlines()[1], names)
    fabric.barrier()
    fabric.load("checkpoint.ckpt", {"hook": names["hook"]})
    train_torch(names["model"])
    same_weights(names["model"])


def accelerate(examples: List[str], folder: str) -> None:
    import gradwire.accelerate
    import torch
    from accelerate import Accelerator
    model = torch_model()
    names: Dict[str, Any] = {"gradwire": gradwire, "accelerator": Accelerator(cpu=True), "model": model,
                             "optimizer": torch.optim.SGD(model.parameters(), 0.01),
                             "loader": torch.utils.data.DataLoader(dataset(), batch_size=8)}
    exec(examples[0], names)
    train_torch(names["model"])
    names["accelerator"].save_state("saved")
    names["accelerator"].wait_for_everyone()  # until rank 0 has saved
    names["accelerator"].load_state("saved")
    train_torch(names["model"])
    same_weights(names["model"])


def transformers(examples: List[str], _: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch_model()

        def forward(self, x: Any, labels: Any) -> Dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.network(x), labels)}

    arguments = TrainingArguments("trained", use_cpu=True, num_train_epochs=1, per_device_train_batch_size=8,
                                  report_to=[], disable_tqdm=True, ddp_backend="gloo")
    model = Model()
    exec(examples[0], {"Trainer": Trainer, "arguments": arguments, "model": model,
                       "dataset": [{"x": x, "labels": y} for x, y in dataset()]})
    same_weights(model)


def ray_worker(config: Dict[str, Any]) -> None:
    import tempfile
    import gradwire.torch
    import ray.train.torch
    import torch
    names: Dict[str, Any] = {"gradwire": gradwire, "ray": ray, "torch": torch, "tempfile": tempfile,
                             "model": torch_model()}
    exec(config["examples"][0], names)
    if ray.train.get_checkpoint() is None:
        train_torch(names["model"])
        exec(config["examples"][1], names)
        ray.train.get_all_reported_checkpoints()  # returns when Ray knows the checkpoint
        raise ValueError("a worker failed")  # Ray starts all workers again
    tensors = names["hook"].state_dict(gather=False)["tensors"].values()
    assert any(values.any() for tensor in tensors for values in tensor["state"].values()), "no residuals"
    train_torch(names["model"])


def ray_train(examples: List[str], *_: str) -> None:
    import pathlib
    import tempfile
    os.environ["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent),
                                                os.environ.get("PYTHONPATH", "")])
    os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300",
                      OMP_NUM_THREADS="1", GRADWIRE_THREADS="1")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    with tempfile.TemporaryDirectory(prefix="gw-ray-") as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
                 object_store_memory=100_000_000)
        run = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1))
        TorchTrainer(ray_worker, train_loop_config={"examples": examples}, run_config=run,
                     scaling_config=ScalingConfig(num_workers=2)).fit()
        ray.shutdown()


def deepspeed(examples: List[str], _: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import gradwire.torch
    import torch
    model = torch_model()
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3},
              "steps_per_print": 10**6,
              "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}}}
    names: Dict[str, Any] = {"gradwire": gradwire, "torch": torch, "deepspeed": deepspeed, "model": model,
                             "config": config}
    exec(examples[0], names)
    engine, losses = names["engine"], [0.0] * 5
    for epoch in range(len(losses)):
        for x, y in torch.utils.data.DataLoader(dataset(), batch_size=8):
            loss = torch.nn.functional.mse_loss(engine(x), y)
            losses[epoch] += float(loss.detach())
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        same_weights(model)
    assert losses[-1] < losses[0], losses


def torchtitan(examples: List[str], _: str) -> None:
    import gradwire.fsdp
    import torch
    import torch.distributed as dist
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    dist.init_process_group("gloo")
    model = torch_model()
    # The names of torchtitan's models.
    model.tok_embeddings, model.norm, model.lm_head = None, None, model.head
    model.layers, model.enable_weight_tying = torch.nn.ModuleDict({"0": model.blocks[0]}), False
    exec(examples[0], {"gradwire": gradwire, "apply_fsdp_to_decoder": apply_fsdp_to_decoder, "model": model,
                       "mesh": dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",)),
                       "param_dtype": torch.float32, "reduce_dtype": torch.float32})
    train_torch(model)
    same_on_all_ranks([p.full_tensor().tolist() for p in model.parameters()])


def megatron(examples: List[str], _: str) -> None:
    import gradwire.torch
    import torch
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    names: Dict[str, Any] = {
        "gradwire": gradwire, "torch": torch, "parallel_state": parallel_state, "model": torch_model(),
        "DistributedDataParallel": DistributedDataParallel,
        "DistributedDataParallelConfig": DistributedDataParallelConfig,
        "config": TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)}
    exec(examples[0], names)
    model = names["model"]
    for x, y in torch.utils.data.DataLoader(dataset(), batch_size=8):
        model.zero_grad_buffer()
        torch.nn.functional.mse_loss(model(x + RANK), y).backward()
        model.finish_grad_sync()
    same_on_all_ranks([p.main_grad.tolist() for p in model.parameters()])


PRELOAD = ["torch"]
SESSIONS = {
    "Lightning": Session(2, lightning, ["from gradwire.lightning"], needs("lightning")),
    "Fabric": Session(2, fabric, ["hook = gradwire.torch.compress(model"], needs("lightning")),
    "Accelerate": Session(2, accelerate, ["model, optimizer, loader = accelerator"], needs("accelerate")),
    "transformers": Session(2, transformers, ["from gradwire.transformers"], needs("transformers")),
    "Ray": Session(0, ray_train, ["model = ray.train.torch", "state = hook.state_dict()"], needs("ray")),
    "DeepSpeed": Session(2, deepspeed, ["gradwire.torch.register_backend(\"int8\""], needs("deepspeed")),
    "torchtitan": Session(2, torchtitan, ["apply_fsdp_to_decoder"], needs("torchtitan")),
    "Megatron": Session(2, megatron, ["gradwire.torch.register_backend(\"bf16\""], needs("megatron")),
}
NOT_RUN: List[Any] = []
