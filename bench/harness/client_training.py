"""One rank of a training run with a framework of docs/for-trainers.md, for tests and the experiment clients.

    client_training.py CLIENT JOB OUTPUT    JOB: the fields of a Job as JSON; writes OUTPUT-RANK.pt

A client is a function of a Job that returns a Record. The ranks start as under torchrun.
"""
from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any, Callable, Dict, List

import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # bench/
from harness import client_ray  # noqa: E402
from harness.client_jobs import PROBLEMS, Job, Record, ranks, train_loop  # noqa: E402

# ---- Frameworks with their own loop ------------------------------------------------------------------------


def lightning(job: Job) -> Record:
    import lightning.pytorch as pl
    from gradwire.lightning import Compress
    problem, record, world = PROBLEMS[job.problem](), Record(), ranks()[1]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = problem.network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = problem.loss(self.network(batch[0]), batch[1])
            record.add(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), problem.sgd, momentum=0.9)

    callbacks: List[Any] = [Compress(job.spec)] if job.spec else []
    if job.folder:
        callbacks.append(pl.callbacks.ModelCheckpoint(job.folder, every_n_epochs=1, save_top_k=-1,
                                                      filename="{epoch}", save_on_train_epoch_end=True))
    trainer = pl.Trainer(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                         num_nodes=world // int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
                         max_epochs=job.epochs, logger=False, enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=bool(job.folder),
                         callbacks=callbacks)
    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*problem.data(world)),
                                         batch_size=problem.batch)
    trainer.fit(module, loader,
                ckpt_path=str(pathlib.Path(job.folder, "epoch=0.ckpt")) if job.resume else None)
    job.used(trainer)
    return record.end(module)


def transformers(job: Job) -> Record:
    from transformers import Trainer, TrainingArguments
    from gradwire.transformers import Compress
    problem, record = PROBLEMS[job.problem](), Record()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = problem.network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
            loss = problem.loss(self.network(x), labels)
            record.add(loss)
            return {"loss": loss}

    arguments = TrainingArguments(job.folder or "unused", use_cpu=True, num_train_epochs=job.epochs,
                                  learning_rate=problem.adamw, per_device_train_batch_size=problem.batch,
                                  save_strategy="epoch" if job.folder else "no", report_to=[],
                                  disable_tqdm=True, logging_strategy="no", ddp_backend="gloo")
    rows = [{"x": x, "labels": y} for x, y in zip(*problem.data(ranks()[1]))]
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=rows,
                      callbacks=[Compress(job.spec)] if job.spec else [])
    checkpoint = str(pathlib.Path(job.folder, f"checkpoint-{problem.steps}"))
    trainer.train(resume_from_checkpoint=checkpoint if job.resume else None)
    job.used(trainer)
    return record.end(model)


def accelerate(job: Job) -> Record:
    from accelerate import Accelerator
    import gradwire.accelerate
    accelerator = Accelerator(cpu=True)
    problem, record = PROBLEMS[job.problem](), Record()
    network = problem.network()
    model, optimizer = accelerator.prepare(
        network, torch.optim.SGD(network.parameters(), problem.sgd, momentum=0.9))
    if job.spec:
        gradwire.accelerate.compress(accelerator, model, job.spec)
    if job.resume:
        accelerator.load_state(job.folder)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = problem.loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        return loss

    train_loop(job, record, step, lambda: accelerator.save_state(job.folder))
    return record.end(model)


# ---- Sharded models and engines ----------------------------------------------------------------------------


def _sharded(job: Job, shard: Callable[[nn.Module], None], attach: Callable[[nn.Module], Any],
             save: Callable[[Any, str], None], load: Callable[[Any, str], None], divide: bool) -> Record:
    """Trains a model that fully_shard() shards, and saves a part of the checkpoint on each rank.

    Args:
        divide: the loop divides the loss by the number of ranks, because FSDP2 does not divide gradients.
    """
    problem, record = PROBLEMS[job.problem](), Record()
    rank, world = ranks()
    model = problem.network()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), problem.sgd, momentum=0.9)
    handle: Any = attach(model) if job.spec else None
    file = f"{job.folder}-{rank}.pt"
    if job.resume:
        states = torch.load(file, weights_only=False)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        if handle is not None:
            load(handle, job.folder)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = problem.loss(model(x), y)
        optimizer.zero_grad()
        (loss / world if divide else loss).backward()
        optimizer.step()
        return loss

    def saved() -> None:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        if handle is not None:
            save(handle, job.folder)

    train_loop(job, record, step, saved)
    return record.end(model)


def _weights(job: Job) -> str:
    """Returns the format of the all-gather: exact where gradients are, otherwise the default."""
    return "fp32" if job.spec == "fp32" else "bf16"


def fsdp2(job: Job) -> Record:
    """Shards by hand, because Accelerate shards on GPUs only."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard
    import gradwire.accelerate
    accelerator = Accelerator(cpu=True)

    def shard(model: nn.Module) -> None:
        blocks = model.layers.values() if hasattr(model, "layers") else model
        for block in [*blocks, model]:
            if any(True for _ in block.parameters()):
                fully_shard(block)

    return _sharded(job, shard,
                    lambda model: gradwire.accelerate.compress(accelerator, model, job.spec,
                                                               weights=_weights(job)),
                    lambda _, folder: accelerator.save_state(folder),
                    lambda _, folder: accelerator.load_state(folder), divide=False)


def torchtitan(job: Job) -> Record:
    """Shards with torchtitan's own function, as its trainer does: FSDP2 then does not divide gradients."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from gradwire.fsdp import compress
    rank, world = ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))

    def shard(model: nn.Module) -> None:
        apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no sum with a factor

    return _sharded(job, shard,
                    lambda model: compress(model, gradients=job.spec, weights=_weights(job)),
                    lambda handle, folder: torch.save(handle.state_dict(), f"{folder}-codec-{rank}.pt"),
                    lambda handle, folder: handle.load_state_dict(torch.load(f"{folder}-codec-{rank}.pt")),
                    divide=True)


def _backend(spec: str) -> str:
    """Registers Gradwire's backend for sums. Returns the name of the backend."""
    from gradwire.torch import register_backend
    if spec:
        register_backend(spec, reduce_scatter=spec, min_bytes=1 << 10)
    return "gradwire" if spec else "gloo"


def _deepspeed(stage: int) -> Callable[[Job], Record]:
    def train(job: Job) -> Record:
        import torch.distributed as dist
        os.environ["DS_ACCELERATOR"] = "cpu"
        dist.init_process_group(_backend(job.spec))
        import deepspeed
        problem, record = PROBLEMS[job.problem](), Record()
        network = problem.network()
        config = {"train_micro_batch_size_per_gpu": problem.batch, "zero_allow_untested_optimizer": True,
                  "zero_optimization": {"stage": stage}, "steps_per_print": 1 << 30,
                  "gradient_clipping": 0.0}  # DeepSpeed's default is 1.0
        engine, _, _, _ = deepspeed.initialize(
            model=network, optimizer=torch.optim.SGD(network.parameters(), problem.sgd, momentum=0.9),
            config=config, dist_init_required=False)
        if job.resume:
            engine.load_checkpoint(job.folder)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = problem.loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            return loss

        train_loop(job, record, step, lambda: engine.save_checkpoint(job.folder))
        with deepspeed.zero.GatheredParameters(list(network.parameters()), enabled=stage == 3):
            return record.end(network)
    return train


def megatron(job: Job) -> Record:
    """Megatron's data-parallel code. On the CPU its distributed optimizer does not run."""
    import torch.distributed as dist
    # Megatron allocates its gradient buffer on torch.cuda.current_device().
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    dist.init_process_group(_backend(job.spec))
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    parallel_state.initialize_model_parallel()
    problem, record = PROBLEMS[job.problem](), Record()
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True), problem.network())
    optimizer = torch.optim.SGD(model.parameters(), problem.sgd, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad_buffer()
        loss = problem.loss(model(x), y)
        loss.backward()
        model.finish_grad_sync()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()  # or the next backward would add to Megatron's buffer twice
        return loss

    train_loop(job, record, step, lambda: None)
    return record.end(model)


CLIENTS: Dict[str, Callable[[Job], Record]] = {
    "lightning": lightning, "accelerate": accelerate, "transformers": transformers, "ray": client_ray.train,
    "deepspeed1": _deepspeed(1), "deepspeed2": _deepspeed(2), "deepspeed3": _deepspeed(3), "fsdp2": fsdp2,
    "torchtitan": torchtitan, "megatron": megatron}


def held_out(job: Job, record: Record) -> float:
    """Returns the loss of the weights on examples that no rank trains with."""
    problem = PROBLEMS[job.problem]()
    network, (x, y) = problem.network(), problem.examples(128, 3)
    with torch.no_grad():
        for parameter, weight in zip(network.parameters(), record.weights):
            parameter.copy_(weight)
        return float(problem.loss(network(x), y))


def main() -> None:
    rank, world = ranks()
    os.environ.update(LOCAL_RANK=os.environ.get("LOCAL_RANK", str(rank)), GROUP_RANK="0",
                      LOCAL_WORLD_SIZE=os.environ.get("LOCAL_WORLD_SIZE", str(world)),
                      TORCHELASTIC_RUN_ID="clients", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    job = Job(**json.loads(sys.argv[2]))
    record = CLIENTS[sys.argv[1]](job)
    torch.save({**vars(record), "held_out": held_out(job, record)}, f"{sys.argv[3]}-{rank}.pt")
    import torch.distributed as dist
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
