"""The examples of docs/for-pytorch.md."""
from __future__ import annotations

from typing import Any, Callable, Dict, List

import laws
from page_sessions import RANK, Session, needs_torch, same_on_all_ranks, torch_model, train_torch


def names(wrapped: bool = True, **more: Any) -> Dict[str, Any]:
    """Returns the names that an example expects: a model, a rank, and PyTorch's."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    given = {"torch": torch, "DistributedDataParallel": DistributedDataParallel, "model": torch_model(),
             "rank": RANK, **more}
    if wrapped:
        given["ddp_model"] = DistributedDataParallel(given["model"])
    return given


def trains(given: Dict[str, Any], ratio: float = 3) -> None:
    train_torch(given["ddp_model"])
    same_on_all_ranks([p.detach().tolist() for p in given["ddp_model"].parameters()])
    stats = given["hook"].stats()
    assert 0 < stats["wire_bytes"] <= stats["dense_bytes"] / ratio, stats


def one_line(examples: List[str], _: str) -> None:
    import torch
    wrap, statistics, save, load = examples
    given = names(wrapped=False)
    exec(wrap, given)
    trains(given)
    exec(statistics, given)
    before = given["hook"].state_dict()
    exec(save, given)
    torch.distributed.barrier()
    exec(load, given)
    assert laws.same_bits(before["tensors"], given["hook"].state_dict()["tensors"])
    trains(given)


def a_hook(ratio: float = 3, check: Callable[[Any], bool] = lambda hook: True) -> Callable[..., None]:
    """Returns a session of one example that makes a hook for a DDP, which then trains."""
    def run(examples: List[str], _: str) -> None:
        from gradwire.torch import compress
        given = names(**({} if "import" in examples[0] else {"compress": compress}))
        exec(examples[0], given)
        trains(given, ratio)
        assert check(given["hook"])
    return run


def a_loss_scale(examples: List[str], _: str) -> None:
    import torch

    import loss_scale
    from gradwire.torch import compress
    given = names(scaler=loss_scale.scaler(growth_interval=2))
    given["hook"] = compress(given["ddp_model"])
    exec(examples[0], given)
    batches = [{"x": torch.randn(8, 300), "overflow": i == 3} for i in range(6)]
    loss_scale.train(given["ddp_model"], torch.optim.SGD(given["model"].parameters(), lr=0.01), batches,
                     given["scaler"])
    same_on_all_ranks([p.detach().tolist() for p in given["ddp_model"].parameters()])


def from_powersgd_hook(examples: List[str], _: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    from gradwire.torch import Hook, allreduce_hook
    before, comment, after = examples[0].partition("# after")
    given = names(PowerSGDState=PowerSGDState, powerSGD_hook=powerSGD_hook, Hook=Hook,
                  allreduce_hook=allreduce_hook)
    exec(before, given)
    train_torch(given["ddp_model"])
    given.update(ddp_model=names()["ddp_model"])  # a DDP accepts one hook only
    exec(comment + after, given)
    trains(given, ratio=1)  # the first 1000 steps are uncompressed


def distributed_checkpoint(examples: List[str], _: str) -> None:
    wrap, save = examples
    given = names(wrapped=False, folder="distributed")
    exec(wrap, given)
    trains(given)
    exec(save, given)
    trains(given)


def backend(examples: List[str], _: str) -> None:
    import torch
    import torch.distributed as dist
    register, exact = examples
    given: Dict[str, Any] = {"torch": torch, "ranks": [0, 1]}
    exec(register, given)
    exec(exact, given)
    values = torch.linspace(-1, 1, 1 << 19) * (RANK + 1)
    mean = torch.linspace(-1, 1, 1 << 19) * 3
    for group, error in ((None, (1e-7, 0.1)), (given["evaluation"], (0, 1e-7))):
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        off = float((summed - mean).abs().max())
        assert error[0] <= off <= error[1], (group, off)


def logging(examples: List[str], _: str) -> None:
    """Logs to wandb and MLflow, or to stand-ins that record what the examples log."""
    import sys
    from types import SimpleNamespace

    from gradwire.torch import compress
    logged: List[Any] = []
    record = lambda *args, **named: logged.append((args, named))  # noqa: E731
    sys.modules["wandb"] = SimpleNamespace(  # type: ignore[assignment]
        init=lambda **_: SimpleNamespace(log=record))
    sys.modules["mlflow"] = SimpleNamespace(log_param=record, log_metrics=record)  # type: ignore[assignment]
    given = names(steps=2, train_step=train_torch)
    given["hook"] = compress(given["ddp_model"])
    for example in examples:
        exec(example, given)
    (wandb_row,), named = logged[1]
    assert named == {"step": 1} and wandb_row["gradwire/ratio"] > 3, logged
    assert wandb_row["gradwire/total_wire_bytes"] > wandb_row["gradwire/wire_bytes"], logged
    assert logged[2][0] == ("compression", "int8") and logged[4][1] == {"step": 1}, logged
    assert all(isinstance(v, (int, float)) for row in (wandb_row, logged[4][0][0]) for v in row.values())


def without_ddp(examples: List[str], address: str) -> None:
    import numpy as np

    import gradwire
    given = names(wrapped=False, gradwire=gradwire, world=2, tensor=None, array=np.full(5, RANK, np.float32),
                  weight_gradient=np.full((256, 512), RANK,
                                          np.float32), bias_gradient=np.full(256, RANK, np.float32))
    given["tensor"] = given["torch"].full((7,), float(RANK))
    exec(examples[0].replace("node0:29500", address), given)
    for result in (given["tensor"].numpy(), given["array"], given["weight_gradient"], given["bias_gradient"]):
        assert abs(result - 0.5).max() < 1e-4, result


PRELOAD = ["torch"]
SESSIONS = {
    "one line": Session(2, one_line, [
        "from gradwire.torch import compress", "hook.stats()", "state = hook.state_dict()",
        "hook.load_state_dict(torch.load("
    ]),
    "what it is short for": Session(2, a_hook(), ["from gradwire.torch import Hook"]),
    "continuing after a rank fails": Session(2, a_hook(check=lambda hook: hook.ranks == [0, 1]),
                                             ['hook = compress(ddp_model, "int8", min_ranks=2)']),
    "choosing the format": Session(2, a_hook(1, lambda hook: hook.choice["spec"] == hook.spec), [
        'hook = compress(ddp_model, "auto:error=0.1")']),  # which format depends on the machine
    "a loss scale": Session(2, a_loss_scale, ["hook.use_scaler(scaler)"]),
    "from PyTorch's hook": Session(2, from_powersgd_hook, ["# before"]),
    # A checkpoint needs the first example also.
    "torch.distributed.checkpoint": Session(
        2, distributed_checkpoint,
        ["from gradwire.torch import compress", "from torch.distributed import checkpoint"],
        needs_torch(2, 2)),
    "backend": Session(2, backend, ["from gradwire.torch import register_backend", "register_backend(None"],
                       needs_torch(2, 9)),
    "logging": Session(2, logging, ["import wandb", "import mlflow"]),
    "without DDP": Session(2, without_ddp, ["gradwire.allreduce_(tensor"]),
}
NOT_RUN = [("step = forward", "a formula")]
