"""Scenarios of Dion's state in a process group: torch.distributed.checkpoint, rank 0's state, and copies."""
from __future__ import annotations

import copy
import io
import pathlib
import tempfile
from typing import Any, Callable, Dict, Tuple

import torch
from torch import nn

import gradwire
import laws
from gradwire.torch import Dion
from rank import RANK, WORLD, check, refused
from scenarios import scenario
from training import flat

try:
    import torch.distributed.checkpoint as dcp
except ImportError:
    dcp: Any = None  # type: ignore[no-redef]
# A named schedule, so that sums of four ranks have one order.
WIRES = ("fp32:schedule=ring", "bf16:schedule=ring", "int8:round=stochastic,schedule=ring")
DCP = hasattr(dcp, "save")
Trained = Tuple[nn.Sequential, Dion]


def train(trained: Trained, begin: int, end: int) -> torch.Tensor:
    model, optimizer = trained
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(10, 8, generator=generator)).square().sum().backward()
        optimizer.step()
    return flat(model)


def made(wire: str, seed: int = 0, like: Any = None, state: Any = None) -> Trained:
    """Returns a model and its optimizer, with the weights and the optimizer's state of another run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = Dion(model.parameters(), rank=4, wire=wire, seed=seed)
    if like is not None:
        model.load_state_dict(like)
        optimizer.load_state_dict(state)
    return model, optimizer


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


@scenario()
def dion_continues_from_its_state_bit_for_bit() -> None:
    folder = pathlib.Path(laws.of_all_ranks(tempfile.mkdtemp() if RANK == 0 else "")[0])
    for wire in WIRES:
        run = made(wire)
        train(run, 0, 3)
        weights = copy.deepcopy(run[0].state_dict())
        blobs = {way: copy.deepcopy(get(*run)) for way, (get, _) in ways().items()}
        stored = [way for way in blobs if DCP and way != "full_state_dict"]
        for way in stored:
            dcp.save({"o": ways()[way][0](*run)}, checkpoint_id=str(folder / f"{wire}{way}"))
        straight = train(run, 3, 6)
        for way, is_stored in [*((way, False) for way in blobs), *((way, True) for way in stored)]:
            get, load = ways()[way]
            other, state = made(wire, seed=1), copy.deepcopy(blobs[way])
            if is_stored:
                read = {"o": get(*other)}
                dcp.load(read, checkpoint_id=str(folder / f"{wire}{way}"))
                state = read["o"]
            load(*other, state)
            other[0].load_state_dict(weights)
            check(torch.equal(train(other, 3, 6), straight), f"{wire} {way}, dcp {is_stored}: other weights")


@scenario()
def dion_loads_what_one_rank_saved_for_all() -> None:
    for wire in WIRES:
        run = made(wire)
        plain = train(made(wire), 0, 6)
        train(run, 0, 3)
        alone = laws.of_all_ranks(run[1].state_dict())[0]
        if RANK > 0:
            refused(lambda: made(wire)[1].load_state_dict(alone), gradwire.BadArgument, "momentum_rank_0",
                    "consolidate_state_dict()")
        run[1].consolidate_state_dict()
        state, weights = laws.of_all_ranks(run[1].state_dict())[0], copy.deepcopy(run[0].state_dict())
        check("momentum" in state["state"][0], f"{state['state'][0].keys()}")
        if DCP:
            folder = laws.of_all_ranks(tempfile.mkdtemp() if RANK == 0 else "")[0]
            dcp.save({"o": run[1].state_dict()}, checkpoint_id=folder)
            other = made(wire)[1]
            other.consolidate_state_dict()
            read = {"o": other.state_dict()}
            dcp.load(read, checkpoint_id=folder)
            state = read["o"]
        continued = train(made(wire, like=weights, state=state), 3, 6)
        check(torch.equal(continued, train(run, 3, 6)), f"{wire}: weights differ from an uninterrupted run")
        error = float((continued - plain).abs().max())
        check(error < (1e-6 if "fp32" in wire else 1e-2), f"{wire}: consolidation moves by {error:.1e}")


@scenario()
def dion_copies_and_states_of_one_rank_change_nothing() -> None:
    run, plain = made(WIRES[2]), made(WIRES[2])
    if RANK == WORLD - 1:  # without the other ranks
        before = flat(run[0])
        states = [get(*run) for way, (get, _) in ways().items() if way != "full_state_dict"]
        check(torch.equal(flat(run[0]), before) and all(p.grad is None for p in run[0].parameters()),
              "the weights moved")
        check(not any("gradwire" in state for state in states), f"{states[-1].keys()}")
    check(torch.equal(train(run, 0, 3), train(plain, 0, 3)), "getting the state changed the training")
    stream = io.BytesIO()
    torch.save(run, stream)
    stream.seek(0)
    copies = [copy.deepcopy(run), torch.load(stream, **({"weights_only": False} if DCP else {}))]
    straight = train(run, 3, 5)
    for other in copies:
        check(torch.equal(train(other, 3, 5), straight), "a copy trains otherwise")


@scenario(2)
def dion_refuses_ranks_that_freeze_different_parameters() -> None:
    model, optimizer = made("fp32")
    model[0].weight.requires_grad_(RANK > 0)
    refused(lambda: train((model, optimizer), 0, 1), gradwire.CommFailed, "matrix.0")
