"""Tests the hook's state through torch.distributed.checkpoint (PyTorch 2) and torch.save().

The same number of ranks gets the same states back. Another number of ranks shares the residuals, and
preserves their sum.
"""
from __future__ import annotations

import copy
import os
import pathlib
import sys
import warnings
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch import Hook

from ddp_training import TASKS, Run, batch_of
from rank import RANK, WORLD, check, refused, say

TODAY = hasattr(torch, "compile")  # PyTorch 1.13 checkpoints sharded tensors only
# A named schedule, because bits are compared.
EXACT = "powersgd:rank=2,schedule=two_shot"
SPECS = (EXACT, "int4:schedule=ring", "bf16:schedule=two_shot,residual=int8")


def folder(spec: str) -> pathlib.Path:
    return pathlib.Path(os.environ["DDP_FOLDER"], spec.partition(":")[0])


def new_run(spec: str) -> Any:
    model = TASKS["vit"].build()
    hook = Hook(spec, model=model)
    return hook, Run(TASKS["vit"], hook, model=model, bucket_cap_mb=0.25)


def residual_sums(hook: Hook) -> Dict[str, torch.Tensor]:
    """Returns the sum of each parameter's residuals over all ranks, in float64."""
    sums = {}
    for name, t in sorted(hook.state_dict()["tensors"].items()):
        total = t["state"].get("residual", torch.zeros(t["rows"] * t["cols"])).double()
        if total.numel() == 0:
            total = torch.zeros(t["rows"] * t["cols"]).double()
        dist.all_reduce(total)
        sums[name] = total
    return sums


def saves() -> None:
    for spec in SPECS:
        hook, run = new_run(spec)
        for s in range(4):
            run.step(s)
        folder(spec).mkdir(exist_ok=True)
        sums = residual_sums(hook)
        check(all(float(total.abs().max()) > 0 for name, total in sums.items() if "mlp.0.weight" in name),
              "no residuals to save")
        if TODAY:
            import torch.distributed.checkpoint as dcp
            dcp.save({"model": run.model.state_dict(), "hook": hook.checkpoint()},
                     checkpoint_id=folder(spec) / "dcp")
            dcp.save({"hook": hook.state_dict()}, checkpoint_id=folder(spec) / "replicated")
        state = {
            "world": WORLD, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
            "sums": sums, "hook": hook.state_dict(gather=False)
        }
        torch.save(state, folder(spec) / f"rank{RANK}")
        for s in range(4, 7):
            run.step(s)
        if RANK == 0:
            torch.save(run.parameters(), folder(spec) / "after")
        hook.close()


def loads() -> None:
    for spec in SPECS:
        saved = [
            torch.load(folder(spec) / f"rank{r}") for r in range(torch.load(folder(spec) / "rank0")["world"])
        ]
        world = saved[0]["world"]
        for through_dcp in ([False, True] if TODAY else [False]):
            hook, run = new_run(spec)
            if through_dcp:
                import torch.distributed.checkpoint as dcp
                sources = [None] if world == WORLD else []
                sources += [folder(spec) / "dcp", dcp.FileSystemReader(folder(spec) / "dcp")]
                for source in sources:
                    state = {"model": run.model.state_dict(), "hook": hook.checkpoint(load_from=source)}
                    dcp.load(state, checkpoint_id=folder(spec) / "dcp")
                    check(hook.state_dict()["steps"] == 4, f"steps: {hook.state_dict()['steps']}")
            else:
                hook.load_state_dict([s["hook"] for s in reversed(saved)])
                run.model.load_state_dict(saved[0]["model"])
            run.optimizer.load_state_dict(copy.deepcopy(saved[0]["optimizer"]))
            check_loaded(spec, world, saved, hook, run)
            hook.close()
        wrong_states_are_refused(spec, world, saved)


def check_loaded(spec: str, world: int, saved: List[Dict[str, Any]], hook: Hook, run: Run) -> None:
    wanted, sums = saved[0]["sums"], residual_sums(hook)
    check(sums.keys() == wanted.keys() and len(sums) > 40,
          f"residuals of {sorted(sums.keys() ^ wanted.keys())}")
    for name, total in wanted.items():
        error = float((sums[name] - total).norm()) / max(float(total.norm()), 1e-30)
        check(error <= 1e-6,
              f"{spec}: {name}: the sum of residuals changed by {error:.1e} from {world} to {WORLD} ranks")
    if world == WORLD:
        own = saved[RANK]["hook"]["tensors"]
        for name, t in hook.state_dict()["tensors"].items():
            check(t["state"].keys() == own[name]["state"].keys(), f"{name}: {sorted(t['state'])}")
            check(all(torch.equal(value, own[name]["state"][kind]) for kind, value in t["state"].items()),
                  f"{spec}: {name} is not what rank {RANK} saved")
    off = conservation(hook, run, sums)
    check(off <= (1e-3 if "residual=" in spec else 1e-5), f"{spec}: the next step loses {off:.1e}")
    for s in range(5, 7):
        run.step(s)
    if world == WORLD:
        difference = float((run.parameters() - torch.load(folder(spec) / "after")).abs().max())
        # As in ddp_ranks.py, a new DDP has other buckets in its first step, so a lossy format rounds other
        # sums.
        check(difference <= (0.0 if spec == EXACT else 1e-2), f"{spec}: continued {difference:.1e} off")
    check(hook.state_dict()["steps"] == 7, "steps after continuing")


def conservation(hook: Hook, run: Run, before: Dict[str, torch.Tensor]) -> float:
    """Makes step 4, and returns the largest relative error of averages and residuals.

    The averages and residuals after the step must have the sum of the gradients and residuals before it.
    """
    alone = copy.deepcopy(run.model)
    alone.zero_grad()
    images, labels = batch_of(run.task, 4)
    nn.functional.cross_entropy(alone(images), labels).backward()
    run.step(4)
    after, worst = residual_sums(hook), 0.0
    for (name, p), own in zip(run.model.named_parameters(), alone.parameters()):
        total = own.grad.double().flatten()
        dist.all_reduce(total)
        total += before[name]
        off = WORLD * p.grad.double().flatten() + after[name] - total
        worst = max(worst, float(off.norm() / total.norm().clamp_min(1e-12)))
    return worst


def wrong_states_are_refused(spec: str, world: int, saved: List[Dict[str, Any]]) -> None:
    hook = Hook(spec)
    needed = [r for r in range(world) if r % WORLD == RANK]
    without = [s["hook"] for r, s in enumerate(saved) if r not in needed] or [saved[0]["hook"]]
    if needed and len(needed) < world:
        refused(lambda: hook.load_state_dict(without), ValueError, "hook.checkpoint()", f"of {world}")
    if TODAY:
        import torch.distributed.checkpoint as dcp
        # hook.state_dict() was saved only once for all ranks. It is loaded into a hook without tensors.
        state = {"hook": hook.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder(spec) / "replicated")
        refused(lambda: hook.load_state_dict(state["hook"]), ValueError, "hook.checkpoint()")
        # PyTorch 2.6 fails to pickle its report of an error on Python 3.13, and raises TypeError instead.
        reports_errors = sys.version_info < (3, 13) or torch.__version__ >= (2, 7)
        if not reports_errors:
            say("not tried: wrong checkpoints on PyTorch 2.6 and Python 3.13")
        elif world != WORLD:
            refused(lambda: dcp.load({"hook": hook.checkpoint()}, checkpoint_id=folder(spec) / "dcp"),
                    dcp.api.CheckpointException, f"of {WORLD}")
        else:
            without_hooks = {"hook": hook.checkpoint(load_from=folder(spec) / "replicated")}
            refused(lambda: dcp.load(without_hooks, checkpoint_id=folder(spec) / "dcp"), ValueError,
                    "hook.checkpoint()")
    hook.close()
    say(f"{spec}: {world} ranks' states loaded by {WORLD}")


SCENARIOS: List[Callable[[], None]] = [saves, loads]
