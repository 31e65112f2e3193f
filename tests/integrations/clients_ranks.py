"""The scenarios of clients_test.py: one rank of a run with Lightning, Accelerate or transformers' Trainer."""
from __future__ import annotations

import os
import pathlib
import sys
from typing import Any, Callable, Dict, List, Tuple

from rank import RANK, WORLD, check, refused, say

# As torchrun sets them: the frameworks then start no processes.
os.environ.update(LOCAL_RANK=str(RANK), LOCAL_WORLD_SIZE=str(WORLD), GROUP_RANK="0",
                  TORCHELASTIC_RUN_ID="test", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

FOLDER = pathlib.Path(sys.argv[2])
STEPS = 4  # per epoch
LOSSY = "powersgd:rank=1,schedule=ring"  # its results do not depend on DDP's buckets
AFTER = "after"  # the name of a run whose trainer is used again


def network() -> torch.nn.Module:
    torch.manual_seed(1)  # the same on every rank
    return torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Tanh(), torch.nn.Linear(50, 40),
                               torch.nn.Tanh(), torch.nn.Linear(40, 1))


def data() -> Tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8 * WORLD * STEPS, 60, generator=torch.Generator().manual_seed(2))
    return x, torch.sin(x[:, :1]) + x[:, 1:2]


Result = Tuple[List[float], List[torch.Tensor]]  # the loss of each step on this rank, and the weights


def of(model: torch.nn.Module) -> List[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- Training with each framework, if `resume` from the checkpoint after the first epoch ------------------

def lightning(spec: str, epochs: int, name: str, resume: bool = False) -> Result:
    import lightning.pytorch as pl
    from gradwire.lightning import Compress
    losses: List[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    saving = pl.callbacks.ModelCheckpoint(FOLDER / name, every_n_epochs=1, save_top_k=-1, filename="{epoch}",
                                          save_on_train_epoch_end=True)
    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy="ddp", max_epochs=epochs, logger=False,
                         enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[saving] + ([Compress(spec)] if spec else []))
    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    trainer.fit(module, loader, ckpt_path=str(FOLDER / name / "epoch=0.ckpt") if resume else None)
    if name == AFTER:
        trainer.save_checkpoint(FOLDER / name / "last.ckpt")
        saved = torch.load(FOLDER / name / "last.ckpt", weights_only=False)["callbacks"]
        check(any("Compress" in key for key in saved), f"no residuals in {list(saved)}")
    return losses, of(module)


def accelerate(spec: str, epochs: int, name: str, resume: bool = False, sharded: bool = False) -> Result:
    from accelerate import Accelerator
    import gradwire.accelerate
    accelerator = Accelerator(cpu=True)
    model = network()
    if sharded:  # by hand, because Accelerate shards on GPUs only
        from torch.distributed.fsdp import fully_shard
        for block in [*model, model]:
            if any(True for _ in block.parameters()):
                fully_shard(block)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if not sharded:
        model, optimizer = accelerator.prepare(model, optimizer)
    if spec:
        gradwire.accelerate.compress(accelerator, model, spec, **({"weights": "fp32"} if sharded else {}))
    own = FOLDER / f"{name}-{RANK}.pt"
    if resume:
        accelerator.load_state(str(FOLDER / name))
        if sharded:
            states = torch.load(own, weights_only=False)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
    x, y = (part.view(STEPS, WORLD, 8, -1) for part in data())
    losses = []
    for epoch in range(int(resume), epochs):
        for step in range(STEPS):
            loss = torch.nn.functional.mse_loss(model(x[step, RANK]), y[step, RANK])
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        if epoch == 0 and not resume:
            accelerator.save_state(str(FOLDER / name))
            if sharded:
                torch.save((model.state_dict(), optimizer.state_dict()), own)
    return losses, [p.full_tensor() if hasattr(p, "full_tensor") else p for p in of(model)]


def fsdp2(spec: str, epochs: int, name: str, resume: bool = False) -> Result:
    return accelerate(spec, epochs, name, resume, sharded=True)


def transformers(spec: str, epochs: int, name: str, resume: bool = False) -> Result:
    from transformers import Trainer, TrainingArguments
    from gradwire.transformers import Compress
    losses: List[float] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
            loss = torch.nn.functional.mse_loss(self.network(x), labels)
            losses.append(float(loss.detach()))
            return {"loss": loss}

    arguments = TrainingArguments(str(FOLDER / name), use_cpu=True, num_train_epochs=epochs,
                                  learning_rate=0.01, per_device_train_batch_size=8, save_strategy="epoch",
                                  report_to=[], disable_tqdm=True, logging_strategy="no", ddp_backend="gloo")
    rows = [{"x": x, "labels": y} for x, y in zip(*data())]
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Compress(spec)] if spec else [])
    trainer.train(resume_from_checkpoint=str(FOLDER / name / f"checkpoint-{STEPS}") if resume else None)
    if name == AFTER:  # the Trainer keeps its DistributedDataParallel, which accepts one hook
        trainer.train()
        trainer.train(resume_from_checkpoint=True)
    return losses, of(model)


# ---- Properties of every framework ---------------------------------------------------------------------

def losses_are_those_without_compression(train: Callable[..., Result]) -> None:
    plain, weights = train("", 3, "plain")
    for spec, most in (("fp32", 1e-5), ("int8", 0.02)):
        losses, compressed = train(spec, 3, spec)
        apart = max(abs(a - b) for a, b in zip(plain, losses))
        check(len(losses) == len(plain) and apart < most, f"{spec}: losses differ by {apart:.3g}")
        everyones: List[Any] = [None] * WORLD
        dist.all_gather_object(everyones, [w.tolist() for w in compressed])
        check(everyones == everyones[:1] * WORLD, f"{spec}: ranks have different weights")
        say(f"  {spec}: losses differ by at most {apart:.2g}, from {plain[0]:.3f} to {plain[-1]:.3f}")
        if spec == "int8":
            check(any(not torch.equal(a, b) for a, b in zip(weights, compressed)), "int8 was not in use")


def a_checkpoint_continues_bit_for_bit(train: Callable[..., Result]) -> None:
    spec = "int4" if train is fsdp2 else LOSSY  # FSDP2 has fixed groups of parameters, and slices of matrices
    losses, weights = train(spec, 2, "resumed")
    dist.barrier()
    again, resumed = train(spec, 2, "resumed", resume=True)
    check(again == losses[STEPS:], f"losses {again}, expected {losses[STEPS:]}")
    check(all(torch.equal(a, b) for a, b in zip(weights, resumed)), "weights differ after the checkpoint")


def a_trainer_can_be_used_again_after_training(train: Callable[..., Result]) -> None:
    train(LOSSY, 1, AFTER)


def a_strategys_own_hook_is_refused(_: Any) -> None:
    import lightning.pytorch as pl
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    import gradwire
    from gradwire.lightning import Compress

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.network(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = pl.strategies.DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)
    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, max_epochs=1, logger=False,
                         enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                         callbacks=[Compress()])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    refused(lambda: trainer.fit(Module(), loader), gradwire.BadArgument, "ddp_comm_hook")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in sys.argv[3:]:
        say(f"{sys.argv[1]}: {scenario}")
        globals()[scenario](globals()[sys.argv[1]])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
