"""The scenarios of clients_test.py: one rank of a run with Lightning, Accelerate or transformers' Trainer."""
from __future__ import annotations

import logging
import os
import pathlib
import shutil
import sys
from typing import Any, Callable, List

import clients_test
import laws
from clients_test import Result
from rank import RANK, WORLD, check, refused, say

# As torchrun sets them: the frameworks then start no processes.
os.environ.update(LOCAL_RANK=str(RANK), LOCAL_WORLD_SIZE=str(WORLD), GROUP_RANK="0",
                  TORCHELASTIC_RUN_ID="test", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from harness.client_jobs import PROBLEMS, Job  # noqa: E402
from harness.client_training import CLIENTS  # noqa: E402

FOLDER = pathlib.Path(sys.argv[2])
STEPS = 4  # per epoch
LOSSY = "powersgd:rank=1,schedule=ring"  # its results do not depend on DDP's buckets


def train(spec: str, epochs: int, name: str = "", resume: bool = False,
          used: Callable[[Any], None] = lambda trainer: None) -> Result:
    """Trains with the test's framework, if `resume` from the checkpoint after the first epoch."""
    folder = str(FOLDER / (name or f"{spec}none"))
    record = CLIENTS[sys.argv[1]](Job("regression", spec, epochs, folder, resume, used))
    laws.ranks_agree(f"{spec}: the weights", *(w.numpy() for w in record.weights))
    return record.losses, record.weights


def a_trainer_can_be_used_again_after_training() -> None:
    def save(trainer: Any) -> None:
        trainer.save_checkpoint(FOLDER / "last.ckpt")
        saved = torch.load(FOLDER / "last.ckpt", weights_only=False)["callbacks"]
        check(any("Compress" in key for key in saved), f"no residuals in {list(saved)}")

    def train_more(trainer: Any) -> None:
        trainer.train()  # the Trainer keeps its DistributedDataParallel, which accepts one hook
        trainer.train(resume_from_checkpoint=True)

    train(LOSSY, 1, "used", used=save if sys.argv[1] == "lightning" else train_more)


def residuals_of_another_run_are_not_loaded() -> None:
    for epochs, name in ((2, "one"), (3, "two")):  # whose learning rates differ
        train(LOSSY, epochs, name)
    if RANK == 0:
        file = pathlib.Path(f"checkpoint-{STEPS}", "gradwire.pt")
        shutil.copy(FOLDER / "two" / file, FOLDER / "one" / file)
    dist.barrier()
    texts: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    train(LOSSY, 2, "one", resume=True)
    check(any("other weights" in text for text in texts), f"no warning in {texts}")


def a_strategys_own_hook_is_refused() -> None:
    import lightning.pytorch as pl
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    import gradwire
    from gradwire.lightning import Compress

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = PROBLEMS["regression"]().network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.network(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = pl.strategies.DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)
    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, max_epochs=1, logger=False,
                         enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                         callbacks=[Compress()])
    rows = torch.utils.data.TensorDataset(*PROBLEMS["regression"]().data(WORLD))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    refused(lambda: trainer.fit(Module(), loader), gradwire.BadArgument, "ddp_comm_hook")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in sys.argv[3:]:
        say(f"{sys.argv[1]}: {scenario}")
        if scenario in globals():
            globals()[scenario]()
        else:  # FSDP2 has fixed groups of parameters, and slices of matrices
            getattr(clients_test, scenario)(train, "int4" if sys.argv[1] == "fsdp2" else LOSSY)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
