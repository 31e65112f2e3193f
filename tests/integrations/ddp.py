"""The suite of scenarios.py for the DDP hook: Gloo process group, CPU. docs/for-pytorch.md says what holds."""
from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

import gradwire
import gradwire.torch
import laws
from four_bits import BLOCK, BYTES, decode, encode
from gradwire.torch import Hook, allreduce_hook, compress
from rank import RANK, WORLD, check, say
from scenarios import scenario
from training import Experts, Run, closing, ddp_of, flat, residuals, small, train


def begin() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradwire.register_format("mine", block=BLOCK, bytes=BYTES, encode=encode, decode=decode)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


@scenario()
def fp32_is_ddp_without_a_hook() -> None:
    """Also with two micro-batches, the first under no_sync()."""
    views = {"bucket_kb": 30, "gradient_as_bucket_view": True, "static_graph": True}
    for accumulate, options in ((1, {}), (1, {"bucket_kb": 30}), (2, {"bucket_kb": 30}), (1, views)):
        plain, hooked = Run(**options), Run("fp32", **options)
        for step in range(3):
            plain.step(step, accumulate)
            hooked.step(step, accumulate)
            laws.near(f"{options}: gradients of step {step}", hooked.gradients(), plain.gradients(), 1e-6)
            if WORLD > 2:
                # The hook adds more than two terms in another order than DDP, and batch normalization
                # amplifies the last bits. So each step begins with the same parameters.
                hooked.model.load_state_dict(plain.model.state_dict())
        laws.near(f"{options}: parameters", flat(hooked.model), flat(plain.model), 1e-6)
        hooked.same_weights()
        stats = hooked.hook.stats()
        check(stats["buckets"] == stats["buckets_in_place"] > (3 if options else 0), f"{options}: {stats}")
        check(stats["steps"] == 3, f"{stats['steps']} steps")
        hooked.hook.close()


SPECS = ["int8", "int4:rotate=hadamard", "fp8", "topk:k=4,of=64", "powersgd:rank=2", "bf16:residual=int8",
         "powersgd:rank=2,alternate=on", "randk:ratio=0.1", "sign", "int4:residual=bf16",
         "int4:ef=ef21,start=2", "powersgd:rank=3,wire=bf16,start=3", "mine:schedule=ring",
         "powersgd:rank=2,wire=mine,schedule=tree"]


@scenario()
def every_spec_keeps_the_laws() -> None:
    """Checks three laws for each spec, with unused and frozen parameters.

    Nothing is lost, and unused parameters keep their residuals; ranks agree bit for bit; a state continues
    bit for bit in the same hook, in another, and through pickle.
    """
    for number, spec in enumerate(SPECS):
        spec += f"{',' if ':' in spec else ':'}dense=off"
        spec += "" if "schedule=" in spec else ",schedule=two_shot"
        run, limit = Experts(spec, in_place=number % 2 > 0), 2e-2 if "residual=" in spec else 1e-5
        for step in range(len(run.PLAN)):
            run.model.common.requires_grad_(step < 8)
            before = residuals(run.hook)
            if "ef21" in spec:
                run.step(step)
            else:
                run.step_without_loss(step, limit)
            used, after = run.used(step), residuals(run.hook)
            for name, p in run.model.named_parameters():
                if name not in used and name in before and "ef21" not in spec:
                    check(torch.equal(before[name], after[name]), f"{spec}: residual of {name}, step {step}")
                    check(p.grad is None or not p.grad.any(), f"{spec}: gradient of {name}, step {step}")
            laws.ranks_agree(f"{spec}, step {step}", *run.named().values())
            if step == 5:
                saved, pickled = run.state(), pickle.dumps(run.hook)
                stats = run.hook.stats()
                check(stats["wire_bytes"] < 0.7 * stats["dense_bytes"], f"{spec}: {stats}")
            elif step == 7:
                straight = flat(run.model)
        for other, load in ((run, True), (Experts(spec), True), (Experts(pickle.loads(pickled)), False)):
            other.model.common.requires_grad_(True)
            other.load(saved, load)
            check(other.hook.state_dict()["steps"] == 6, f"{spec}: {other.hook.state_dict()['steps']} steps")
            check(torch.equal(other.steps(6, 8), straight), f"{spec}: another run after the state was loaded")
            other.hook.close()
        say(f"{spec}: nothing is lost")


class OneTensor:
    """A bucket of one parameter, without DDP."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor, index: int = 0) -> None:
        self.index, self.buffer = lambda: index, lambda: gradient
        self.parameters, self.gradients = lambda: [parameter], lambda: [gradient]


@scenario()
def the_hook_does_not_block() -> None:
    bucket = OneTensor(nn.Parameter(torch.zeros(8)), torch.full((8,), float(RANK)))
    with closing(Hook("fp32")) as hook:
        hook(bucket).wait()
        bucket.buffer().fill_(float(RANK))
        if RANK > 0:
            dist.barrier()
        future = hook(bucket)  # returns on rank 0 although no other rank has begun
        if RANK == 0:
            check(not future.done(), "the future was done before the others came")
            dist.barrier()
        check(bool((future.wait() == (WORLD - 1) / 2).all()), "the mean is wrong")


@scenario()
def half_precision_travels_in_half_the_bytes_and_infinity_stays_in_its_block() -> None:
    """Also passes infinity on to a GradScaler. With a named schedule, bytes depend on no measurement."""
    for spec, dtype in (("fp32:schedule=ring", torch.bfloat16), ("bf16:schedule=ring", torch.float16),
                        ("fp32", torch.float16), ("int8", torch.float16)):
        parameter = nn.Parameter(torch.zeros(4096, dtype=dtype))
        with closing(Hook(spec)) as hook:
            for step in range(2):
                values = torch.full((4096,), 8.0 * RANK, dtype=dtype)
                values[0] = 60000 if step == 0 else float("inf") if RANK == 0 else 1
                result = hook(OneTensor(parameter, values)).wait()
                off = float((result[128:] - 4 * (WORLD - 1)).abs().max())
                check(result.dtype == dtype and off <= 0.25, f"{spec}: {result}")
                check(bool(result[0].isfinite()) == (step == 0), f"{spec}, step {step}: {result[0]}")
            stats = hook.stats()
            check(hook._buckets[0].staging is None, f"{spec} of {dtype} is converted in Python")
            check("ring" not in spec or stats["wire_bytes"] == stats["dense_bytes"] > 0, f"{spec}: {stats}")
    # A model of two types has buckets of two types. DDP renumbers them after the first step.
    both = [nn.Parameter(torch.zeros(4096, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    with closing(Hook("fp32")) as hook:
        for order in (both, both[::-1], both[::-1]):
            for index, p in enumerate(order):
                result = hook(OneTensor(p, torch.full_like(p.detach(), float(RANK)), index)).wait()
                check(bool((result == (WORLD - 1) / 2).all()), f"{p.dtype} at {index}: {result}")
        check(hook.stats()["steps"] == 3, f"steps of both types: {hook.stats()}")


@scenario()
def allreduce_averages_without_ddp_and_over_some_ranks() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = torch.full((100,), float(RANK + 1), dtype=dtype, requires_grad=dtype == torch.float32)
        check(gradwire.allreduce_(t, "bf16", "sum") is t, "allreduce_ returns its argument")
        check(bool((t == WORLD * (WORLD + 1) / 2).all()), f"{dtype}: {t[0]}")
    group = dist.new_group(list(range(1, WORLD))) if WORLD > 2 else None
    if group is not None and RANK > 0:  # a subset of the ranks, with a different rank 0
        with closing(gradwire.torch.communicator(group, timeout_s=60)) as comm:
            check((comm.rank, comm.world) == (RANK - 1, WORLD - 1), "ranks of the subgroup")
            t = torch.full((3,), float(RANK))
            check(float(gradwire.allreduce_(t, comm=comm)[0]) == WORLD / 2, "mean over a subgroup")


@scenario()
def uneven_inputs_are_joined_as_with_torchs_hook() -> None:
    def trained(hook: Any, steps: int, static: bool) -> torch.Tensor:
        ddp = ddp_of(small(), bucket_kb=4)
        ddp.register_comm_hook(hook, allreduce_hook if hook else default_hooks.allreduce_hook)
        with ddp.join(divide_by_initial_world_size=static):
            train(ddp, steps)
        return flat(ddp)

    for steps, longest in ((2 * RANK, 2 * (WORLD - 1)), (3 + RANK, 2 + WORLD)):  # first rank 0 without inputs
        for static in (True, False):
            wanted = trained(None, steps, static)
            for spec, limit in (("fp32", 1e-6), ("int8:dense=off", 0.05)):
                with closing(Hook(spec)) as hook:
                    weights = trained(hook, steps, static)
                    laws.near(spec, weights, wanted, limit, scale=wanted - flat(small()))
                    laws.ranks_agree(spec, weights.numpy())
                    check(hook.stats()["steps"] == longest, f"{spec}: {hook.stats()['steps']} steps")
    dist.barrier()


@scenario()
def powersgd_agrees_with_torch() -> None:
    """Gives the same buckets to Gradwire's hook and to PyTorch's, with the same first Q.

    The gradients have more directions than the rank of 4; otherwise PyTorch's rounding errors double in every
    step.
    """
    ours = Hook("powersgd:rank=4,start=2,dense=off")
    theirs = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 48), (40,), (32, 8, 3, 3), (64, 48))]
    generator = torch.Generator().manual_seed(RANK)
    for step in range(8):
        values = torch.randn(sum(p.numel() for p in parameters), generator=generator)
        buckets = [OneTensor(parameters[0], values.clone()) for _ in range(2)]
        for bucket in buckets:
            views = bucket.buffer().split([p.numel() for p in parameters])
            bucket.parameters, bucket.is_last = lambda: parameters, lambda: True
            bucket.gradients = lambda views=views: [v.view_as(p) for v, p in zip(views, parameters)]
        if step == 2:
            kept = ours.state_dict()["tensors"]
            tensors = [kept[name] for name in ours._names.of(parameters) if "factor" in kept[name]["state"]]
            tensors.sort(key=lambda t: t["rows"] == 32)  # PyTorch groups matrices of one shape
            theirs.p_memory_dict[0] = torch.empty(sum(4 * t["rows"] for t in tensors))
            theirs.q_memory_dict[0] = torch.cat([t["state"]["factor"] for t in tensors])
            check(len(tensors) == 3, f"{len(tensors)} matrices are compressed")
        got = ours(buckets[0]).wait()
        wanted = torch_powersgd.powerSGD_hook(theirs, buckets[1]).wait()
        laws.near(f"step {step}", got, wanted, 1e-4)
        laws.ranks_agree(f"step {step}", got.numpy())
    stats = ours.stats()
    check(stats["buckets_in_place"] == 1 and stats["wire_bytes"] < stats["dense_bytes"] / 3, f"{stats}")
    ours.close()


@scenario(2)
def a_zero_gradient_is_no_nan() -> None:
    """Checks a matrix whose gradient is exactly zero until step 5, where PyTorch's PowerSGD gives NaN."""
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.gated, self.head = (nn.Linear(64, 64, bias=False) for _ in range(3))
            self.gate = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.always(x) + self.gate * self.gated(x)))

    torch.manual_seed(3)
    model = Gated()
    ddp = ddp_of(model)
    with closing(compress(ddp, "powersgd:rank=1,start=2")) as hook:
        for step in range(8):
            model.gate = 1.0 if step >= 5 else 0.0
            ddp.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 100 + RANK))
            ddp(x).square().mean().backward()
            norm = float(model.gated.weight.grad.norm())
            check(norm == 0 if step < 5 else 0 < norm < 10, f"step {step}: a gradient of norm {norm}")
            check(bool(model.always.weight.grad.isfinite().all()), "the other layer is not finite")
        check(set(hook.state_dict()["tensors"]) == {"always.weight", "gated.weight", "head.weight"}, "names")
