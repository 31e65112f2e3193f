"""Scenarios of FSDP2 with gradients="auto", with a GradScaler, and under defaults of the whole program."""
from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
import laws
import loss_scale
from auto_choice import chooses_int8, chosen_at, errors_are_the_formats
from fsdp_training import PLAIN, Run, difference, meshes, replicas_of, whole
from gradwire import _auto
from gradwire.fsdp import compress
from rank import RANK, WORLD, check, refused, say
from scenarios import scenario
from training import small

REQUEST = {"gradients": "auto:error=0.03,allow=bf16+int8+int4", "weights": "fp32"}


@scenario()
def auto_measures_formats_and_all_ranks_choose_alike() -> None:
    run = Run({"gradients": "auto"})
    check(run.handle.choice is None and run.handle.residual_bytes == 0, "before the first step")
    first = chosen_at(run, run.handle)
    check(first >= _auto.OBSERVED + 2, f"chosen before step {first}")
    specs = [row["spec"] for row in run.handle.choice["candidates"]]
    check(specs == ["fp32", "bf16", "int8", "int4"], f"{specs}")
    errors_are_the_formats(run.handle.choice)
    run.close()
    say(f"auto on {WORLD} ranks: {run.handle.choice['spec']}, chosen after {first} steps")


@scenario()
def auto_has_the_bits_of_fp32_and_then_of_the_choice() -> None:
    with chooses_int8():
        run = Run(REQUEST)
        first = chosen_at(run, run.handle)
    check(run.handle.choice["spec"] == "int8", f"chose {run.handle.choice}")
    check(run.handle.residual_bytes > 0, "the choice has error feedback")
    weights = run.steps(first + 1, first + 4)
    other = Run(PLAIN)
    other.steps(0, first)
    other.close()
    other.handle = compress(other.model, "int8", "fp32", timeout_s=120)
    check(difference(weights, other.steps(first, first + 4)) == 0, "other weights than the choice's")
    # A state has the choice, which another run takes over with the residuals.
    state, resumed = run.handle.state_dict(), Run(REQUEST)
    resumed.handle.load_state_dict(state)
    check(resumed.handle.choice == {"spec": "int8", "loaded": True}, f"{resumed.handle.choice}")
    check(laws.same_bits(resumed.handle.state_dict()["tensors"], state["tensors"]), "other residuals")
    for one in (run, other, resumed):
        one.close()


@scenario()
def auto_of_fsdp_refuses_what_it_cannot_choose() -> None:
    for spec, error, *words in (
        ("auto:allow=powersgd:rank=2", gradwire.Unsupported, "powersgd:rank=2", "whole tensors"),
        ("auto:error=x", gradwire.BadArgument, "'error=x'", _auto.GRAMMAR),
        ("auto:allow=int9", gradwire.BadArgument, "int9")):
        refused(lambda: Run({"gradients": spec}), error, *words)
    mesh = replicas_of(2)  # two groups of ranks could choose apart
    for each in (mesh, mesh["shards"]):
        refused(lambda: Run({"gradients": "auto"}, mesh=each), gradwire.Unsupported, "over all ranks")


# ---- Loss scales -------------------------------------------------------------------------------------------


@scenario()
def a_scaled_run_has_the_bits_of_one_without() -> None:
    """See ddp_loss_scale.py. The handle is dropped: training continues without it."""
    generator = torch.Generator().manual_seed(RANK)
    batches = [{"x": torch.randn(8, 16, generator=generator), "overflow": i in (0, 3, 9, 17)}
               for i in range(20)]
    cases = [(mesh, residual) for mesh in (None, meshes()[0]) for residual in ("fp32", "bf16", "int8")]
    for mesh, residual in cases:
        weights: List[torch.Tensor] = []
        for scaled, followed in ((False, False), (True, True), (True, False)):
            model = small()
            for part in (model[0], model):
                fully_shard(part, mesh=mesh)
            handle: Any = compress(model, "int4", "fp32", residual, dense=False, timeout_s=60)
            scaler = loss_scale.scaler() if scaled else None
            if followed:
                handle.use_scaler(scaler)
            closing = weakref.WeakMethod(handle.close)
            handle = None
            gc.collect()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            scales = loss_scale.train(model, optimizer, batches, scaler)
            check(not scaled or len(set(scales)) >= 3, f"the scale did not change enough: {scales}")
            close = closing()
            check(close is not None, "the handle is gone")
            close()
            weights.append(torch.cat([whole(p.detach()).flatten() for p in model.parameters()]))
        check(torch.equal(weights[0], weights[1]), f"{residual}: other weights than without a scaler")
        check(not torch.equal(weights[0], weights[2]), f"{residual}: residuals of another scale go unnoticed")


@scenario(2)
def half_precision_trains_with_a_scaler() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    half = torch.float16
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
    handle = compress(model, "int4", "fp32", timeout_s=60)
    scaler = loss_scale.scaler(init_scale=2.0 ** 24, growth_interval=5)  # first gradients are infinite
    handle.use_scaler(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(RANK)).half()
    losses, scales = [], [scaler.get_scale()]
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :4].float()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    check(losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}")
    skipped = sum(after < before for before, after in zip(scales, scales[1:]))
    check(skipped > 1 and max(scales[-5:]) > min(scales), f"{skipped} steps skipped, with scales {scales}")
    handle.close()
    refused(lambda: handle.use_scaler(scaler), gradwire.BadHandle)


# ---- Defaults of the program -------------------------------------------------------------------------------

ARGUMENTS: Tuple[Dict[str, Any], ...] = (
    {"gradients": "int4", "weights": "int8"}, {"gradients": "int8", "residual": "bf16"},
    {"gradients": "int4", "residual": "int8"}, REQUEST,
    {"gradients": "int8", "replicas": "powersgd:rank=2,wire=int4"})
Setting = Callable[[], Any]


def default(change: Callable[[Any], None], value: Any, normal: Any) -> Setting:
    @contextlib.contextmanager
    def setting() -> Iterator[None]:
        change(value)
        try:
            yield
        finally:
            change(normal)

    return setting


# What surrounds all of gradwire's calls, and forward and backward.
EVERYWHERE: List[Setting] = [default(torch.set_default_dtype, dtype, torch.float32)
                             for dtype in (torch.bfloat16, torch.float16, torch.float64)]
# What surrounds compress(), state_dict() and load_state_dict() only.
CALLS: List[Setting] = [lambda: torch.device("meta"), default(torch.set_default_device, "meta", None),
                        torch.inference_mode, torch.no_grad]


def results(arguments: Dict[str, Any], everywhere: Setting, calls: Setting) -> List[Any]:
    """Trains, saves, loads into another run and trains on. Returns bytes of residuals, losses and states."""
    runs = [Run(mesh=replicas_of(2) if "replicas" in arguments else None) for _ in range(2)]
    steps, found = 12 if arguments["gradients"].startswith("auto") else 2, []  # type: ignore[var-annotated]
    with everywhere(), calls():
        for run in runs:
            run.handle = compress(run.model, **{"weights": "fp32", "timeout_s": 60, **arguments})
    for run, first, end in ((runs[0], 0, steps), (runs[1], steps, steps + 2)):
        for step in range(first, end):
            with everywhere():
                loss = run.step(step)
        with everywhere(), calls():
            state = run.handle.state_dict()
            if run is runs[0]:
                runs[1].handle.load_state_dict(state)
        if run is runs[0]:
            runs[1].model.load_state_dict({n: v.clone() for n, v in run.model.state_dict().items()})
        for name, entry in state["tensors"].items():
            tensors = {kind: value for kind, value in entry.items() if isinstance(value, torch.Tensor)}
            check(all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors.values()), name)
            found.append({kind: value.clone() for kind, value in tensors.items()})
        found += [loss, run.parameters(), run.handle.residual_bytes]
        check(run.handle.residual_bytes > 0, f"{arguments}: no residual")
    for run in runs:
        run.close()
    return found


@scenario(2)
def defaults_of_the_program_change_no_bit() -> None:
    nothing = contextlib.nullcontext
    with chooses_int8():  # for a choice that does not depend on the machine
        for arguments in ARGUMENTS:
            expected = results(arguments, nothing, nothing)
            settings = [(each, nothing) for each in EVERYWHERE] + [(nothing, each) for each in CALLS]
            for number, (everywhere, calls) in enumerate(settings):
                found = results(arguments, everywhere, calls)  # type: ignore[arg-type]
                check(laws.same_bits(found, expected), f"{arguments}: setting {number} changes a result")
