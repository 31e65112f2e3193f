"""Scenarios of the DDP hook whose ranks die, stop, pause or fail. They run in ranks of their own.

backward() raises at the latest at the deadline, waits for ranks that pause, and with min_ranks continues
without the dead, in the same processes.
"""
from __future__ import annotations

import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import laws
from gradwire.torch import Hook, compress
from rank import RANK, WORLD, check, refused
from scenarios import scenario
from training import Run, Warnings, ddp_of, flat, residuals

# Named schedules, because bits are compared.
SPECS = ("fp32:schedule=two_shot", "int8:schedule=ring,dense=off", "powersgd:rank=2,schedule=two_shot")


def leave() -> None:
    """Ends this rank without leaving the process group, which would wait for dead ranks."""
    sys.stdout.flush()
    os._exit(0)


def signal_later(seconds: float, number: int) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -{number} {os.getpid()}"])


def run_of(spec: str, steps: int, **options: Any) -> Run:
    """Makes a run, and steps; before its second step, DDP itself communicates with all ranks."""
    run = Run(Hook(spec, **options), bucket_kb=30)
    run.steps(0, steps)
    return run


@scenario(2, 4, ends=True)
def a_dead_peer_raises() -> None:
    run = run_of("powersgd:rank=2", 2, timeout_s=6)
    run.hook.check()
    dist.barrier()  # otherwise a slow rank's check() could raise first
    if RANK == WORLD - 1:
        leave()
    dead = f"rank {WORLD - 1}"
    refused(lambda: run.step(2), RuntimeError, dead, within_s=60)
    refused(lambda: run.step(2), RuntimeError, within_s=60)
    refused(run.hook.check, gradwire.CommFailed, dead)
    leave()


@scenario(3, ends=True)
def a_hook_on_some_ranks_alone_raises_at_the_deadline() -> None:
    ddp, missing = ddp_of(nn.Linear(12, 4)), WORLD - 1
    if RANK != missing:
        compress(ddp, "int8", timeout_s=4)
        refused(lambda: ddp(torch.randn(4, 12)).sum().backward(), RuntimeError,
                f"rank {missing} of the" if RANK == 0 else "not every rank", "call within 4 s", within_s=30)
    else:
        time.sleep(8)
    leave()


@scenario(3, ends=True)
def a_silent_peer_raises_at_the_deadline() -> None:
    run = run_of("bf16", 2, timeout_s=2)
    if RANK > 0:  # rank 0 is alive, but busy for longer than the deadline
        begin = time.monotonic()
        refused(lambda: run.step(2), RuntimeError, "rank 0", within_s=60)
        check(time.monotonic() - begin > 1.5, "the error came before the deadline of 2 s")
    dist.barrier()
    begin = time.monotonic()
    run.hook.close()
    check(time.monotonic() - begin < 30, "closing after a failure took long")


@scenario(2, ends=True)
def ctrl_c_ends_backward_and_notifies_the_other_ranks() -> None:
    run = run_of("bf16", 2)  # its deadline is half an hour
    dist.barrier()
    begin = time.monotonic()
    try:
        if RANK == 0:
            signal_later(2, signal.SIGINT)
            try:
                run.step(2)
            except RuntimeError:  # raised by the step; Python raises KeyboardInterrupt next
                time.sleep(10)
        while RANK > 0 and time.monotonic() < begin + 60:
            time.sleep(0.1)
            run.hook._comm.check()
        check(False, "the call ended without KeyboardInterrupt or an error")
    except KeyboardInterrupt:
        check(time.monotonic() - begin < 30, "it took long")
    except gradwire.CommFailed as error:
        check(RANK > 0 and "interrupted by Ctrl-C" in str(error), f"the error does not say why: {error}")
    leave()


@scenario(2, ends=True)
def a_peer_that_pauses_is_waited_for() -> None:
    """Stops rank 0 and its communicator's threads, as a slow checkpoint does at worst.

    Each pause is shorter than the deadline, and their sum is longer.
    """
    pause_s, results = 4.0, []
    for pauses in (0, 3):
        run = run_of("int8:schedule=ring", 2, timeout_s=9)
        for step in range(2, 6):
            begin, cpu_begin, pausing = time.monotonic(), time.process_time(), step < 2 + pauses
            if RANK == 0 and pausing:
                signal_later(pause_s, signal.SIGCONT)
                os.kill(os.getpid(), signal.SIGSTOP)
            run.step(step)
            if pausing:
                check(time.monotonic() - begin > 0.9 * pause_s, f"step {step} did not wait for rank 0")
                cpu_s = time.process_time() - cpu_begin  # of all threads, including the step's work
                check(cpu_s < 0.25 * pause_s, f"step {step}: waiting took {cpu_s:.1f} s of the processor")
        run.hook.check()
        run.same_weights()
        results.append(flat(run.model))
        run.hook.close()
    check(torch.equal(*results), "the pauses changed the weights")


# ---- min_ranks -------------------------------------------------------------------------------------------


@scenario(5, ends=True)
def ranks_that_die_are_gone_on_without() -> None:
    """Ends all ranks but one, also rank 0: between steps, in a bucket, and before the end of a step."""
    said = Warnings()
    runs = [run_of(spec, 0, min_ranks=1) for spec in SPECS]
    # Keys: steps. Values: the rank that dies, the run, and the moment.
    deaths = {2: (4, 2, "between"), 4: (0, 1, "bucket"), 6: (3, 0, "end"), 8: (1, 1, "bucket")}
    left = list(range(WORLD))
    for number in range(11):
        for k, run in enumerate(runs):
            who, where, how = deaths.get(number, (-1, 0, ""))
            if who == RANK and where == k:
                if how == "between":
                    leave()
                dies_in(run.hook, how)
            if where == k and who >= 0:
                left.remove(who)
            run.step_without_loss(number, dead=[who] if k == where and how == "end" else [])
            if k == where or who < 0:
                check(run.hook.ranks == left, f"step {number}: ranks {run.hook.ranks}, not {left}")
            run.same_weights()
    check(left == [2], f"{left} are left")
    check(all(run.hook.stats()["steps"] == 11 for run in runs), "steps")
    lost = [line for line in said.texts if line.startswith("lost rank")]
    check(len(lost) == 3, f"rank 2 leads when it is alone: {said.texts}")
    check(all("1 of 2 ranks continue" in line for line in lost), str(lost))
    leave()


def dies_in(hook: Any, how: str) -> None:
    """Ends this rank in its next step: at its third bucket, or at the step's final exchange."""
    if how == "end":
        hook._elastic._exchange_norms = lambda comm: os._exit(0)
        return
    reduce, calls = hook._reduce, []

    def dying(*arguments: Any) -> None:
        calls.append(0)
        if len(calls) == 3:
            os._exit(0)
        reduce(*arguments)

    hook._reduce = dying


@scenario(3, ends=True)
def the_residuals_of_a_dead_rank_are_reported_and_too_few_ranks_raise() -> None:
    said = Warnings()
    run = run_of("int4:schedule=ring,dense=off", 3, min_ranks=2)
    norm = torch.cat(list(residuals(run.hook).values())).norm().view(1)
    dist.broadcast(norm, 2)
    if RANK == 2:
        leave()
    run.step_without_loss(3)
    run.same_weights()
    if RANK == 0:
        check(len(said.texts) == 1 and "lost rank 2 in step 3; 2 of 3 ranks continue" in said.texts[0]
              and f"of norm {float(norm):.4g}, are lost" in said.texts[0], f"{float(norm):.4g}: {said.texts}")
    if RANK == 1:
        leave()
    for _ in range(2):
        refused(lambda: run.step(4), RuntimeError, "min_ranks is 2", "rank 1")
    run.hook.close()
    dist.destroy_process_group()  # does not wait for the dead rank
    leave()


@scenario(3, ends=True)
def failures_without_a_death_change_no_bit_and_a_failure_that_stays_is_raised() -> None:
    """Some of these failures leave ranks one step apart."""
    for spec in SPECS:
        results = []
        for disturbed in (False, True):
            run = run_of(spec, 0, min_ranks=1)
            for number in range(8):
                if disturbed and RANK == number % WORLD and number in (0, 2, 3, 4, 6):
                    fails_once(run.hook, "end" if number in (4, 6) else "bucket")
                run.step(number)
                if number not in (4, 6):  # after these steps the group has failed
                    run.same_weights()
            results.append([flat(run.model), residuals(run.hook)])
            check(run.hook.ranks == list(range(WORLD)), f"ranks {run.hook.ranks}")
            check(run.hook.stats()["steps"] == 8, f"{run.hook.stats()['steps']} steps")
            run.hook.close()
        check(laws.same_bits(*results), f"{spec}: failures without a loss changed weights or residuals")
    run = run_of("bf16", 2, min_ranks=1)
    if RANK == 0:
        def failing(*_: Any) -> None:
            run.hook._comm.abort("the disk is full")
            raise gradwire.CommFailed("the disk is full")

        run.hook._reduce = failing
    for _ in range(2):
        refused(lambda: run.step(2), RuntimeError, "the disk is full")
    run.hook.close()


def fails_once(hook: Any, where: str) -> None:
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
        hook._comm.abort("a test")
        raise gradwire.CommFailed("a test")

    setattr(owner, name, failing)


@scenario(3, ends=True)
def a_stopped_rank_is_gone_on_without() -> None:
    run = run_of("int8", 3, min_ranks=2, timeout_s=3)
    if RANK == 2:
        signal_later(7, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGSTOP)
        refused(lambda: run.step(3), RuntimeError)
    else:
        for number in range(3, 6):
            run.step_without_loss(number)
            run.same_weights()
        check(run.hook.ranks == [0, 1], f"ranks {run.hook.ranks}")
        time.sleep(4)  # keeps the survivors alive until rank 2 has asked them
    leave()


@scenario(6, ends=True)
def ranks_that_die_at_random_moments_are_gone_on_without() -> None:
    """Ends all ranks but two at random moments of small steps."""
    draw = random.Random(int(os.environ.get("GRADWIRE_TEST_SEED", 1)))
    dying = draw.sample(range(WORLD), WORLD - 2)
    # Values: a step, and the seconds after its begin.
    moments = {rank: (draw.randrange(2, 20), draw.uniform(0, 0.02)) for rank in dying}
    if draw.random() < 0.5:  # two ranks die at the same time
        moments[dying[0]] = moments[dying[1]]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = ddp_of(model, bucket_kb=5)
    hook: Any = compress(ddp, draw.choice(["fp32", "int8:dense=off", "powersgd:rank=1"]), min_ranks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(RANK)
    for number in range(60):
        if number == moments.get(RANK, (-1, 0))[0]:
            threading.Timer(moments[RANK][1], lambda: os._exit(0)).start()
        optimizer.zero_grad()
        ddp(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        if number == 30 and RANK in moments:
            time.sleep(60)  # this rank dies during the sleep
    left: List[int] = sorted(set(range(WORLD)) - moments.keys())
    check(hook.ranks == left, f"ranks {hook.ranks} are left, {moments} died")
    check(hook.stats()["steps"] == 60, f"{hook.stats()['steps']} steps")
    both = torch.empty(2 * flat(model).numel())
    hook._comm.all_gather(both, flat(model), "fp32")
    check(torch.equal(*both.view(2, -1)), "the two that are left have different weights")
    leave()


@scenario(2)
def what_would_need_all_ranks_is_refused_with_min_ranks() -> None:
    def normalized(**options: Any) -> Any:
        return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)

    today = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if today else "broadcast_buffers"
    bad = gradwire.BadArgument
    refused(lambda: compress(normalized(), "int8", min_ranks=2), bad, f"{name}=False")
    compress(normalized(**{name: False}), "int8", min_ranks=2).close()
    unused = DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
    refused(lambda: compress(unused, min_ranks=2), bad, "find_unused_parameters=False")
    refused(lambda: Hook("int8", min_ranks=2, comm=gradwire.Communicator()), bad, "pass no comm")
    refused(lambda: Hook("int8", min_ranks=-1), bad, "at least 1")
