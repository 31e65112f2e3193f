"""Tests FSDP2 under compress(): equal to PyTorch in FP32; other formats preserve the gradients' sum."""
from __future__ import annotations

import copy
import os
import pathlib
import unittest
from typing import Any, Dict

import torch
import torch.distributed as dist

from gradwire._fsdp_residual import _Packed

from fsdp_training import Run, batch_of, difference, loss_of, new_model, residual_sums, sum_over_ranks
from rank import RANK, WORLD, check, refused, say

FORMATS = ("bf16", "int8", "fp8", "int4", "int4:rotate=hadamard")
PLAIN = {"gradients": "fp32", "weights": "fp32"}


def fp32_is_fsdp_without_compress() -> None:
    native, ours = Run(), Run(PLAIN)
    for s in range(50):
        a, b = native.step(s), ours.step(s)
        check(abs(a - b) < 1e-5, f"losses of step {s}: {a} and {b}")
    worst = difference(native.parameters(), ours.parameters())
    check(worst <= 1e-6, f"parameters differ by {worst:.1e} after 50 steps")
    check(a < 4.05, f"nothing was learned: the loss is {a}")
    check(ours.handle.residual_bytes == 0, "fp32 loses nothing, but keeps a residual")
    ours.close()
    say(
        "fp32: after 50 steps, each with a new batch, parameters differ from PyTorch's by at most"
        f" {worst:.1e}"
    )


def nothing_is_lost() -> None:
    for spec in (*FORMATS, "int4:ef_decay=0.75"):
        for dense in (True, False):
            run = Run({"gradients": spec, "weights": "fp32", "dense": dense})
            worst = max(violation(run, s, 0.75 if "ef_decay" in spec else 1.0) for s in range(4))
            check(worst < 1e-6, f"{spec}, dense={dense}: conservation is violated by {worst:.1e}")
            kept = residual_sums(run.handle)
            narrow = spec != "bf16"
            check(("norm.weight" in kept) == (not (dense and narrow)),
                  f"{spec}, dense={dense}: residuals of {sorted(kept)}")
            check(
                max(float(e.abs().max()) for e in kept.values()) > 0,
                f"{spec}: nothing was lost, so nothing was compressed")
            run.close()
            say(
                f"{spec}, dense={dense}: sum of residuals + ranks x result is what went in, within"
                f" {worst:.1e}"
            )


def violation(run: Run, step: int, decay: float = 1.0) -> float:
    """Makes a step, and the same step with an unsharded copy on every rank. `decay`: the spec's ef_decay.

    Returns the norm of the difference between input and output (gradients and residuals), relative to the
    input.
    """
    old = residual_sums(run.handle)
    alone = new_model()
    alone.load_state_dict(run.parameters())
    loss_of(alone, step, alone.words).backward()
    run.step(step)
    new, error, total = residual_sums(run.handle), 0.0, 0.0
    reduced = run.gradients()
    for name, parameter in alone.named_parameters():
        if parameter.grad is None:
            continue
        went_in = sum_over_ranks(parameter.grad) + decay * old.get(name, 0.0)
        came_out = WORLD * reduced[name].double() + new.get(name, 0.0)
        error += float((went_in - came_out).square().sum())
        total += float(went_in.square().sum())
    return (error / total) ** 0.5


def residuals_in_fewer_bytes() -> None:
    # The residual's rounding error, which is random, is the only loss.
    trained = sum(p.numel() for n, p in new_model().named_parameters() if "spare" not in n)
    for mode, bytes_each, limit in (("fp32", 4.0, 1e-6), ("bf16", 2.0, 2e-4), ("int8", 1.04, 1e-3),
                                    ("off", 0.0, 1.0)):
        run = Run({"gradients": "int8", "weights": "fp32", "residual": mode})
        worst = max(violation(run, s) for s in range(3))
        check(worst < limit, f"residual={mode}: {worst:.1e}")
        check(mode in ("fp32",) or worst > 1e-6, f"residual={mode} is exact, so it isn't {mode}")
        each = run.handle.residual_bytes / trained
        # Shards are padded to equal sizes, and dense parameters also have residual memory.
        check(
            abs(each - bytes_each) <= 0.02 * bytes_each + 0.03,
            f"residual={mode} holds {each:.3f} bytes per parameter")
        say(
            f"residual={mode}: {each:.2f} bytes per trained parameter; lost in a step: {worst:.1e} of the"
            " gradient"
        )
        run.close()


def small_residuals_are_right_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1000, generator=generator) * torch.logspace(-6, 0, 1000)
    for mode, unit in (("bf16", 2.0**-7 * values.abs()), ("int8",
                                                          torch.full((1000, ),
                                                                     float(values.abs().max()) / 127))):
        draws = torch.stack([_Packed(mode, values, generator).values() for _ in range(1024)])
        off = (draws.double().mean(0) - values.double()).abs()
        check(bool((off <= 5 * unit / 2 / 1024**0.5 + 1e-12).all()),
              f"{mode}: the mean is off by {float((off / unit).max()):.2f} units")
        check(bool(((draws - values).abs() <= unit * 1.001 + 1e-12).all()),
              f"{mode}: a draw is more than a unit away")
        nearest = values.bfloat16().float() if mode == "bf16" else (values / unit).round() * unit
        check(bool(((nearest - values).abs() > 5 * unit / 2 / 1024**0.5).any()),
              f"{mode}: rounding to nearest passes, too")


def gathered_weights_are_the_same_bits_everywhere() -> None:
    for weights in ("bf16", "int8", "fp32"):
        run = Run({"gradients": "int8", "weights": weights})
        seen: Dict[str, torch.Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: torch.nn.Module, *_: Any) -> None:
                for parameter, value in module.named_parameters(recurse=False):
                    seen[f"{name}.{parameter}"] = value.detach().clone()
            return hook

        for name, module in run.model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(keep(name))
        for s in range(3):
            master = run.parameters()
            run.step(s)
            for name, value in seen.items():
                first = value.clone()
                dist.broadcast(first, 0)
                check(torch.equal(first, value), f"weights={weights}: {name} differs from rank 0's")
                error = float((value - master[name]).abs().max())
                scale = float(master[name].abs().max())
                exact = weights == "fp32" or (weights == "int8" and value.ndim == 1)
                check(error == 0 if exact else error <= scale / 63,
                      f"weights={weights}: {name} is off by {error:.1e} of {scale:.1e}")
                check(exact or name == "spare.bias" or value.ndim == 1 or error > 0,
                      f"weights={weights}: {name} was not compressed")
        check(len(seen) > 10, f"only {sorted(seen)} were seen")
        run.close()
    say("gathered weights: the same bits on all ranks, in FP32 the master's own")


def a_checkpoint_continues_bit_for_bit() -> None:
    for residual in ("fp32", "bf16"):
        arguments = {"gradients": "int4:schedule=two_shot", "weights": "bf16", "residual": residual}
        run = Run(arguments)
        for s in range(3):
            run.step(s)
        state = copy.deepcopy(run.handle.state_dict())
        model, optimizer = run.model.state_dict(), copy.deepcopy(run.optimizer.state_dict())
        model = {name: value.clone() for name, value in model.items()}
        for s in range(3, 6):
            run.step(s)
        other = Run(arguments)
        other.step(99)
        other.model.load_state_dict(model)
        other.optimizer.load_state_dict(optimizer)
        other.handle.load_state_dict(state)
        for s in range(3, 6):
            other.step(s)
        check(
            difference(run.parameters(), other.parameters()) == 0.0,
            f"residual={residual}: the resumed run differs")
        again = Run(arguments)
        again.model.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        for s in range(3, 6):
            again.step(s)
        check(difference(run.parameters(), again.parameters()) > 0.0, "the residuals make no difference")
        missing = "blocks.1.qkv.weight"
        partly = {**state, "parameters": [name for name in state["parameters"] if name != missing],
                  "tensors": {name: entry for name, entry in state["tensors"].items() if name != missing}}
        with unittest.TestCase().assertLogs("gradwire", "WARNING") as said:
            other.handle.load_state_dict(partly)
            other.handle.load_state_dict(state)
        texts = [record.getMessage() for record in said.records]
        check(
            texts == [
                f"the loaded state lacks 1 parameters, such as {missing!r}: their residuals begin at zero"
            ], f"said {texts}")
        for r in (run, other, again):
            r.close()
    say("checkpoint: resumed bit for bit, and not without the residuals")


# ---- Another number of ranks: fsdp_test.py runs these one after the other, with a folder
# ------------------------


def _folder() -> pathlib.Path:
    return pathlib.Path(os.environ["FSDP_FOLDER"])


def saves_for_another_number_of_ranks() -> None:
    options = {}
    if os.environ.get("FSDP_MESH") == "hsdp":
        options["mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, WORLD // 2),
                                                            mesh_dim_names=("replicas", "shards"))
    run = Run({"gradients": "int4", "weights": "fp32"}, **options)
    for s in range(3):
        run.step(s)
    torch.save(run.handle.state_dict(), _folder() / f"state.{RANK}")
    sums = residual_sums(run.handle)
    if RANK == 0:
        torch.save((WORLD, sums), _folder() / "sums")
    run.close()


def loads_from_another_number_of_ranks() -> None:
    world, sums = torch.load(_folder() / "sums")
    states = [torch.load(_folder() / f"state.{r}") for r in range(world)]
    run = Run({"gradients": "int4", "weights": "fp32"})
    run.handle.load_state_dict(states)
    loaded = residual_sums(run.handle)
    check(loaded.keys() == sums.keys() and len(sums) > 5,
          f"residuals of {sorted(loaded.keys() ^ sums.keys())}")
    for name, total in sums.items():
        error = float((loaded[name] - total).norm() / total.norm())
        check(error < 1e-6,
              f"{name}: the sum of residuals changed by {error:.1e} from {world} to {WORLD} ranks")
    worst = violation(run, 3)  # the next step adds the loaded residuals
    check(worst < 1e-6, f"conservation after loading: {worst:.1e}")
    if RANK < world:
        others = [state for r, state in enumerate(states) if r % WORLD != RANK]
        refused(lambda: run.handle.load_state_dict(others), ValueError, "pass a list of all")
    run.close()
    say(f"{world} ranks' residuals loaded by {WORLD}: their sum is the same, and the next step conserves it")
