"""Runs one rank of the DDP tests, for ddp_test.py.

Every rank runs the scenarios named on the command line, in order. A failed check ends the rank, and so the
test.
"""
from __future__ import annotations

import copy
import faulthandler
import io
import pickle
import time
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch
from gradwire.torch import Hook, allreduce_hook

from ddp_training import CONVOLUTIONS, TASKS, Run, same_on_all_ranks
from rank import RANK, WORLD, check, refused, say
import ddp_auto
import ddp_checkpoint
import ddp_compress
import ddp_dion
import ddp_elastic
import ddp_join
import ddp_layouts
import ddp_lifetimes
import ddp_loss_scale
import ddp_states
import ddp_unused
from ddp_failures import (
    a_dead_peer_raises,
    a_peer_that_pauses_is_waited_for,
    a_silent_peer_raises,
    ctrl_c_ends_backward,
)
from launch import chosen
from ddp_powersgd import a_zero_gradient_is_no_nan, powersgd_agrees_with_torch


def fp32_is_ddp_without_a_hook() -> None:
    cases: List[Tuple[str, int, Dict[str, Any], int]] = [
        (CONVOLUTIONS, 3, {"bucket_cap_mb": 5}, 1),
        ("vit", 4, {}, 1),
        ("vit", 3, {"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True}, 1),
        ("vit", 3, {"bucket_cap_mb": 0.25, "static_graph": True}, 1),
        ("vit", 3, {"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True, "static_graph": True}, 1),
        ("vit", 3, {"bucket_cap_mb": 0.25}, 2),  # two micro-batches, the first under no_sync()
    ]
    for name, steps, options, accumulate in cases:
        plain = Run(TASKS[name], **options)
        hook = Hook("fp32")
        hooked = Run(TASKS[name], hook, **options)
        worst = 0.0
        for s in range(steps):
            plain.step(s, accumulate)
            hooked.step(s, accumulate)
            difference = (plain.gradients() - hooked.gradients()).abs().max() / plain.gradients().abs().max()
            check(
                float(difference) <= 1e-6,
                f"{name} {options}: gradients of step {s} differ by {difference:.1e}")
            worst = max(worst, float((plain.parameters() - hooked.parameters()).abs().max()))
            if WORLD > 2:
                # The hook adds more than two terms in another order than DDP, and batch normalization
                # amplifies the last bits within three steps. So each step begins with the same parameters.
                hooked.model.load_state_dict(plain.model.state_dict())
        check(worst <= 1e-6, f"{name} {options}: parameters differ by {worst:.1e} after {steps} steps")
        same_on_all_ranks(hooked.parameters(), "the model")
        stats = hook.stats()
        check(stats["buckets"] == stats["buckets_in_place"] > 0, f"{name}: a bucket was copied: {stats}")
        check(stats["steps"] == steps, f"{name}: {stats['steps']} steps, not {steps}")
        hook.close()
        say(
            f"fp32 {name} {options} accumulate={accumulate}: {stats['buckets']} buckets, in place; after"
            f" {steps} steps parameters differ from DDP without hook by at most {worst:.1e}"
        )


def a_checkpoint_continues_bit_for_bit() -> None:
    # A named schedule, because bits are compared: schedule=auto measures, and may choose differently for the
    # second hook.
    specs: List[Tuple[str, Dict[str, Any]]] = [("powersgd:rank=2,schedule=two_shot", {"bucket_cap_mb": 0.25}),
                                               ("powersgd:rank=3,wire=bf16,start=3", {})]
    if WORLD == 2:  # residuals do not depend on the number of ranks
        specs += [("bf16:residual=int8", {}), ("bf16", {}), ("int4:ef=ef21,start=2", {})]
    for spec, options in specs:
        hook = Hook(spec)
        run = Run(TASKS["vit"], hook, **options)
        for s in range(4):
            run.step(s)
        file = io.BytesIO()
        torch.save(
            {
                "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
                "hook": hook.state_dict()
            }, file)
        pickled = pickle.dumps(hook)
        for s in range(4, 7):
            run.step(s)
        straight = run.parameters()
        # Loads the state into a hook that has made further steps, into a new hook, and by pickle.
        unpickled = pickle.loads(pickled)
        for other_hook in (hook, Hook(spec), unpickled):
            file.seek(0)
            saved = torch.load(file)
            used = other_hook is hook
            if used:
                other = run
                other.model.load_state_dict(saved["model"])
            else:  # DDP begins with other buckets than the saved buckets
                other = Run(TASKS["vit"], other_hook, **options)
                other.model.load_state_dict(saved["model"])
            other.optimizer.load_state_dict(saved["optimizer"])
            if other_hook is not unpickled:
                other_hook.load_state_dict(saved["hook"])
            check(other_hook.state_dict()["steps"] == 4, "steps")
            for s in range(4, 7):
                other.step(s)
            difference = float((straight - other.parameters()).abs().max())
            # A new DDP has other buckets in its first step than later. With a 16-bit wire format the last
            # bits depend on the rank that sums an element, with int4 scales depend on the other elements of
            # a block. Equal buckets, or FP32, give equal bits.
            limit = 0.0 if used else 1e-3 if "bf16" in spec else 2e-2 if "int4" in spec else 0.0
            check(difference <= limit,
                  f"{spec}: the resumed run (used hook: {used}) differs by {difference:.1e}")
            check(used or other_hook.state_dict()["steps"] == 7, "steps after resuming")
            if not used:
                other_hook.close()
        # Rejected: states of another version or spec.
        for change, error in (({"version": 3}, ValueError), ({"spec": "fp32"}, ValueError)):
            refused(lambda: hook.load_state_dict({**saved["hook"], **change}), error)
        hook.close()
        say(f"checkpoint {spec}: resumed by the same hook bit for bit, by a new one and by an unpickled one "
            + (f"within {difference:.1e}" if difference else "bit for bit"))


class OneTensor:
    """A bucket of one parameter, without DDP."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor, index: int = 0) -> None:
        self._parameter, self._gradient, self._index = parameter, gradient, index

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def gradients(self) -> List[torch.Tensor]:
        return [self._gradient]

    def parameters(self) -> List[torch.Tensor]:
        return [self._parameter]


def the_hook_does_not_block() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    bucket = OneTensor(parameter, torch.full((8,), float(RANK)))
    hook = Hook("fp32")
    hook(bucket).wait()
    bucket.buffer().fill_(float(RANK))
    if RANK == 0:
        future = hook(bucket)  # returns although no other rank has begun
        check(not future.done(), "the future was done before the others came")
        dist.barrier()
    else:
        dist.barrier()
        future = hook(bucket)
    check(bool((future.wait() == (WORLD - 1) / 2).all()), "the mean is wrong")
    hook.close()
    say("the hook returns before its peers have come, the future when they have")


def float64_and_transposed_parameters() -> None:
    torch.manual_seed(5)
    # Double precision, a transposed weight, channels_last.
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 32), nn.Linear(32, 10))
    model[0].to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    for dtype in (torch.float32, torch.float64):
        typed = copy.deepcopy(model).to(dtype)
        plain = copy.deepcopy(typed)
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(RANK)).to(dtype)
        hook = Hook("fp32")
        ddp = DistributedDataParallel(typed)
        ddp.register_comm_hook(hook, allreduce_hook)
        for _ in range(2):
            ddp.zero_grad()
            plain.zero_grad()
            ddp(x).float().square().mean().backward()
            plain(x).float().square().mean().backward()
        for (name, a), b in zip(typed.named_parameters(), plain.parameters()):
            mean = b.grad.double().contiguous()
            dist.all_reduce(mean)
            mean /= WORLD
            error = float((a.grad.double() - mean).norm() / mean.norm())
            check(error <= 1e-6, f"{dtype} {name}: relative error {error:.1e}")
        hook.close()
        powersgd = Hook("powersgd:rank=2")
        compressed = DistributedDataParallel(copy.deepcopy(model).to(dtype))
        compressed.register_comm_hook(powersgd, allreduce_hook)
        for _ in range(3):
            compressed(x).float().square().mean().backward()
        rows = {name: (t["rows"], t["cols"]) for name, t in powersgd.state_dict()["tensors"].items()}
        check(set(rows.values()) >= {(16, 27), (576, 32), (10, 32)}, f"matrices {rows}")
        powersgd.close()
    say("float32, float64, channels_last and transposed parameters")


def bfloat16_buckets() -> None:
    # PyTorch 1.13 lacks DDP of bfloat16 models on Gloo, but the hook accepts buckets of bfloat16. With a
    # named schedule and many elements, a rank's share does not depend on `auto` or on a format's granule.
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    hook = Hook("fp32:schedule=ring")
    for factor in (1, 2):
        bucket = OneTensor(parameter, torch.full((4096,), factor * float(RANK), dtype=torch.bfloat16))
        result = hook(bucket).wait()
        check(result.dtype == torch.bfloat16 and bool((result == factor * (WORLD - 1) / 2).all()),
              f"bfloat16: {result}")
    stats = hook.stats()
    check(stats["wire_bytes"] == stats["dense_bytes"] > 0,
          f"fp32 sends more than the bfloat16 that it is given: {stats}")
    hook.close()
    # A model of both types has buckets of both types. DDP renumbers the buckets after the first step.
    wide = nn.Parameter(torch.zeros(4096))
    hook = Hook("fp32")
    for order in ((parameter, wide), (wide, parameter), (wide, parameter)):
        for index, p in enumerate(order):
            result = hook(OneTensor(p, torch.full_like(p.detach(), float(RANK)), index)).wait()
            check(bool((result == (WORLD - 1) / 2).all()), f"{p.dtype} at {index}: {result}")
    check(hook.stats()["steps"] == 3, f"steps of both types: {hook.stats()}")
    hook.close()
    say("bfloat16 buckets, and models of both types")


def infinity_in_float16() -> None:
    # Infinity is preserved for a GradScaler, with and without a residual.
    for spec in ("fp32", "bf16:schedule=ring", "int8"):
        half = nn.Parameter(torch.zeros(4096, dtype=torch.float16))
        hook = Hook(spec)
        for step in range(2):
            values = torch.full((4096,), 8.0 * RANK, dtype=torch.float16)
            values[0] = 60000 if step == 0 else float("inf") if RANK == 0 else 1
            result = hook(OneTensor(half, values)).wait()
            check(
                result.dtype == torch.float16 and bool((result[128:] - 4 * (WORLD - 1)).abs().max() <= 0.25),
                f"{spec}: {result}")
            check(bool(result[0].isfinite()) == (step == 0), f"{spec}, step {step}: {result[0]}")
        stats = hook.stats()
        check(stats["dense_bytes"] > 0 and hook._buckets[0].staging is None,
              "float16 is the library's own matter")
        check("bf16" not in spec or stats["wire_bytes"] == stats["dense_bytes"],
              f"bf16 sends more than the float16 that it is given: {stats}")
        hook.close()
    say("float16 buckets, with infinity and without")


def allreduce_without_ddp() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = torch.full((100,), float(RANK + 1), dtype=dtype, requires_grad=dtype == torch.float32)
        check(gradwire.allreduce_(t, "bf16", "sum") is t, "allreduce_ returns its argument")
        check(bool((t == WORLD * (WORLD + 1) / 2).all()), f"{dtype}: {t[0]}")
    group = dist.new_group(list(range(1, WORLD))) if WORLD > 2 else None
    if group is not None and RANK > 0:  # a subset of the ranks, with a different rank 0
        comm = gradwire.torch.communicator(group, timeout_s=60)
        check((comm.rank, comm.world) == (RANK - 1, WORLD - 1), "ranks of the subgroup")
        t = torch.full((3,), float(RANK))
        check(float(gradwire.allreduce_(t, comm=comm)[0]) == WORLD / 2, "mean over a subgroup")
        comm.close()
    say("allreduce_ of torch tensors, and over a part of the ranks")


SCENARIOS = [
    fp32_is_ddp_without_a_hook, powersgd_agrees_with_torch, a_zero_gradient_is_no_nan,
    a_checkpoint_continues_bit_for_bit, the_hook_does_not_block, float64_and_transposed_parameters,
    bfloat16_buckets, infinity_in_float16,
    allreduce_without_ddp, a_peer_that_pauses_is_waited_for, ctrl_c_ends_backward, a_silent_peer_raises,
    a_dead_peer_raises, *ddp_compress.SCENARIOS, *ddp_checkpoint.SCENARIOS, *ddp_elastic.SCENARIOS,
    *ddp_auto.SCENARIOS, *ddp_join.SCENARIOS, *ddp_layouts.SCENARIOS, *ddp_lifetimes.SCENARIOS,
    *ddp_loss_scale.SCENARIOS, *ddp_states.SCENARIOS, *ddp_unused.SCENARIOS, *ddp_dion.SCENARIOS
]


def main() -> None:
    faulthandler.dump_traceback_later(480, exit=True)  # shows where a hang occurs
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in chosen(SCENARIOS):
        begin = time.monotonic()
        scenario()
        say(f"[{scenario.__name__}: {time.monotonic() - begin:.1f} s]")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
