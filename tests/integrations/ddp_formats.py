"""Scenarios of formats registered from Python, and of PyTorch's defaults, which must change no result."""
from __future__ import annotations

import contextlib
import io
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import gradwire.torch
from ddp_loss_scale import OwnScaler
from gradwire.torch import compress
from rank import RANK, WORLD, check, refused
from scenarios import scenario
from training import ddp_of


@scenario(2)
def registered_formats_whose_sizes_differ_between_ranks_are_refused() -> None:
    size = 64 if RANK == 0 else 32
    gradwire.register_format("sized", block=size, bytes=4 * size, encode=lambda v: v.view(np.uint8),
                             decode=lambda d: d.view(np.float32))
    calls: List[Callable[[Any], Any]] = [
        lambda comm: gradwire.allreduce_(np.ones(1000, np.float32), "sized:schedule=ring", comm=comm),
        lambda comm: gradwire.Reducer(comm, "powersgd:rank=1,wire=sized", [("w", 10, 10)])]
    for call in calls:
        comm = gradwire.torch.communicator(timeout_s=60)
        refused(lambda: call(comm), gradwire.CommFailed, "sized in 256 bytes per 64 values",
                "sized in 128 bytes per 32 values")
        dist.barrier()  # no rank leaves before both ranks have the error
        comm.close()


# ---- PyTorch's defaults ----------------------------------------------------------------------------------

Inside = Callable[[], Any]  # a context around what makes or loads something, not around backward
Part = Callable[[Inside], List[Any]]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * seed + RANK)
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator).to(dtype)


class Typed:
    """A model of one type under DistributedDataParallel with a hook."""

    def __init__(self, inside: Inside, spec: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        kind: Dict[str, Any] = {"dtype": dtype, "device": "cpu"}
        self.net = nn.Sequential(nn.Linear(48, 40, **kind), nn.Tanh(), nn.Linear(40, 48, **kind))
        for i, p in enumerate(self.net.parameters()):
            p.data.copy_(values(*p.shape, seed=7 + i) if RANK == 0 else 0)
        self.ddp, self.dtype = ddp_of(self.net, broadcast_buffers=False), dtype
        with inside():
            self.hook = compress(self.ddp, spec, **options)

    def steps(self, count: int) -> "Typed":
        for step in range(count):
            self.net.zero_grad()
            self.ddp(values(8, 48, seed=step, dtype=self.dtype)).square().sum().backward()
            with torch.no_grad():
                for p in self.net.parameters():
                    p -= 1e-3 * p.grad
        return self

    def results(self) -> List[torch.Tensor]:
        tensors = self.hook.state_dict(gather=False)["tensors"].values()
        kept = [tensor for each in tensors for tensor in each["state"].values()]
        self.hook.close()
        return [*(p.detach() for p in self.net.parameters()), *kept]


def hook(spec: str, dtype: torch.dtype) -> Part:
    def part(inside: Inside) -> List[Any]:
        run, scaler, saved = Typed(inside, spec, dtype), OwnScaler(), io.BytesIO()
        run.hook.use_scaler(scaler)
        run.steps(3)
        with inside():
            scaler.update()
            torch.save(run.hook.state_dict(), saved)
            own = run.hook.state_dict(gather=False)
            saved.seek(0)
            run.hook.load_state_dict(torch.load(saved) if RANK == 0 else own)
        return run.steps(2).results()
    return part


def hook_that_loses_a_call(inside: Inside) -> List[Any]:
    run = Typed(inside, "int8", min_ranks=1).steps(2)
    if RANK == 0:
        run.hook._comm.abort("a failure that passes")  # type: ignore[union-attr]
    return run.steps(2).results()


def hook_that_chooses(inside: Inside) -> List[Any]:
    run = Typed(inside, "auto:error=0,allow=int8").steps(12)
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
        comm.start(comm.allreduce_, part, "int8").wait()
        gradwire.Reducer(comm, "powersgd:rank=2,dense=off", [("w", 8, 8)]).allreduce([whole])
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
def default_type(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@scenario(2)
def default_types_and_devices_and_inference_mode_change_no_bit() -> None:
    parts: Dict[str, Part] = {
        "int8": hook("int8", torch.float32), "int4 of double": hook("int4", torch.float64),
        # PyTorch 1.13 multiplies no float16 on the CPU.
        "powersgd": hook("powersgd:rank=2", torch.float16 if torch.__version__ >= (2, 0) else torch.float32),
        "auto": hook_that_chooses, "min_ranks": hook_that_loses_a_call, "calls": calls, "Dion": dion}
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
            for a, b in zip(found, expected):
                check(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b),
                      f"{name}, {setting}: a result differs: {a.flatten()[:4]} {b.flatten()[:4]}")
            check(len(found) == len(expected) > 0, f"{name}, {setting}: {len(found)} results")
