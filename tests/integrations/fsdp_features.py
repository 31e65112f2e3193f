"""Compares FSDP2's features under compress() with PyTorch's collectives, in FP32 and in int8."""
from __future__ import annotations

import unittest.mock
from typing import Any, Dict, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from gradwire._communicator import Communicator
from gradwire.fsdp import compress

from fsdp_training import Run, Transformer, difference, loss_of, new_model, residual_sums
from rank import WORLD, check, say
from fsdp_numbers import PLAIN, violation


def same_as_native(what: str, limit: float = 1e-6, steps: int = 4, accumulate: int = 1, clip: float = 0.0,
                   plain: Optional[Dict[str, Any]] = None, **options: Any) -> None:
    native, ours = Run(**options), Run(plain or PLAIN, **options)
    start = native.parameters()
    for s in range(steps):
        for run in (native, ours):
            run.step(s, accumulate, clip)
        check(native.gradients().keys() == ours.gradients().keys(), f"{what}: gradients of other parameters")
    worst = difference(native.parameters(), ours.parameters())
    check(worst <= limit, f"{what}: parameters differ by {worst:.1e} after {steps} steps")
    moved = difference(start, native.parameters())
    check(moved > 100 * limit, f"{what}: native parameters moved by {moved:.1e} only")
    ours.close()
    compressed = Run({"gradients": "int8", "weights": "bf16"}, **options)
    losses = [compressed.step(s, accumulate, clip) for s in range(steps)]
    check(all(loss == loss and loss < 10 for loss in losses), f"{what} in int8: losses {losses}")
    off = difference(native.parameters(), compressed.parameters())
    check(worst < off < moved, f"{what} in int8: {off:.1e} from native, which moved {moved:.1e}")
    compressed.close()
    say(f"{what}: within {worst:.1e} of PyTorch's own; int8 and bf16 within {off:.1e}")


def resharding_after_forward_or_not() -> None:
    for reshard in (True, False):
        same_as_native(f"reshard_after_forward={reshard}", reshard_after_forward=reshard)
    if WORLD == 4:
        same_as_native("reshard_after_forward=2", reshard_after_forward=2)


def gradient_accumulation_and_clipping() -> None:
    same_as_native("three micro-batches without communication in two", accumulate=3)
    same_as_native("clipping", clip=0.1)
    native, halved, summed = Run(), Run(PLAIN), Run(PLAIN)
    halved.model.set_gradient_divide_factor(2.0 * WORLD)  # PREMUL_SUM, which Gloo does not support
    for block in halved.model.blocks:
        block.set_gradient_divide_factor(2.0 * WORLD)
    for module in (summed.model, *summed.model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    for run in (native, halved, summed):
        run.backward(0)
    wanted = native.gradients()
    for run, factor in ((halved, 2.0), (summed, 1.0)):
        off = max(float((factor * g - wanted[n]).abs().max()) for n, g in run.gradients().items())
        check(off <= 1e-7, f"a factor of {factor}: gradients are off by {off:.1e}")
        run.close()


def mixed_precision() -> None:
    bf16 = torch.bfloat16
    same_as_native("param_dtype=bf16, reduce_dtype=fp32",
                   mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32))
    # PyTorch adds in BF16, Gradwire in FP32. So the limit is BF16's rounding error of a step, not 1e-6.
    same_as_native("param_dtype=bf16, reduce_dtype=bf16", limit=2e-5, mp_policy=MixedPrecisionPolicy(
        param_dtype=bf16, reduce_dtype=bf16))
    same_as_native("reduce_dtype=fp16", limit=2e-5,
                   mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    run = Run({"gradients": "int8", "weights": "int8"}, mp_policy=MixedPrecisionPolicy(param_dtype=bf16))
    for s in range(2):
        run.step(s)
    check(all(g.dtype == torch.float32 for g in run.gradients().values()), "gradients of shards in FP32")
    run.close()
    for reduce, spec in ((bf16, "bf16:schedule=two_shot"), (torch.float32, "fp32:schedule=two_shot")):
        run = Run({"gradients": "int4", "weights": "bf16"},
                  mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=reduce))
        with unittest.mock.patch.object(Communicator, "reduce_scatter", autospec=True,
                                        side_effect=Communicator.reduce_scatter) as calls:
            run.step(0)
        specs = {call.args[3] for call in calls.call_args_list if call.kwargs["tag"].startswith("dense ")}
        check(specs == {spec}, f"reduce_dtype={reduce}: dense tensors travel as {specs}")
        run.close()


def sharding_along_another_dimension() -> None:
    same_as_native("Shard(1) for matrices", shard_placement_fn=_second_dimension)
    run = Run({"gradients": "int4", "weights": "fp32"}, shard_placement_fn=_second_dimension)
    worst = max(violation(run, s) for s in range(3))
    check(worst < 1e-6, f"Shard(1): conservation is violated by {worst:.1e}")
    before = residual_sums(run.handle)
    run.handle.load_state_dict(run.handle.state_dict())
    check(all(torch.equal(before[n], after) for n, after in residual_sums(run.handle).items()),
          "the state changed in loading")
    run.close()


def _second_dimension(parameter: nn.Parameter) -> Optional[Shard]:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % WORLD == 0 else None


def frozen_and_unused_parameters() -> None:
    def freeze(model: nn.Module) -> None:
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        model.position.requires_grad_(False)

    same_as_native("frozen parameters", before=freeze)
    frozen = Run({"gradients": "int8", "weights": "bf16"}, before=freeze)
    frozen.step(0)
    kept = residual_sums(frozen.handle)
    check("blocks.1.qkv.weight" in kept and not any(n.startswith("blocks.0.") or ".up." in n for n in kept),
          f"residuals of {sorted(kept)}")
    frozen.close()

    native, ours = Run(), Run(PLAIN)
    compressed = Run({"gradients": "int4", "weights": "fp32", "dense": False})
    for s in range(6):  # a layer is used in every other step, so the buffer changes
        for run in (native, ours, compressed):
            run.model.use_spare = s % 2 == 1
        waiting = residual_sums(compressed.handle).get("spare.weight")
        for run in (native, ours, compressed):
            run.step(s)
        if s % 2 == 0 and waiting is not None:
            check(torch.equal(waiting, residual_sums(compressed.handle)["spare.weight"]),
                  "the residual of an unused parameter changed")
    check(waiting is not None and float(waiting.abs().max()) > 0, "the spare layer never had a residual")
    worst = difference(native.parameters(), ours.parameters())
    check(worst <= 1e-6, f"a layer used every other step: parameters differ by {worst:.1e}")
    compressed.close()
    ours.close()
    say(f"a layer used every other step: within {worst:.1e}; its residual waits for it")


def meta_device() -> None:
    def shard(model: Transformer) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    losses = []
    for early in (True, False):
        with torch.device("meta"):
            model = Transformer()
        shard(model)
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
        for s in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, s, model.words)
            loss.backward()
            optimizer.step()
        check(handle.residual_bytes > 0, "no residual")
        losses.append(float(loss.detach()))
        handle.close()
    check(losses[0] == losses[1] and losses[0] < 10, f"compress() before to_empty() or after it: {losses}")
    say("meta device: the same with compress() before to_empty() and after it")


def compiled_blocks() -> None:
    def compile_blocks(model: nn.Module) -> None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="aot_eager")

    same_as_native("compiled blocks", before=compile_blocks)
    for when in ("before", "after"):
        run = Run({"gradients": "int8", "weights": "bf16"},
                  before=compile_blocks if when == "before" else lambda model: None)
        if when == "after":
            compile_blocks(run.model)
        run.step(0)
        check("blocks.0.qkv.weight" in residual_sums(run.handle), "names with what torch.compile() inserts")
        run.close()


def hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicas", "shards"))
    same_as_native("HSDP", mesh=mesh)
    same_as_native("HSDP, three micro-batches", mesh=mesh, accumulate=3)
    run = Run({"gradients": "int4", "weights": "fp32"}, mesh=mesh)
    worst = max(violation(run, s) for s in range(4))
    check(worst < 1e-6, f"HSDP: conservation is violated by {worst:.1e}")
    entries = run.handle.state_dict()["tensors"]
    check(
        float(entries["blocks.0.up.weight"]["replica_residual"].abs().max()) > 0,
        "the replicas' allreduce lost nothing")
    before = residual_sums(run.handle)
    run.handle.load_state_dict(run.handle.state_dict())
    check(all(torch.equal(before[n], after) for n, after in residual_sums(run.handle).items()),
          "the state changed in loading")
    run.close()
    # Makes a reduce-scatter in each micro-batch, and an allreduce only in the last micro-batch.
    native, ours = Run(mesh=mesh), Run(PLAIN, mesh=mesh)
    for s in range(3):
        for r in (native, ours):
            r.optimizer.zero_grad()
            for k in range(2):
                r.model.set_requires_all_reduce(k == 1)
                loss_of(r.model, 2 * s + k, r.model.words).backward()
            r.optimizer.step()
    worst = difference(native.parameters(), ours.parameters())
    check(worst <= 1e-6, f"set_requires_all_reduce: {worst:.1e}")
    ours.handle.close()  # restores PyTorch's collectives
    for r in (native, ours):
        r.model.set_requires_all_reduce(True)
        r.step(9)
    worst = difference(native.parameters(), ours.parameters())
    check(worst <= 1e-6, f"after close(): {worst:.1e}")
    say(f"HSDP: set_requires_all_reduce and close() within {worst:.1e}")


def the_profiler_shows_calls() -> None:
    run = Run({"gradients": "int4", "weights": "int8", "dense": False})
    run.step(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.step(1)
    names = {event.name for event in profile.events() if event.name.startswith("gradwire ")}
    groups = {group.first_name for group in run.handle._groups}
    for spec, what in (("int4:schedule=two_shot", "gradients"), ("int8", "weights")):
        shown = {name.split(", ")[0] for name in names if name.startswith(f"gradwire {spec}: {what} of ")}
        wanted = {f"gradwire {spec}: {what} of {group}" for group in groups}
        check(shown == wanted, f"{shown}, not {wanted}")
    check(all(name.endswith(" bytes") for name in names), f"no bytes: {names}")
    run.close()
    say(f"torch.profiler: {len(names)} kinds of calls, such as {min(names)}")


def closing_gives_pytorchs_own_back() -> None:
    native, ours = Run(), Run({"gradients": "int4", "weights": "int8"})
    ours.step(0)
    ours.handle.close()
    ours.handle.close()
    ours.model.load_state_dict(native.model.state_dict())
    ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.01, momentum=0.9)
    for run in (native, ours):
        run.step(1)
    check(difference(native.parameters(), ours.parameters()) == 0.0, "something is left after close()")
    again = compress(ours.model, "fp32", "fp32")
    ours.step(2)
    again.close()
