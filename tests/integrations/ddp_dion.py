"""Tests Dion's state in a process group: torch.distributed.checkpoint, rank 0's state for all, and copies."""
from __future__ import annotations

import copy
import io
import pathlib
import tempfile
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.torch import Dion

from rank import RANK, WORLD, check, refused, say

# A named schedule, so that sums of four ranks have one order.
WIRES = ("fp32:schedule=ring", "bf16:schedule=ring", "int8:round=stochastic,schedule=ring")
Trained = Tuple[nn.Sequential, Dion]


def train(trained: Trained, begin: int, end: int) -> None:
    model, optimizer = trained
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(10, 8, generator=generator)).square().sum().backward()
        optimizer.step()


def made(wire: str, seed: int = 0) -> Trained:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, Dion(model.parameters(), rank=4, wire=wire, seed=seed)


def bits(trained: Trained) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in trained[0].parameters())


def from_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def today() -> bool:
    """Returns whether this PyTorch has torch.distributed.checkpoint.save."""
    return hasattr(dist, "checkpoint") and hasattr(dist.checkpoint, "save")


def ways() -> Dict[str, Tuple[Callable[..., Any], Callable[..., Any]]]:
    """Returns functions that get the state of a model and optimizer, and load it."""
    found: Dict[str, Any] = {
        "state_dict()": (lambda m, o: o.state_dict(), lambda m, o, s: o.load_state_dict(s))}
    try:
        from torch.distributed.checkpoint import state_dict as of
    except ImportError:
        return found
    for name in ("flatten_optimizer_state_dict", "full_state_dict"):
        options = of.StateDictOptions(**{name: True})
        found[name] = (lambda m, o, options=options: of.get_optimizer_state_dict(m, o, options=options),
                       lambda m, o, s, options=options: of.set_optimizer_state_dict(m, o, s, options=options))
    found["names"] = (of.get_optimizer_state_dict, of.set_optimizer_state_dict)
    return found


def dion_continues_from_its_state() -> None:
    folder = pathlib.Path(from_rank_0(tempfile.mkdtemp()))
    for wire in WIRES:
        run = made(wire)
        train(run, 0, 3)
        weights = copy.deepcopy(run[0].state_dict())
        blobs = {}
        for way, (get, _) in ways().items():
            blobs[way] = copy.deepcopy(get(*run))
            if today() and way != "full_state_dict":
                dist.checkpoint.save({"o": get(*run)}, checkpoint_id=str(folder / f"{wire}{way}"))
        train(run, 3, 6)
        for way, (get, load) in ways().items():
            for stored in ("torch.save", "dcp") if today() and way != "full_state_dict" else ("torch.save",):
                other = made(wire, seed=1)
                state = copy.deepcopy(blobs[way])
                if stored == "dcp":
                    read = {"o": get(*other)}
                    dist.checkpoint.load(read, checkpoint_id=str(folder / f"{wire}{way}"))
                    state = read["o"]
                load(*other, state)
                other[0].load_state_dict(weights)
                train(other, 3, 6)
                check(bits(other) == bits(run), f"{wire} {way} {stored}: not an uninterrupted run's weights")
    say(f"Dion: {len(WIRES)} formats, {', '.join(ways())}: bit for bit")


def dion_loads_what_one_rank_saved_for_all() -> None:
    for wire in WIRES:
        run, plain = made(wire), made(wire)
        train(plain, 0, 6)
        train(run, 0, 3)
        alone = from_rank_0(copy.deepcopy(run[1].state_dict()))
        if RANK > 0:
            refused(lambda: made(wire)[1].load_state_dict(alone), gradwire.BadArgument, "momentum_rank_0",
                    "consolidate_state_dict()")
        run[1].consolidate_state_dict()
        state, weights = from_rank_0(copy.deepcopy(run[1].state_dict())), copy.deepcopy(run[0].state_dict())
        check("momentum" in state["state"][0], f"{state['state'][0].keys()}")
        other = made(wire)
        if today():
            folder = from_rank_0(tempfile.mkdtemp())
            dist.checkpoint.save({"o": run[1].state_dict()}, checkpoint_id=folder)
            other[1].consolidate_state_dict()
            read = {"o": other[1].state_dict()}
            dist.checkpoint.load(read, checkpoint_id=folder)
            state = read["o"]
        other[0].load_state_dict(weights)
        other[1].load_state_dict(state)
        train(run, 3, 6)
        train(other, 3, 6)
        check(bits(other) == bits(run), f"{wire}: weights differ from an uninterrupted run")
        both = zip(run[0].parameters(), plain[0].parameters())
        error = max(float((p - q).detach().abs().max()) for p, q in both)
        check(error < (1e-6 if "fp32" in wire else 1e-2), f"{wire}: consolidation moves by {error:.1e}")


def dion_gives_the_state_of_a_fresh_optimizer_without_other_ranks() -> None:
    run, plain = made(WIRES[2]), made(WIRES[2])
    if RANK == WORLD - 1:
        before = bits(run)
        for get, _ in ways().values():
            if get is not ways().get("full_state_dict", (None,))[0]:
                state = get(*run)
        check(bits(run) == before and all(p.grad is None for p in run[0].parameters()), "the weights moved")
        check("gradwire" not in state, f"{state.keys()}")
    train(run, 0, 2)
    train(plain, 0, 2)
    check(bits(run) == bits(plain), "getting the state changed the training")


def dion_copies_and_pickles_continue() -> None:
    run = made(WIRES[2])
    train(run, 0, 3)
    stream = io.BytesIO()
    torch.save(run, stream)
    stream.seek(0)
    options: Dict[str, Any] = {"weights_only": False} if today() else {}
    copies: List[Trained] = [copy.deepcopy(run), torch.load(stream, **options)]
    train(run, 3, 5)
    for other in copies:
        train(other, 3, 5)
        check(bits(other) == bits(run), "a copy trains otherwise")


def dion_refuses_ranks_that_freeze_different_parameters() -> None:
    model, optimizer = made("fp32")
    if RANK == 0:
        model[0].weight.requires_grad_(False)
    refused(lambda: train((model, optimizer), 0, 1), gradwire.CommFailed, "matrix.0")


SCENARIOS = [
    dion_continues_from_its_state, dion_loads_what_one_rank_saved_for_all,
    dion_gives_the_state_of_a_fresh_optimizer_without_other_ranks, dion_copies_and_pickles_continue,
    dion_refuses_ranks_that_freeze_different_parameters
]
