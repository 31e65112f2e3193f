"""Scenarios of FSDP2 whose ranks die, stop responding or differ: every waiting rank raises."""
from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

import torch

import gradwire
from fsdp_training import PLAIN, Run, loss_of, replicas_of
from gradwire.fsdp import compress
from rank import RANK, WORLD, check, refused
from scenarios import scenario

BAD, LAST = gradwire.BadArgument, f"rank {WORLD - 1}"


def leave() -> None:
    """Ends the process without leaving the process group, because other ranks may be dead."""
    sys.stdout.flush()
    os._exit(0)


def others_raise(call: Callable[[], Any]) -> None:
    """Ends the last rank. On other ranks `call` must raise CommFailed that names the rank."""
    if RANK < WORLD - 1:
        refused(call, gradwire.CommFailed, LAST, within_s=60)
        refused(call, RuntimeError)
    leave()


@scenario(2, 4, ends=True)
def a_peer_that_dies_before_the_all_gather_raises() -> None:
    run = Run({"timeout_s": 6})
    run.steps(0, 2)
    others_raise(lambda: loss_of(run.model, 2))


@scenario(2, 4, ends=True)
def a_peer_that_dies_before_the_reduce_scatter_raises() -> None:
    run = Run({"timeout_s": 6}, reshard_after_forward=False)
    run.step(0)
    others_raise(loss_of(run.model, 1).backward)


@scenario(2, ends=True)
def a_replica_that_dies_raises() -> None:
    run = Run({**PLAIN, "replicas": "powersgd:rank=4", "timeout_s": 6}, mesh=replicas_of(2))
    run.step(0)
    others_raise(loss_of(run.model, 1).backward)


@scenario(3, ends=True)
def a_silent_peer_raises_at_the_deadline() -> None:
    run = Run({"timeout_s": 2})
    run.step(0)
    begin = time.monotonic()
    if RANK == WORLD - 1:
        time.sleep(12)  # alive, but busy for longer than the deadline
    refused(lambda: run.step(1), gradwire.CommFailed, *([LAST] if RANK < WORLD - 1 else []), within_s=60)
    check(time.monotonic() - begin > 1.5, "it did not wait for its deadline")
    leave()


@scenario(2, ends=True)
def ranks_that_ask_for_different_things_are_told() -> None:
    run = Run({"gradients": "int8" if RANK else "int4", "weights": "fp32", "timeout_s": 20, "dense": False})
    refused(lambda: run.step(0), gradwire.CommFailed, "int4")
    leave()


@scenario(2)
def what_cannot_be_compressed_is_refused() -> None:
    run, sharded, hybrid = Run({"gradients": "int8"}), Run(), Run(mesh=replicas_of(2))
    for model, arguments, words in (
        (torch.nn.Linear(2, 2), {}, ["fully_shard"]),
        (run.model, {}, ["compressed already"]),
        (sharded.model, {"gradients": "powersgd:rank=4"}, ["int4:rotate=hadamard"]),
        (sharded.model, {"gradients": "randk:ratio=0.1"}, ["slice"]),
        (sharded.model, {"weights": "powersgd"}, ["weights='powersgd'"]),
        (sharded.model, {"gradients": "int9"}, ["int9"]), (sharded.model, {"weights": "none"}, ["none"]),
        (sharded.model, {"gradients": "int8:ef=off"}, ["residual='off'"]),
        (sharded.model, {"residual": "fp16"}, ["'bf16'"]), (sharded.model, {"dense": "auto"}, ["['auto']"]),
        (sharded.model, {"replicas": "powersgd:rank=4"}, ["2-D mesh"]),
        (sharded.model, {"replicas": "int4"}, ["2-D mesh"]),
        *((hybrid.model, {"replicas": spec}, [word]) for spec, word in (
            ("powersgd:wire=int9", "int9"), ("powersgd:rank=4,alternate=on", "alternate"),
            ("powersgd:rank=4,ef=off", "ef=off"), ("powersgd:rank=0", "rank"), ("powersgd:steps=3", "steps"),
            ("randk:ratio=0.1", "whole tensors"))),
    ):
        refused(lambda: compress(model, **arguments), (BAD, gradwire.Unsupported), *words)
    sharded.step(0)  # the rejected calls have not changed the model
    state, size = run.handle.state_dict(), torch.zeros(3)
    run.step(0)
    for change, text in (({"version": 9}, "reads version 1"),
                         ({"shard": ((RANK + 1) % WORLD, WORLD)}, "load each rank's own state"),
                         ({"tensors": {"other.weight": {"steps": 1, "residual": size}}}, "other.weight"),
                         ({"tensors": {"norm.weight": {"steps": 1, "residual": size}}}, "another model")):
        refused(lambda: run.handle.load_state_dict({**state, **change}), BAD, text)
    off = Run({"residual": "off"})
    refused(lambda: off.handle.load_state_dict(run.handle.state_dict()), BAD, "residual='off'")
    low = [Run({**PLAIN, "replicas": f"powersgd:rank={rank}"}, mesh=replicas_of(2)) for rank in (4, 2)]
    low[0].step(0)
    refused(lambda: low[1].handle.load_state_dict(low[0].handle.state_dict()), BAD, "rank")
    plain = Run(PLAIN, mesh=replicas_of(2))
    refused(lambda: plain.handle.load_state_dict(low[0].handle.state_dict()), BAD, "drop")
    for each in (run, off, plain, *low):
        each.close()
