"""The suite of scenarios.py for gradwire.fsdp: FSDP2, Gloo, CPU. docs/for-fsdp.md says what holds."""
from __future__ import annotations

import copy
import unittest
import unittest.mock
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import laws
from fsdp_training import (PLAIN, SHAPES, Run, Sharded, Transformer, difference, gradients_of, loss_of,
                           meshes, new_model, replicas_of, residual_sums, shard_blocks)
from gradwire._communicator import Communicator
from gradwire._fsdp_residual import _Packed
from gradwire.fsdp import compress
from rank import RANK, WORLD, check, say
from scenarios import scenario


def begin() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


# ---- Laws --------------------------------------------------------------------------------------------------

# The experts in use, by step, and those with a zero gradient on odd ranks.
USED = ((0, 1), (0,), (1,), (1,), (), (0, 1), (0,), (0, 1))
ZERO = ((), (), (1,), (), (), (0,), (0,), ())
EXPERTS = [{f"{name}{i}": shape for name, shape in SHAPES.items()} for i in range(2)]
# The arguments of compress(), whether shards are columns, and the part that rounded residuals may lose.
FORMATS: Tuple[Tuple[Dict[str, Any], bool, float], ...] = (
    *(({"gradients": spec}, False, 1e-6) for spec in ("bf16", "int8", "fp8", "int4:ef_decay=0.75",
                                                      "int4:rotate=hadamard", "topk:k=4,of=64")),
    ({"gradients": "int4:schedule=two_shot"}, True, 1e-6),
    ({"gradients": "int8", "residual": "bf16"}, False, 1e-3),
    ({"gradients": "int8", "residual": "int8"}, True, 1e-2))
OVER_REPLICAS: Tuple[Tuple[Dict[str, Any], bool, float], ...] = (
    ({"gradients": "int4"}, False, 1e-6), ({"gradients": "int8", "replicas": "int4"}, True, 1e-6),
    ({"replicas": "powersgd:rank=2"}, False, 1e-6), ({"replicas": "powersgd:rank=2,start=2"}, True, 1e-6),
    ({"gradients": "int8", "replicas": "powersgd:rank=2,wire=int8"}, True, 1e-6),
    ({"gradients": "int4", "replicas": "powersgd:rank=2,wire=int4,block=64"}, False, 1e-6),
    ({"replicas": "powersgd:rank=2", "residual": "bf16"}, False, 2e-2))


def own_gradients(step: int) -> Dict[str, torch.Tensor]:
    found: Dict[str, torch.Tensor] = {}
    for i in USED[step]:
        unused = i in ZERO[step] and RANK % 2
        found.update({name: g * (not unused) for name, g in gradients_of(i, step, EXPERTS[i]).items()})
    return found


@scenario()
def every_format_keeps_the_laws() -> None:
    """Checks the laws for each format, mesh and kind of shard, with unused experts.

    Nothing is lost; what is unused keeps its state; ranks and replicas agree; a state continues bit for bit.
    """
    cases = [(None, *row) for row in FORMATS] + [(mesh, *row) for mesh in meshes() for row in OVER_REPLICAS]
    for number, (mesh, arguments, by_columns, limit) in enumerate(cases):
        what = f"{'' if mesh is None else tuple(mesh.shape)} {arguments}"
        decay = 0.75 if "ef_decay" in arguments.get("gradients", "") else 1.0
        runs = [Sharded(mesh, {"dense": number % 3 == 0, **arguments}, by_columns=by_columns, experts=EXPERTS,
                        blockwise=number % 2 == 0) for _ in range(2)]
        later: List[Any] = []
        for step in range(len(USED)):
            before, own = runs[0].state(), own_gradients(step)
            result = runs[0].step_without_loss(f"{what}, step {step}", own, limit, decay, step % 2 == 0)
            after = runs[0].state()
            for name in before.keys() - own.keys():
                kept = {kind: before[name][kind] for kind in before[name].keys() - {"steps", "factor_steps"}}
                check(laws.same_bits(kept, {kind: after[name][kind] for kind in kept}),
                      f"{what}, step {step}: the state of {name}")
            if step == 5:
                saved = copy.deepcopy(runs[0].handle.state_dict())
                check(any(values.any() for values in runs[0].residuals().values()), f"{what}: no residual")
            later += [result] if step > 5 else []
        runs[1].step(own_gradients(0))
        for run in runs:
            run.handle.load_state_dict(saved)
            for step, wanted in zip((6, 7), later):
                own = own_gradients(step)
                again = run.step(own, step % 2 == 0)
                # Calls draw other rotations, and residuals of int8 are rounded again.
                check(all(torch.equal(again[name], wanted[name]) for name in own) or "rotate=" in what
                      or arguments.get("residual") == "int8",
                      f"{what}: another result after the state was loaded")
            run.handle.close()
    say(f"{len(cases)} formats lose nothing, with unused experts, and continue from a state")


@scenario()
def residuals_have_the_stated_bytes_and_dense_parameters_have_none() -> None:
    trained = sum(p.numel() for n, p in new_model().named_parameters() if "spare" not in n)
    for residual, each in (("fp32", 4.0), ("bf16", 2.0), ("int8", 1.04), ("off", 0.0)):
        run = Run({"residual": residual})
        run.step(0)
        found = run.handle.residual_bytes / trained
        # Shards are padded to equal sizes, and dense parameters also have residual memory.
        check(abs(found - each) <= 0.02 * each + 0.03, f"residual={residual} holds {found:.3f} bytes each")
        run.close()
    for spec, dense, kept in (("bf16", True, True), ("int8", True, False), ("int8", False, True),
                              ("int8", ["auto"], False), ("bf16", ["norm.*"], False)):
        run = Run({"gradients": spec, "weights": "fp32", "dense": dense})
        run.step(0)
        has = bool(residual_sums(run.handle)["norm.weight"].any())
        check(has == kept == ("norm.weight" in run.handle.state_dict()["tensors"]), f"{spec}, dense={dense}")
        run.close()


@scenario(2)
def small_residuals_are_right_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1000, generator=generator) * torch.logspace(-6, 0, 1000)
    for mode, unit in (("bf16", 2.0**-7 * values.abs()),
                       ("int8", torch.full((1000,), float(values.abs().max()) / 127))):
        draws = torch.stack([_Packed(mode, values, generator).values() for _ in range(1024)])
        off, limit = (draws.double().mean(0) - values.double()).abs(), 5 * unit / 2 / 1024**0.5 + 1e-12
        check(bool((off <= limit).all()), f"{mode}: the mean is off by {float((off / unit).max()):.2f} units")
        check(bool(((draws - values).abs() <= unit * 1.001 + 1e-12).all()), f"{mode}: a draw is a unit away")
        nearest = values.bfloat16().float() if mode == "bf16" else (values / unit).round() * unit
        check(bool(((nearest - values).abs() > limit).any()), f"{mode}: rounding to nearest also passes")


@scenario()
def gathered_weights_are_the_same_bits_everywhere() -> None:
    for weights in ("bf16", "int8", "fp32"):
        run, seen = Run({"gradients": "int8", "weights": weights}), {}  # type: ignore[var-annotated]

        def hook(module: nn.Module, _: Any, name: str) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                seen[f"{name}.{own}"] = parameter.detach().clone()

        for name, module in run.model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(lambda module, x, name=name: hook(module, x, name))
        for step in range(3):
            master = run.parameters()
            run.step(step)
            laws.ranks_agree(f"weights={weights}", *(value.numpy() for value in seen.values()))
            for name, value in seen.items():
                error, scale = (float(t.abs().max()) for t in (value - master[name], master[name]))
                exact = weights == "fp32" or (weights == "int8" and value.ndim == 1)
                check(error == 0 if exact else error <= scale / 63, f"{weights}: {name} is {error:.1e} off")
                check(exact or value.ndim == 1 or error > 0, f"weights={weights}: {name} was not compressed")
        check(len(seen) > 10, f"only {sorted(seen)} were seen")
        run.close()


@scenario(2)
def a_state_that_lacks_parameters_is_loaded_with_a_warning() -> None:
    run = Run({"gradients": "int4"})
    run.step(0)
    state, missing = run.handle.state_dict(), "blocks.1.qkv.weight"
    partly = {**state, "parameters": [name for name in state["parameters"] if name != missing],
              "tensors": {name: entry for name, entry in state["tensors"].items() if name != missing}}
    with unittest.TestCase().assertLogs("gradwire", "WARNING") as said:
        run.handle.load_state_dict(partly)
        run.handle.load_state_dict(state)
    texts = [record.getMessage() for record in said.records]
    check(texts == [f"the loaded state lacks 1 parameters, such as {missing!r}: their residuals begin at "
                    "zero"], f"{texts}")
    run.close()


# ---- FSDP2's features, with PyTorch's collectives as the reference -----------------------------------------


def second_dimension(parameter: nn.Parameter) -> Optional[Shard]:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % WORLD == 0 else None


def freeze(model: nn.Module) -> None:
    for part in (model.blocks[0], model.blocks[1].up, model.position):
        part.requires_grad_(False)


def compile_blocks(model: nn.Module) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")


def mixed(**types: torch.dtype) -> Dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(**types)}


BF16 = torch.bfloat16
# Options of fully_shard() and of a step, and how far weights may be from those of PyTorch's collectives.
FEATURES: List[Tuple[Dict[str, Any], Dict[str, Any], float]] = [
    ({}, {}, 1e-6), ({"reshard_after_forward": False}, {}, 1e-6), ({"reshard_after_forward": 2}, {}, 1e-6),
    ({}, {"accumulate": 3}, 1e-6), ({}, {"clip": 0.1}, 1e-6), ({"before": freeze}, {}, 1e-6),
    ({"shard_placement_fn": second_dimension}, {}, 1e-6), ({"before": compile_blocks}, {}, 1e-6),
    (mixed(param_dtype=BF16, reduce_dtype=torch.float32), {}, 1e-6),
    # PyTorch adds in 16 bits, Gradwire in FP32. So the limit is the rounding error of a step.
    (mixed(param_dtype=BF16, reduce_dtype=BF16), {}, 2e-5), (mixed(reduce_dtype=torch.float16), {}, 2e-5),
    ({"replicas": 2}, {}, 1e-6), ({"replicas": 2}, {"accumulate": 3}, 1e-6)]


@scenario()
def features_train_as_with_pytorchs_collectives() -> None:
    """Checks FP32 against PyTorch, and that other formats train nearly like it."""
    for given, step_options, limit in FEATURES:
        options, what = dict(given), f"{given} {step_options}"
        if options.get("reshard_after_forward") == 2 and WORLD < 4:
            continue
        if "replicas" in options:
            options = {"mesh": replicas_of(options["replicas"])}
        native, ours, lossy = Run(**options), Run(PLAIN, **options), Run({"gradients": "int8"}, **options)
        start, steps = native.parameters(), 4 if given or step_options else 20
        for step in range(steps):
            losses = [run.step(step, **step_options) for run in (native, ours, lossy)]
            check(native.gradients().keys() == ours.gradients().keys(), f"{what}: gradients of others")
        check(all(0 < loss < 10 for loss in losses), f"{what}: losses {losses}")
        exact, off, moved = (difference(native.parameters(), other) for other in (
            ours.parameters(), lossy.parameters(), start))
        check(exact <= limit < moved / 50, f"{what}: {exact:.1e} apart; the native run moved by {moved:.1e}")
        check(exact < off < moved, f"{what} in int8: {off:.1e} from native, which moved {moved:.1e}")
        check(ours.handle.residual_bytes == 0, "fp32 loses nothing, but keeps a residual")
        kept = {name for name, values in residual_sums(lossy.handle).items() if values.any()}
        check("blocks.1.qkv.weight" in kept, f"{what}: residuals of {sorted(kept)}")
        check(options.get("before") is not freeze or not any(
            name.startswith("blocks.0.") or ".up." in name for name in kept), f"frozen: {sorted(kept)}")
        for run in (ours, lossy):
            run.close()
        say(f"{what}: within {exact:.1e} of PyTorch's collectives; int8 and bf16 within {off:.1e}")


@scenario()
def gradients_are_divided_as_the_caller_says() -> None:
    native, halved, summed = Run(), Run(PLAIN), Run(PLAIN)
    for run, factor in ((native, 1.0), (halved, 2.0), (summed, 1.0)):
        for module in (run.model, *run.model.blocks):
            if run is halved:
                module.set_gradient_divide_factor(2.0 * WORLD)  # PREMUL_SUM, which Gloo does not support
            elif run is summed:
                module.set_force_sum_reduction_for_comms(True)
        loss_of(run.model, 0).backward()
        off = difference(native.gradients(), {n: factor * g for n, g in run.gradients().items()})
        check(off <= 1e-7, f"a factor of {factor}: gradients are off by {off:.1e}")
        run.close()


@scenario()
def a_layer_used_every_other_step_trains_as_with_pytorchs_collectives() -> None:
    native, ours = Run(), Run(PLAIN)
    for step in range(6):
        for run in (native, ours):
            run.model.use_spare = step % 2 == 1
            run.step(step)
    check(difference(native.parameters(), ours.parameters()) <= 1e-6, "a layer used every other step")
    ours.close()


@scenario(4)
def replicas_are_averaged_in_the_last_micro_batch_only() -> None:
    native, ours = (Run(arguments, mesh=replicas_of(2)) for arguments in (None, PLAIN))
    for step in range(3):
        for run in (native, ours):
            run.optimizer.zero_grad()
            for k in range(2):
                run.model.set_requires_all_reduce(k == 1)
                loss_of(run.model, 2 * step + k).backward()
            run.optimizer.step()
    check(difference(native.parameters(), ours.parameters()) <= 1e-6, "set_requires_all_reduce()")
    ours.close()  # restores PyTorch's collectives
    for run in (native, ours):
        run.model.set_requires_all_reduce(True)
        run.step(9)
    check(difference(native.parameters(), ours.parameters()) <= 1e-6, "after close()")


@scenario(2)
def dense_tensors_travel_in_the_type_of_the_buffer() -> None:
    for reduce, spec in ((BF16, "bf16:schedule=two_shot"), (torch.float32, "fp32:schedule=two_shot")):
        run = Run({"gradients": "int4", "weights": "int8"}, **mixed(param_dtype=BF16, reduce_dtype=reduce))
        with unittest.mock.patch.object(Communicator, "reduce_scatter", autospec=True,
                                        side_effect=Communicator.reduce_scatter) as calls:
            run.step(0)
        specs = {call.args[3] for call in calls.call_args_list if call.kwargs["tag"].startswith("dense ")}
        check(specs == {spec}, f"reduce_dtype={reduce}: dense tensors travel as {specs}")
        check(all(g.dtype == torch.float32 for g in run.gradients().values()), "gradients of shards in FP32")
        run.close()


@scenario(2)
def a_model_is_compressed_on_the_meta_device_or_later() -> None:
    losses = []
    for early in (True, False):
        with torch.device("meta"):
            model = Transformer()
        shard_blocks(model)
        handle = compress(model, "int8", "bf16") if early else None
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            model.position.zero_()
        handle = handle or compress(model, "int8", "bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
        check(handle.residual_bytes > 0, "no residual")
        losses.append(float(loss.detach()))
        handle.close()
    check(losses[0] == losses[1] and losses[0] < 10, f"compress() before to_empty() or after it: {losses}")
    run = Run({"gradients": "int8"})
    compile_blocks(run.model)  # after compress()
    run.step(0)
    check("blocks.0.qkv.weight" in run.handle.state_dict()["tensors"], "names that torch.compile() changed")
    run.close()


@scenario(2)
def the_profiler_shows_calls() -> None:
    run = Run({"gradients": "int4", "weights": "int8", "dense": False})
    run.step(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.step(1)
    names = {event.name for event in profile.events() if event.name.startswith("gradwire ")}
    groups = {group.first_name for group in run.handle._groups}
    for spec, what in (("int4:schedule=two_shot", "gradients"), ("int8", "weights")):
        shown = {name.split(", ")[0] for name in names if name.startswith(f"gradwire {spec}: {what} of ")}
        check(shown == {f"gradwire {spec}: {what} of {group}" for group in groups}, f"{shown}")
    check(all(name.endswith(" bytes") for name in names), f"no bytes: {names}")
    run.close()
