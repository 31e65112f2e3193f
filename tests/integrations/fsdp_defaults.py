"""Tests that defaults of the whole program change no bit: default dtype, default device, inference mode."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from gradwire.fsdp import Compression, compress

from fsdp_auto import REQUEST, _chooses_int8
from fsdp_training import Run, new_model
from rank import WORLD, check, say

ARGUMENTS: Tuple[Dict[str, Any], ...] = (
    {"gradients": "int4", "weights": "int8"}, {"gradients": "int8", "residual": "bf16"},
    {"gradients": "int4", "residual": "int8"}, REQUEST,
    {"gradients": "int8", "replicas": "powersgd:rank=2,wire=int4"})


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


Setting = Callable[[], Any]
# What surrounds all of gradwire's calls, and forward and backward.
EVERYWHERE: Dict[str, Setting] = {
    str(dtype): lambda dtype=dtype: _default_dtype(dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float64)
}
# What surrounds compress(), state_dict() and load_state_dict() only.
CALLS: Dict[str, Setting] = {"meta": lambda: torch.device("meta"),
                             "default device": lambda: _default_device("meta"),
                             "inference mode": torch.inference_mode, "no_grad": torch.no_grad}


def _trained(arguments: Dict[str, Any], everywhere: Setting, calls: Setting) -> Tuple[int, List[Any]]:
    """Trains, saves, loads into another run and trains on. Returns the bytes of residuals, and all results."""
    mesh = None
    if "replicas" in arguments:
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicas", "shards"))

    def run() -> Run:
        sharded = Run(model=new_model(), mesh=mesh)
        with everywhere(), calls():
            sharded.handle = compress(sharded.model, **{"weights": "fp32", "timeout_s": 60, **arguments})
        return sharded

    def state_of(handle: Compression) -> Dict[str, Any]:
        with everywhere(), calls():
            return handle.state_dict()

    first, second = run(), run()
    steps = 12 if arguments["gradients"].startswith("auto") else 2
    for step in range(steps):
        _loss(first, step, everywhere)
    state = state_of(first.handle)
    with everywhere(), calls():
        second.handle.load_state_dict(state)
    second.model.load_state_dict({n: v.clone() for n, v in first.model.state_dict().items()})
    for step in range(steps, steps + 2):
        loss = _loss(second, step, everywhere)
    after, found = state_of(second.handle), [loss, *second.parameters().values()]
    for saved in (state, after):
        for name, entry in sorted(saved["tensors"].items()):
            tensors = {kind: value for kind, value in entry.items() if isinstance(value, torch.Tensor)}
            for kind, value in tensors.items():
                check(value.dtype == torch.float32 and value.device.type == "cpu",
                      f"{name}: {kind} is {value.dtype}")
            found += [value.clone() for value in tensors.values()]
    used = second.handle.residual_bytes
    first.close()
    second.close()
    return used, found


def _loss(run: Run, step: int, everywhere: Setting) -> torch.Tensor:
    with everywhere():
        return torch.tensor(run.step(step), dtype=torch.float64)


def defaults_of_the_program_change_no_bit() -> None:
    with _chooses_int8():  # for a choice that does not depend on the machine
        for arguments in ARGUMENTS:
            _compare(arguments)


def _compare(arguments: Dict[str, Any]) -> None:
    nothing = contextlib.nullcontext
    used, expected = _trained(arguments, nothing, nothing)
    check(used > 0, f"{arguments}: no residual")
    for name, (everywhere, calls) in {**{n: (s, nothing) for n, s in EVERYWHERE.items()},
                                      **{n: (nothing, s) for n, s in CALLS.items()}}.items():
        again, found = _trained(arguments, everywhere, calls)
        check(again == used, f"{arguments}, {name}: {again} bytes of residuals, not {used}")
        check(len(found) == len(expected), f"{arguments}, {name}: {len(found)} results, not {len(expected)}")
        different = sum(not torch.equal(a, b) for a, b in zip(found, expected))
        check(different == 0, f"{arguments}, {name}: {different} of {len(found)} results differ")
    say(f"{arguments}: {used} bytes, the same bits in {len(EVERYWHERE) + len(CALLS)} settings")
