"""Tests models that compress() rejects, and peers that die or stop responding: every waiting rank raises."""
from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

import torch

import gradwire
from gradwire.fsdp import compress

from fsdp_training import Run, loss_of, new_model
from rank import RANK, WORLD, check, refused, say


def what_cannot_be_compressed_is_refused() -> None:
    run = Run({"gradients": "int8", "weights": "bf16"})
    sharded = Run()
    cases = [
        (lambda: compress(new_model()), gradwire.BadArgument, "fully_shard"),
        (lambda: compress(run.model), gradwire.BadArgument, "compressed already"),
        (lambda: compress(sharded.model, "powersgd:rank=4"), gradwire.Unsupported, "int4:rotate=hadamard"),
        (lambda: compress(sharded.model, "randk:ratio=0.1"), gradwire.Unsupported, "slice"),
        (lambda: compress(sharded.model, weights="powersgd"), gradwire.Unsupported, "weights='powersgd'"),
        (lambda: compress(sharded.model, "int9"), gradwire.BadArgument, "int9"),
        (lambda: compress(sharded.model, weights="none"), gradwire.BadArgument, "none"),
        (lambda: compress(sharded.model, "int8:ef=off"), gradwire.BadArgument, "residual='off'"),
        (lambda: compress(sharded.model, residual="fp16"), gradwire.BadArgument, "'bf16'"),
        (lambda: compress(sharded.model, dense="auto"), gradwire.BadArgument, "['auto']"),
    ]
    for call, error, text in cases:
        refused(call, error, text)
    sharded.step(0)  # the rejected calls have not changed the model
    state = run.handle.state_dict()
    run.step(0)
    for change, text in (({"version": 9}, "reads version 1"), ({"shard": ((RANK + 1) % WORLD, WORLD)},
                                                               "load each rank's own state"),
                         ({"tensors": {"other.weight": {"steps": 1,
                                                        "residual": torch.zeros(3)}}}, "other.weight"),
                         ({"tensors": {"norm.weight": {"steps": 1,
                                                       "residual": torch.zeros(3)}}}, "another model")):
        refused(lambda: run.handle.load_state_dict({**state, **change}), gradwire.BadArgument, text)
    off = Run({"residual": "off"})
    refused(lambda: off.handle.load_state_dict(run.handle.state_dict()), gradwire.BadArgument,
            "residual='off'")
    off.close()
    run.close()
    say("refused, with the remedy: what is not sharded, PowerSGD, unknown formats, states that do not fit")


def ranks_that_ask_for_different_things_are_told() -> None:
    run = Run({"gradients": "int8" if RANK else "int4", "weights": "fp32", "timeout_s": 20, "dense": False})
    refused(lambda: run.step(0), gradwire.CommFailed, "int4")
    say("int4 on rank 0 and int8 on others: CommFailed names the formats")
    leave()


def leave() -> None:
    """Ends the process without leaving the process group, because other ranks may be dead."""
    sys.stdout.flush()
    os._exit(0)


def _raises(action: Callable[[], Any], what: str, deadline_s: float) -> None:
    begin = time.monotonic()
    for attempt in range(2):
        try:
            action()
        except RuntimeError as error:
            check(isinstance(error, gradwire.CommFailed), f"{what}: {type(error).__name__}: {error}")
            check(f"rank {WORLD - 1}" in str(error) or attempt > 0,
                  f"{what} does not name rank {WORLD - 1}: {error}")
            say(f"{what} after {time.monotonic() - begin:.1f} s: {error}")
        else:
            check(False, f"{what} came back without rank {WORLD - 1}")
    check(time.monotonic() - begin < deadline_s + 60, f"{what} took {time.monotonic() - begin:.0f} s")


def a_peer_that_dies_before_the_all_gather_raises() -> None:
    run = Run({"timeout_s": 6})
    for s in range(2):
        run.step(s)
    if RANK == WORLD - 1:
        leave()
    _raises(lambda: loss_of(run.model, 2, run.model.words), "forward()", 6)
    leave()


def a_peer_that_dies_before_the_reduce_scatter_raises() -> None:
    run = Run({"timeout_s": 6}, reshard_after_forward=False)
    run.step(0)
    loss = loss_of(run.model, 1, run.model.words)
    if RANK == WORLD - 1:
        leave()
    begin = time.monotonic()
    try:
        loss.backward()
        check(False, "backward() came back without the dead rank")
    except gradwire.CommFailed as error:
        check(f"rank {WORLD - 1}" in str(error), f"backward() does not name rank {WORLD - 1}: {error}")
        say(f"backward() after {time.monotonic() - begin:.1f} s: {error}")
    leave()


def a_silent_peer_raises_at_the_deadline() -> None:
    run = Run({"timeout_s": 2})
    run.step(0)
    if RANK == WORLD - 1:
        time.sleep(12)  # alive, but busy for longer than the deadline
        _raises_anything(lambda: run.step(1))
    else:
        begin = time.monotonic()
        _raises(lambda: run.step(1), "forward()", 2)
        check(time.monotonic() - begin > 1.5, "it did not wait for its deadline")
    leave()


def _raises_anything(action: Callable[[], Any]) -> None:
    refused(action, gradwire.CommFailed)
