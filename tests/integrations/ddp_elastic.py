"""Tests hooks with min_ranks: ranks die, stop or fail once, and the others continue in the same process."""
from __future__ import annotations

import copy
import inspect
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, List, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch import Hook, compress

from ddp_training import TASKS, Run, batch_of
from rank import RANK, WORLD, check, refused, say

# Named schedules, because bits are compared.
SPECS = ("fp32:schedule=two_shot", "int8:schedule=ring", "powersgd:rank=2,schedule=two_shot")


class Said(logging.Handler):
    """Collects the log messages of this process's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []
        logging.getLogger("gradwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def new_run(spec: str, min_ranks: int, timeout_s: float = 60) -> Run:
    """Creates a run, with its hook as run.hook."""
    torch.manual_seed(7)
    model = TASKS["vit"].build()
    hook = Hook(spec, model=model, min_ranks=min_ranks, timeout_s=timeout_s)
    run = Run(TASKS["vit"], hook, model=model, bucket_cap_mb=0.25)
    run.hook = hook  # type: ignore[attr-defined]
    return run


def over_survivors(hook: Hook, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of `tensor` over the surviving ranks."""
    return hook._comm.allreduce_(tensor.clone(), "fp32",
                                 "sum") if hook._comm.world > 1 else tensor  # type: ignore[union-attr]


def residuals(hook: Hook, like: nn.Module) -> torch.Tensor:
    """Returns the residuals of all parameters; zeros for missing ones."""
    tensors = hook.state_dict()["tensors"]
    parts = []
    for name, p in like.named_parameters():
        kept = tensors[name]["state"].get("residual") if name in tensors else None
        parts.append(kept.float() if kept is not None and kept.numel() > 0 else torch.zeros(p.numel()))
    return torch.cat(parts)


def same_weights(run: Any) -> None:
    mine, comm = run.parameters(), run.hook._comm
    everybody = torch.empty(comm.world * mine.numel())
    comm.all_gather(everybody, mine, "fp32")
    check(all(torch.equal(mine, other) for other in everybody.view(comm.world, -1)),
          f"weights differ among ranks {run.hook.ranks}")


def step_without_loss(run: Any, number: int, counts: Sequence[int] = ()) -> None:
    """Makes a step in which ranks may die. Checks that no gradient or residual of a survivor is lost.

    counts: ranks without residuals that die in the step after all ranks have the means, which include the
    gradients of these ranks.
    """
    hook, alone = run.hook, copy.deepcopy(run.model)
    before = residuals(hook, alone)

    def gradient(rank: int) -> torch.Tensor:
        alone.zero_grad()
        images, labels = batch_of(run.task, number, rank)
        nn.functional.cross_entropy(alone(images), labels).backward()
        return torch.cat([p.grad.flatten() for p in alone.parameters()])

    own, theirs = gradient(RANK), [gradient(rank) for rank in counts]
    run.step(number)
    wanted = over_survivors(hook, own + before) + sum(theirs)
    found = (len(hook.ranks) + len(counts)) * run.gradients() + over_survivors(hook, residuals(hook, alone))
    off = float((found - wanted).norm() / wanted.norm())
    check(
        off < 1e-5,
        f"{hook.spec}, step {number}: {off:.1e} of the gradients and residuals of ranks {hook.ranks} is lost")


def ranks_that_die_are_gone_on_without() -> None:
    """Ends all ranks but one, also rank 0: between steps, in a bucket, and before the end of a step."""
    check(WORLD == 5, "this scenario needs 5 ranks")
    said = Said()
    runs = [new_run(spec, min_ranks=1) for spec in SPECS]
    for number in range(2):  # before its second step, DDP itself communicates with all ranks
        for run in runs:
            step_without_loss(run, number)
    # Keys: steps. Values: the rank that dies, the run, and the moment.
    deaths = {2: (4, 2, "between"), 4: (0, 1, "bucket"), 6: (3, 0, "end"), 8: (1, 1, "bucket")}
    left = list(range(WORLD))
    for number in range(2, 11):
        for k, run in enumerate(runs):
            who, where, how = deaths.get(number, (-1, 0, ""))
            if who == RANK and where == k:
                if how == "between":
                    os._exit(0)
                dies_in(run.hook, how)  # type: ignore[attr-defined]
            if where == k and who >= 0:
                left.remove(who)
            step_without_loss(run, number, [who] if k == where and how == "end" else [])
            if k == where or who < 0:
                check(run.hook.ranks == left,
                      f"step {number}: ranks {run.hook.ranks}, not {left}")  # type: ignore[attr-defined]
            if len(left) > 1:
                same_weights(run)
    check(left == [2], f"{left} are left")
    for run in runs:
        check(run.hook.stats()["steps"] == 11,
              f"{run.hook.stats()['steps']} steps")  # type: ignore[attr-defined]
    lost = [line for line in said.lines if line.startswith("lost rank")]
    check(len(lost) == 3, f"rank 2 leads when it is alone: {said.lines}")
    check(all("1 of 2 ranks continue" in line for line in lost), str(lost))
    print(
        f"of 5 ranks, 4 died one after another; the last one trained on with {', '.join(SPECS)}; it said:"
        f" {lost[1]}",
        flush=True,
    )
    sys.stdout.flush()
    os._exit(0)  # torch's process group would wait for the dead ranks


def dies_in(hook: Hook, how: str) -> None:
    """Ends this rank in its next step: at its third bucket, or at the step's final exchange."""
    if how == "end":
        hook._elastic._exchange_norms = lambda comm: os._exit(0)  # type: ignore[union-attr,assignment]
        return
    reduce, calls = hook._reduce, []

    def dying(*arguments: Any) -> None:
        calls.append(0)
        if len(calls) == 3:
            os._exit(0)
        reduce(*arguments)

    hook._reduce = dying  # type: ignore[method-assign]


def what_a_dead_rank_held_is_said() -> None:
    said = Said()
    run: Any = new_run("int4:schedule=ring", min_ranks=2)
    for number in range(3):
        run.step(number)
    norm = residuals(run.hook, run.model).norm().view(1)
    dist.broadcast(norm, WORLD - 1)
    if RANK == WORLD - 1:
        os._exit(0)
    step_without_loss(run, 3)
    same_weights(run)
    if RANK == 0:
        check(
            len(said.lines) == 1
            and f"lost rank {WORLD - 1} in step 3; {WORLD - 1} of {WORLD} ranks continue" in said.lines[0],
            str(said.lines))
        check(f"of norm {float(norm):.4g}, are lost" in said.lines[0], f"not {float(norm):.4g}: {said.lines}")
        print(said.lines[0], flush=True)
    # Another rank dies, so that fewer than min_ranks are left.
    if RANK == WORLD - 2:
        os._exit(0)
    if WORLD == 3:
        for attempt in range(2):
            refused(lambda: run.step(4), RuntimeError, "min_ranks is 2", f"rank {WORLD - 2}")
        run.hook.close()
    dist.destroy_process_group()  # does not wait for the dead rank
    sys.exit(0)


def failures_that_pass_change_nothing() -> None:
    """Compares a run whose group fails without losing a rank with an undisturbed run, bit for bit.

    Some failures leave ranks one step apart.
    """
    for spec in SPECS:
        results = []
        for disturbed in (False, True):
            run: Any = new_run(spec, min_ranks=1)
            for number in range(8):
                if disturbed and RANK == number % WORLD:
                    if number in (0, 2, 3):
                        fails_once(run.hook, "bucket")
                    elif number in (4, 6):
                        fails_once(run.hook, "end")
                run.step(number)
                if number not in (4, 6):  # after these steps the group has failed
                    same_weights(run)
            results.append(torch.cat([run.parameters(), residuals(run.hook, run.model)]))
            check(run.hook.ranks == list(range(WORLD)), f"ranks {run.hook.ranks}")
            check(run.hook.stats()["steps"] == 8, f"{run.hook.stats()['steps']} steps")
            run.hook.close()
        off = float((results[0] - results[1]).abs().max())
        check(off == 0, f"{spec}: failures without a loss changed weights or residuals by {off:.1e}")
    say(
        "five failures without a death, two of them after a step's last exchange: the same bits,"
        f" {', '.join(SPECS)}"
    )


def fails_once(hook: Hook, where: str) -> None:
    """Makes the communicator fail in this rank's next step.

    where: "bucket": at the second bucket; "end": when all other ranks have completed the step.
    """
    name, owner = ("_reduce", hook) if where == "bucket" else ("_exchange_norms", hook._elastic)
    call, calls = getattr(owner, name), []

    def failing(*arguments: Any) -> Any:
        calls.append(0)
        if where == "bucket" and len(calls) < 2:
            return call(*arguments)
        setattr(owner, name, call)
        if where == "end":
            call(*arguments)
            time.sleep(0.3)  # the others continue with their next step
        hook._comm.abort("a test")  # type: ignore[union-attr]
        raise gradwire.CommFailed("a test")

    setattr(owner, name, failing)


def a_failure_that_stays_is_raised() -> None:
    run: Any = new_run("bf16", min_ranks=1)
    run.step(0)
    run.step(1)
    if RANK == 0:
        def failing(*_: Any) -> None:
            run.hook._comm.abort("the disk is full")
            raise gradwire.CommFailed("the disk is full")

        run.hook._reduce = failing
    for _ in range(2):
        refused(lambda: run.step(2), RuntimeError, "the disk is full")
    run.hook.close()
    say("a failure that repeats without a lost rank: raised on all ranks")


def a_stopped_rank_is_gone_on_without() -> None:
    check(WORLD == 3, "this scenario needs 3 ranks")
    run: Any = new_run("int8", min_ranks=2, timeout_s=3)
    for number in range(3):
        run.step(number)
    if RANK == 2:
        subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            run.step(3)
            check(False, "a rank that was left out went on")
        except RuntimeError as error:
            print(f"rank 2: {error}", flush=True)
    else:
        for number in range(3, 6):
            step_without_loss(run, number)
            same_weights(run)
        check(run.hook.ranks == [0, 1], f"ranks {run.hook.ranks}")
        time.sleep(4)  # keeps the survivors alive until rank 2 has asked them
    sys.stdout.flush()
    os._exit(0)


def ranks_that_die_at_random_moments() -> None:
    """Ends all ranks but two at random moments of small steps. `seed=N` on the command line sets the seed."""
    given = [int(argument[5:]) for argument in sys.argv if argument.startswith("seed=")]
    draw = random.Random(given[0] if given else 1)
    dying = draw.sample(range(WORLD), WORLD - 2)
    # Values: a step, and the seconds after its begin.
    moments = {rank: (draw.randrange(2, 20), draw.uniform(0, 0.02)) for rank in dying}
    if draw.random() < 0.5:  # two ranks die at the same time
        moments[dying[0]] = moments[dying[1]]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    hook = compress(ddp, draw.choice(["fp32", "int8", "powersgd:rank=1"]), min_ranks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(RANK)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()

    for number in range(60):
        if number == moments.get(RANK, (-1, 0))[0]:
            threading.Timer(moments[RANK][1], lambda: os._exit(0)).start()
        step()
        if number == 30 and RANK in moments:
            time.sleep(60)  # this rank dies during the sleep
    check(
        sorted(set(range(WORLD)) - moments.keys()) == hook.ranks,
        f"ranks {hook.ranks} are left, {moments} died")
    check(hook.stats()["steps"] == 60, f"{hook.stats()['steps']} steps")
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybody = torch.empty(2 * mine.numel())
    hook._comm.all_gather(everybody, mine, "fp32")  # type: ignore[union-attr]
    check(torch.equal(*everybody.view(2, -1)), "the two that are left have different weights")
    print(f"rank {RANK}: {WORLD - 2} ranks died at random moments; 60 steps with {hook.spec}", flush=True)
    os._exit(0)


def what_needs_all_ranks_is_refused() -> None:
    bad = gradwire.BadArgument

    def normalized() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    today = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if today else "broadcast_buffers"
    refused(lambda: compress(DistributedDataParallel(normalized()), "int8", min_ranks=2), bad,
            f"{name}=False")
    compress(DistributedDataParallel(normalized(), **{name: False}), "int8", min_ranks=2).close()
    refused(
        lambda: compress(DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True), min_ranks=2),
        bad, "find_unused_parameters=False")
    refused(lambda: Hook("int8", min_ranks=2, comm=gradwire.Communicator()), bad, "pass no comm")
    refused(lambda: Hook("int8", min_ranks=-1), bad, "at least 1")
    check(
        compress(DistributedDataParallel(nn.Linear(4, 4))).ranks == list(range(WORLD)),
        "hook.ranks without min_ranks")
    say("what would use the process group in every step is refused")


SCENARIOS: List[Callable[[], None]] = [
    what_needs_all_ranks_is_refused, failures_that_pass_change_nothing, a_failure_that_stays_is_raised,
    a_stopped_rank_is_gone_on_without, ranks_that_die_are_gone_on_without, what_a_dead_rank_held_is_said,
    ranks_that_die_at_random_moments
]
