#!/usr/bin/python3
"""Tests that default types, default devices and inference mode change no result.

usage: defaults_test.py WORLD

Each rank runs each part of the package under PyTorch's defaults, and then under others. All bits must agree.
"""
from __future__ import annotations

import contextlib
import io
import os
import pathlib
import sys
from typing import Any, Callable, ContextManager, Dict, Iterator, List

import launch

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradwire
    import gradwire.torch
    from rank import RANK, WORLD, check, say

    Inside = Callable[[], ContextManager[Any]]  # around what makes or loads something, not backward


def values(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    generator = torch.Generator("cpu").manual_seed(100 * seed + RANK)
    numbers = torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)
    return numbers.to(dtype or torch.float32)


class Run:
    """A model under DistributedDataParallel with a hook."""

    def __init__(self, dtype: Any, inside: Inside, spec: str, **options: Any) -> None:
        kind = {"dtype": dtype, "device": "cpu"}
        self.net = nn.Sequential(nn.Linear(48, 40, **kind), nn.Tanh(), nn.Linear(40, 48, **kind))
        for i, p in enumerate(self.net.parameters()):
            p.data.copy_(values(*p.shape, seed=7 + i) if RANK == 0 else 0)
        self.ddp = DistributedDataParallel(self.net, broadcast_buffers=False)
        self.dtype = dtype
        with inside():
            self.hook = gradwire.torch.compress(self.ddp, spec, **options)

    def steps(self, count: int) -> None:
        for step in range(count):
            self.net.zero_grad()
            self.ddp(values(8, 48, seed=step, dtype=self.dtype)).square().sum().backward()
            with torch.no_grad():
                for p in self.net.parameters():
                    p -= 1e-3 * p.grad

    def results(self) -> "List[torch.Tensor]":
        state = self.hook.state_dict()
        kept = [tensor for each in state["tensors"].values() for tensor in each["state"].values()]
        return [*(p.detach() for p in self.net.parameters()), *kept]


class Scaler:
    """Has what the hook uses of a GradScaler."""

    scale = 8.0

    def get_scale(self) -> float:
        return self.scale

    def update(self) -> None:
        self.scale /= 2


def hook(dtype: Any, spec: str) -> Callable[[Inside], List[Any]]:
    def part(inside: Inside) -> List[Any]:
        run = Run(dtype, inside, spec)
        scaler = Scaler()
        run.hook.use_scaler(scaler)
        run.steps(3)
        with inside():
            scaler.update()
            saved = io.BytesIO()
            torch.save(run.hook.state_dict(), saved)
            own = run.hook.state_dict(gather=False)
            saved.seek(0)
            run.hook.load_state_dict(torch.load(saved) if RANK == 0 else own)
        run.steps(2)
        return run.results()
    return part


def hook_that_loses_a_call(inside: Inside) -> List[Any]:
    run = Run(torch.float32, inside, "int8", min_ranks=1)
    run.steps(2)
    if RANK == 0:
        run.hook._comm.abort("a failure that passes")
    run.steps(2)
    return run.results()


def hook_that_chooses(inside: Inside) -> List[Any]:
    run = Run(torch.float32, inside, "auto:error=0,allow=int8")
    run.steps(12)
    check(run.hook.choice is not None and run.hook.choice["spec"] == "fp32", f"chose {run.hook.choice}")
    return run.results()


def calls(inside: Inside) -> List[Any]:
    with inside():
        comm = gradwire.torch.communicator()
        whole, part, residual = values(64), values(64 // WORLD), values(64) * 0
        gradwire.allreduce_(whole, "int8")
        comm.allreduce_(whole, "int4", residual=residual)
        comm.reduce_scatter(part, whole, "int8")
        comm.all_gather(whole, part, "bf16")
        comm.all_gather_update(whole, values(64 // WORLD, seed=1), "int4")
        comm.broadcast_(whole, 1, "int8")
        request = comm.start(comm.allreduce_, part, "int8")
        request.wait()
        reducer = gradwire.Reducer(comm, "powersgd:rank=2,dense=off", [("w", 8, 8)])
        reducer.allreduce([whole])
        found = gradwire.choose(comm, ["fp32", "int8"], {"w": whole}, error=0.5)
    gradwire.allreduce_(whole)  # a tensor made in inference mode, outside of it
    comm.allreduce_(whole, "int4", residual=residual)
    errors = torch.tensor([trial.error for trial in found.trials.values()], dtype=torch.float64, device="cpu")
    return [whole, part, residual, errors]


def dion(inside: Inside) -> List[Any]:
    parameters = [nn.Parameter(values(24, 40)), nn.Parameter(values(9))]
    for p in parameters:
        dist.broadcast(p.data, 0)
    with inside():
        optimizer = gradwire.torch.Dion(parameters, 0.02, rank=4)
    for step in range(4):
        for p in parameters:
            p.grad = values(*p.shape, seed=step)
        optimizer.step()
    return [p.detach() for p in parameters]


def backend(inside: Inside) -> List[Any]:
    name = f"defaults{len(dist.Backend.backend_list)}"
    with inside():
        gradwire.torch.register_backend("int8", reduce_scatter="int8", all_gather="bf16", min_bytes=0,
                                        name=name)
        group = dist.new_group(backend=name)
        whole, part = values(64), values(64 // WORLD)
        parts = [values(64 // WORLD) for _ in range(WORLD)]
        dist.all_reduce(whole, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.all_gather(parts, part, group=group)
    check(group.compressed == 3, f"{group.compressed} calls were compressed")
    return [whole, part, *parts]


@contextlib.contextmanager
def default_type(dtype: Any) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def ranks() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parts: Dict[str, Callable[[Inside], List[Any]]] = {
        "hook, int8": hook(torch.float32, "int8"), "hook, int4 of double": hook(torch.float64, "int4"),
        "hook, powersgd": hook(
            # PyTorch 1.13 multiplies no float16 on the CPU.
            torch.float16 if torch.__version__ >= (2, 0) else torch.float32, "powersgd:rank=2"),
        "hook, auto": hook_that_chooses,
        "hook, min_ranks": hook_that_loses_a_call, "calls": calls, "Dion": dion}
    if torch.__version__ >= (2, 9):
        parts["backend"] = backend
    nothing = contextlib.nullcontext
    settings: Dict[str, Any] = {str(dtype): (lambda dtype=dtype: default_type(dtype), nothing)
                                for dtype in (torch.bfloat16, torch.float16, torch.float64)}
    settings["inference mode"] = nothing, torch.inference_mode
    if hasattr(torch, "set_default_device"):
        settings["meta"] = lambda: torch.device("meta"), nothing
    for name, part in parts.items():
        expected = part(nothing)
        for setting, (around, inside) in settings.items():
            with around():
                found = part(inside)
            check(len(found) == len(expected) > 0, f"{name}, {setting}: {len(found)} results")
            for a, b in zip(found, expected):
                check(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b),
                      f"{name}, {setting}: a result differs: {a.flatten()[:4]} {b.flatten()[:4]}")
        say(f"{name}: the same bits under {', '.join(settings)}")
    dist.destroy_process_group()


def main() -> int:
    if "RANK" in os.environ:
        ranks()
        return 0
    world = int(sys.argv[1])
    return launch.report(world, launch.fork_ranks(pathlib.Path(__file__), world, [], 150, ["torch"]))


if __name__ == "__main__":
    sys.exit(main())
