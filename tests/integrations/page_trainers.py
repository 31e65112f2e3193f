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


SESSIONS = {
    "Lightning": Session(2, lightning, ["from gradwire.lightning"], needs("lightning")),
    "Fabric": Session(2, fabric, ["hook = gradwire.torch.compress(model"], needs("lightning")),
    "Accelerate": Session(2, accelerate, ["model, optimizer, loader = accelerator"], needs("accelerate")),
    "transformers": Session(2, transformers, ["from gradwire.transformers"], needs("transformers")),
}
NOT_RUN: List[Any] = []
