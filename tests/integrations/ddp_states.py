"""Scenarios of the DDP hook's state: saved by rank 0 or all ranks, loaded by name and by other ranks."""
from __future__ import annotations

import io
import os
import pathlib
import pickle
import sys
import warnings
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from torch import nn

import gradwire
import laws
from gradwire import _hook_state
from gradwire.torch import Hook, allreduce_hook, compress
from rank import RANK, WORLD, check, refused, say
from scenarios import scenario
from training import TODAY, Run, Warnings, closing, ddp_of, residuals, small, train

BAD = gradwire.BadArgument
SPEC = "int4:schedule=ring,dense=off"
EXACT = "powersgd:rank=2,schedule=two_shot"  # its bits do not depend on DDP's buckets


def compressed(model: Any = None, spec: str = SPEC, steps: int = 3) -> Any:
    """Returns a DDP with a hook that has trained, and the hook."""
    ddp = ddp_of(small() if model is None else model)
    hook = compress(ddp, spec)
    if steps:
        train(ddp, steps)
    return ddp, hook


@scenario()
def rank_0_saves_the_states_of_all() -> None:
    _, hook = compressed()
    own = residuals(hook)
    check(len(own) == 6 and all(float(r.abs().max()) > 0 for r in own.values()), "no residuals")
    state = hook.state_dict()
    check(len(state.get("others", [])) == (WORLD - 1 if RANK == 0 else 0), "others")
    file = io.BytesIO()
    torch.save(state, file)
    saved = torch.load(io.BytesIO(laws.of_all_ranks(file.getvalue())[0]), weights_only=True)
    other, loaded = compressed(steps=0)
    loaded.load_state_dict(saved)
    check(laws.same_bits(residuals(loaded), own), "another rank's residuals")
    train(other, 1)
    check(loaded.state_dict()["steps"] == 4, "steps")
    if RANK != 0:
        saved.pop("others")
        refused(lambda: loaded.load_state_dict(saved), BAD,
                "call hook.state_dict() on every rank and save rank 0's result")
    for change in ({"version": 3}, {"spec": "fp32"}):
        refused(lambda: hook.load_state_dict({**hook.state_dict(gather=False), **change}), ValueError)
    pickled = io.BytesIO()
    torch.save(hook, pickled)
    refused(lambda: torch.load(io.BytesIO(pickled.getvalue()), weights_only=True), pickle.UnpicklingError)
    copied = torch.load(io.BytesIO(pickled.getvalue()), **({"weights_only": False} if TODAY else {}))
    check(laws.same_bits(residuals(copied), own), "residuals of a pickled hook")
    for each in (copied, loaded, hook):
        each.close()


@scenario()
def a_rank_that_saves_alone_is_told() -> None:
    _, hook = compressed()
    patience, _hook_state._PATIENCE_S = _hook_state._PATIENCE_S, 0.2
    if RANK == 0:
        hook._timeout_s = 1.0
        with Warnings() as texts:
            refused(hook.state_dict, gradwire.CommFailed, "rank 1", "on every rank", "gather=False")
        check(len(texts) == 1 and "rank 1" in texts[0], str(texts))
        hook._timeout_s = 60.0
    dist.barrier()
    _hook_state._PATIENCE_S = patience
    check(len(hook.state_dict().get("others", [])) == (WORLD - 1 if RANK == 0 else 0), "later all ranks can")
    hook.close()


@scenario()
def frozen_parameters_are_found_by_name() -> None:
    def frozen(model: nn.Module, freeze: bool) -> nn.Module:
        model[0].requires_grad_(not freeze)  # type: ignore[index]
        return model

    for first in (True, False):
        _, hook = compressed(frozen(small(), first))
        saved = hook.state_dict(gather=False)
        hook.close()
        other, loaded = compressed(frozen(small(), not first), steps=0)
        loaded.load_state_dict(saved)
        with Warnings() as texts:
            train(other, 1)
        check(len(texts) == (1 if first else 0), str(texts))
        check(not first or ("2 parameters" in texts[0] and "begin at zero" in texts[0]), str(texts))
        check(loaded.state_dict(gather=False)["steps"] == 4, "steps")
        train(other, 2)
        loaded.close()
    # One hook serves the model before and after its parameters are unfrozen.
    model = frozen(small(), True)
    with closing(Hook(SPEC, model=model)) as hook:
        for freeze, steps, count in ((True, 3, 4), (False, 1, 6)):
            ddp = ddp_of(frozen(model, freeze))
            ddp.register_comm_hook(hook, allreduce_hook)
            train(ddp, steps)
            check(len(residuals(hook)) == count, f"{sorted(residuals(hook))}")
        check(hook.state_dict(gather=False)["steps"] == 4, "steps")


@scenario()
def another_models_state_or_hook_is_refused() -> None:
    _, hook = compressed()
    state = hook.state_dict(gather=False)
    _, other = compressed(nn.ModuleDict({"x": nn.Linear(3, 3)}), steps=0)
    refused(lambda: other.load_state_dict(state), BAD, "another model", "bias", "x.weight")
    refused(lambda: other.load_state_dict({**state, "tensors": {"parameter 0": {}}}), BAD,
            "in place of parameter names", "parameter 0", "Hook()")
    wider, wide = compressed(nn.Sequential(nn.Linear(16, 65), nn.Tanh(), nn.Linear(65, 4)), steps=0)
    wide.load_state_dict(state)
    refused(lambda: train(wider, 1), RuntimeError, "another model", "64 x 16", "65 x 16")
    for each in (hook, other, wide):
        each.close()
    for named in (False, True):
        models = [small(), small()]
        hook = Hook(SPEC, model=models[0] if named else None)
        if named:
            refused(lambda: hook.name_parameters(models[1]), BAD, "0.weight", "a hook for each model")
        ddps = [ddp_of(model) for model in models]
        for ddp in ddps:
            ddp.register_comm_hook(hook, allreduce_hook)
        train(ddps[0], 2)
        refused(lambda: train(ddps[1], 1), RuntimeError, "a hook for each model")
        hook.close()


def residual_sums(run: Run) -> Dict[str, Any]:
    """Returns the sum of each parameter's residuals over all ranks, in float64."""
    everyones = laws.of_all_ranks(run.named(residuals(run.hook)))
    return {name: sum(each[name] for each in everyones) for name in everyones[0]}


@scenario(2, 4, 2, ends=True)
def states_continue_on_another_number_of_ranks() -> None:
    """Each set of ranks loads what earlier sets have saved, and saves for later ones."""
    for spec in (EXACT, SPEC, "bf16:schedule=two_shot,residual=int8"):
        folder = pathlib.Path(os.environ["SCENARIO_FOLDER"], spec.partition(":")[0])
        for earlier in sorted(folder.glob("[0-9]*")) if folder.exists() else []:
            loads(spec, earlier)
        mine = folder / str(WORLD)
        exists = mine.exists()
        dist.barrier()  # before a rank creates the folder
        if not exists:
            saves(spec, mine)
        dist.barrier()


def saves(spec: str, folder: pathlib.Path) -> None:
    run = Run(spec, bucket_kb=30)
    run.steps(0, 4)
    folder.mkdir(exist_ok=True, parents=True)
    sums = residual_sums(run)
    check(all(sums[name].any() for name in ("5.weight", "7.weight")), "no residuals to save")
    if TODAY:
        import torch.distributed.checkpoint as dcp
        state = {"model": run.model.state_dict(), "hook": run.hook.checkpoint()}
        dcp.save(state, checkpoint_id=folder / "dcp")
        dcp.save({"hook": run.hook.state_dict()}, checkpoint_id=folder / "replicated")
    state = {**run.state(), "sums": sums}
    after = run.steps(4, 7)
    torch.save({**state, "after": after}, folder / f"rank{RANK}")
    run.hook.close()


def loads(spec: str, folder: pathlib.Path) -> None:
    world = int(folder.name)
    options = {"weights_only": False} if TODAY else {}
    saved = [torch.load(folder / f"rank{r}", **options) for r in range(world)]
    for through_dcp in ([False, True] if TODAY else [False]):
        run = Run(spec, bucket_kb=30).load(saved[0], hook=False)
        if through_dcp:
            import torch.distributed.checkpoint as dcp
            sources = [None] if world == WORLD else []
            for source in [*sources, folder / "dcp", dcp.FileSystemReader(folder / "dcp")]:
                state = {"model": run.model.state_dict(), "hook": run.hook.checkpoint(load_from=source)}
                dcp.load(state, checkpoint_id=folder / "dcp")
                check(run.hook.state_dict()["steps"] == 4, f"steps: {run.hook.state_dict()['steps']}")
        else:
            run.hook.load_state_dict([s["hook"] for s in reversed(saved)])
        for name, total in residual_sums(run).items():
            laws.near(f"{spec}: the residuals of {name}, from {world} to {WORLD} ranks", total,
                      saved[0]["sums"][name], 1e-6)
        if world == WORLD:
            own = {name: t["state"] for name, t in saved[RANK]["hook"]["tensors"].items()}
            loaded = {name: t["state"] for name, t in run.hook.state_dict()["tensors"].items()}
            check(laws.same_bits(loaded, own), f"{spec}: not what rank {RANK} saved")
        run.step_without_loss(4, 5e-3 if "residual=" in spec else 1e-5)
        weights = run.steps(5, 7)
        if world == WORLD:  # a new DDP has other buckets in its first step, so blocks round otherwise
            off = float((weights - saved[RANK]["after"]).abs().max())
            check(off <= (0.0 if spec == EXACT else 1e-2), f"{spec}: continued {off:.1e} off")
        check(run.hook.state_dict()["steps"] == 7, "steps after continuing")
        run.hook.close()
    wrong_states_are_refused(spec, world, folder, [s["hook"] for s in saved])
    say(f"{spec}: {world} ranks' states loaded by {WORLD}")


def wrong_states_are_refused(spec: str, world: int, folder: pathlib.Path, saved: List[Any]) -> None:
    hook = Hook(spec)
    needed = [r for r in range(world) if r % WORLD == RANK]
    without = [state for r, state in enumerate(saved) if r not in needed] or saved[:1]
    if needed and len(needed) < world:
        refused(lambda: hook.load_state_dict(without), ValueError, "hook.checkpoint()", f"of {world}")
    if TODAY:
        import torch.distributed.checkpoint as dcp
        # hook.state_dict() was saved only once for all ranks. It is loaded into a hook without tensors.
        state = {"hook": hook.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder / "replicated")
        refused(lambda: hook.load_state_dict(state["hook"]), ValueError, "hook.checkpoint()")
        # PyTorch 2.6 fails to pickle its report of an error on Python 3.13, and raises TypeError instead.
        if sys.version_info >= (3, 13) and torch.__version__ < (2, 7):
            say("not tried: wrong checkpoints on PyTorch 2.6 and Python 3.13")
        elif world != WORLD:
            refused(lambda: dcp.load({"hook": hook.checkpoint()}, checkpoint_id=folder / "dcp"),
                    dcp.api.CheckpointException, f"of {WORLD}")
        else:
            without_hooks = {"hook": hook.checkpoint(load_from=folder / "replicated")}
            refused(lambda: dcp.load(without_hooks, checkpoint_id=folder / "dcp"), ValueError,
                    "hook.checkpoint()")
    hook.close()
