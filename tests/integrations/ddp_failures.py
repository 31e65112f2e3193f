"""Tests ranks that die, stop responding or pause.

backward() raises on the other ranks at the latest at the deadline, and waits for ranks that pause.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import gradwire
from gradwire.torch import Hook

from ddp_training import TASKS, Run, same_on_all_ranks
from rank import RANK, WORLD, check, refused, say


def a_dead_peer_raises() -> None:
    hook = Hook("powersgd:rank=2", timeout_s=6)
    run = Run(TASKS["vit"], hook)
    for s in range(2):
        run.step(s)
        hook.check()
    dist.barrier()  # otherwise a slow rank's check() could raise first
    if RANK == WORLD - 1:
        os._exit(0)  # without leaving the group
    begin = time.monotonic()
    for attempt in range(2):
        try:
            run.step(2)
        except RuntimeError as error:
            text = str(error)
            check(f"rank {WORLD - 1}" in text or attempt > 0,
                  f"the error does not name rank {WORLD - 1}: {text}")
            say(f"backward() after {time.monotonic() - begin:.1f} s: {text}")
        else:
            check(False, "backward() came back without the dead rank")
    refused(hook.check, gradwire.CommFailed, f"rank {WORLD - 1}")
    check(time.monotonic() - begin < 60, "it took much longer than the deadline")
    sys.stdout.flush()
    os._exit(0)  # torch's process group would wait for the dead rank


def a_silent_peer_raises() -> None:
    hook = Hook("bf16", timeout_s=2)
    run = Run(TASKS["vit"], hook)
    for s in range(2):  # before its second step, DDP itself communicates with all ranks
        run.step(s)
    if RANK == 0:  # alive, but busy for longer than the deadline
        dist.barrier()
    else:
        begin = time.monotonic()
        refused(lambda: run.step(2), RuntimeError, "rank 0")
        waited = time.monotonic() - begin
        check(1.5 < waited < 60, f"the deadline was 2 s, the error came after {waited:.1f} s")
        dist.barrier()
    begin = time.monotonic()
    hook.close()
    check(time.monotonic() - begin < 30, "closing after a failure took long")
    say("a rank that does not come: backward() raises on the others at the deadline")


def ctrl_c_ends_backward() -> None:
    hook = Hook("bf16")  # its deadline is half an hour
    run = Run(TASKS["vit"], hook)
    for s in range(2):
        run.step(s)
    dist.barrier()
    if RANK == 0:
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -INT {os.getpid()}"])
        begin = time.monotonic()
        try:
            try:
                run.step(2)
            except RuntimeError:  # raised by the step; Python raises KeyboardInterrupt next
                for _ in range(100):
                    time.sleep(0.1)
            check(False, "backward() came back without the other ranks")
        except KeyboardInterrupt:
            say(f"KeyboardInterrupt {time.monotonic() - begin - 2:.1f} s after the signal")
        check(time.monotonic() - begin < 30, "it took long")
    else:
        try:
            for _ in range(600):
                time.sleep(0.1)
                hook._comm.check()
            check(False, "the others do not hear of it")
        except gradwire.CommFailed as error:
            check("interrupted by Ctrl-C" in str(error), f"the error does not say why: {error}")
    sys.stdout.flush()
    os._exit(0)


def a_peer_that_pauses_is_waited_for() -> None:
    # Stops rank 0, including the threads of its communicator, as a slow checkpoint does at worst. `pause=75`
    # on the command line sets a longer pause, with the default deadline of a Hook. Otherwise each pause is
    # shorter than the deadline, and the sum of the pauses is longer.
    given = [float(argument[6:]) for argument in sys.argv if argument.startswith("pause=")]
    pause_s, deadline = (given[0], {}) if given else (4.0, {"timeout_s": 9.0})
    results = []
    for pauses in (0, 1 if given else 3):
        hook = Hook("int8:schedule=ring", **deadline)
        run = Run(TASKS["vit"], hook)
        for s in range(6):
            begin, cpu_begin = time.monotonic(), time.process_time()
            if RANK == 0 and 2 <= s < 2 + pauses:
                subprocess.Popen(["sh", "-c", f"sleep {pause_s}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            run.step(s)
            if 2 <= s < 2 + pauses:
                check(time.monotonic() - begin > 0.9 * pause_s, f"step {s} did not wait for rank 0")
                cpu_s = time.process_time() - cpu_begin  # of all threads, including the step's work
                check(cpu_s < 0.25 * pause_s,
                      f"step {s}: waiting for {pause_s} s took {cpu_s:.1f} s of the processor")
        hook.check()
        same_on_all_ranks(run.parameters(), "the model")
        results.append(run.parameters())
        hook.close()
    check(torch.equal(*results), "the pauses changed the weights")
    say(
        f"rank 0 stopped for {pause_s} s in a step, with a deadline of {deadline or 'half an hour'}: the same"
        " weights as without"
    )
