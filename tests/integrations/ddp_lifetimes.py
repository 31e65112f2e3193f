"""Scenarios of communicators, hooks and threads that outlive their process group, process or model.

Their ranks change the process group, so the scenarios have ranks of their own.
"""
from __future__ import annotations

import copy
import datetime
import functools
import signal
import threading
import time
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import laws
import launch
import rank
from gradwire.torch import Hook, allreduce_hook, compress
from launch import in_a_fork
from rank import RANK, WORLD, check
from scenarios import scenario
from training import closing

refused = functools.partial(rank.refused, within_s=20)
BAD = gradwire.BadArgument
MEAN = (WORLD - 1) / 2


def ports(count: int) -> List[int]:
    """Returns free ports, the same on every rank."""
    return list(laws.of_all_ranks([launch.free_port() for _ in range(count)])[0])


def start(port: int, rank: int = RANK, world: int = WORLD) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=60))


def destroy(group: Any = None) -> None:
    """Destroys a process group, after a pause in which Gloo's thread completes.

    PyTorch 2.6 holds the GIL while it joins Gloo's thread, which may need the GIL to free a tensor.
    """
    time.sleep(0.05)
    dist.destroy_process_group(group)


def ddp_with(hook: Optional[Hook] = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(8, 4), **options)
    if hook is not None:
        ddp.register_comm_hook(hook, allreduce_hook)
    return ddp


def gradient_of(ddp: nn.Module, value: float) -> float:
    """Returns the gradient of the loss sum(weight x value): `value`, averaged over the ranks."""
    ddp.zero_grad()
    ddp(torch.full((1, 8), value)).sum().backward()
    return float(next(ddp.parameters()).grad[0, 0])


def averaged(count: int = 3, value: float = RANK, **options: Any) -> float:
    return float(gradwire.allreduce_(torch.full((count,), float(value)), **options)[0])


@scenario(2, 4, ends=True)
def allreduce_follows_the_process_group() -> None:
    first, second, third = ports(3)
    check(averaged() == MEAN, "the mean of all ranks")
    destroy()
    last = RANK == WORLD - 1
    start(first if last else second, 0 if last else RANK, 1 if last else WORLD - 1)
    check(averaged() == (RANK if last else (WORLD - 2) / 2), "the mean of the last rank, or of the others")
    destroy()
    start(third)
    check(averaged() == MEAN, "the mean of all ranks again")


@scenario(2, 4, ends=True)
def allreduce_recovers_from_a_failure_unless_ranks_are_a_step_apart() -> None:
    from gradwire import _allreduce
    [port] = ports(1)
    averaged()
    for _ in range(2):
        dist.barrier()  # a failure of the next call must not reach a rank in the previous call
        refused(lambda: averaged(4 + RANK), gradwire.CommFailed)
        check(averaged() == MEAN, "the mean after a failure")
    dist.barrier()
    default = next(iter(_allreduce._defaults.values()))
    # Simulates a last call that failed on this rank only, when the other ranks already had their results.
    if RANK == 0:
        default._completed -= 1
        default._failed = True
    dist.barrier()
    if RANK != 0:
        default.communicator().abort("failed")
        refused(averaged, gradwire.CommFailed, "failed")
    refused(averaged, gradwire.CommFailed, "init_process_group()", "some of the ranks")
    destroy()
    start(port)
    averaged()


@scenario(2, 4, ends=True)
def a_hook_made_before_a_fork_works_in_it() -> None:
    inside, after = ports(2)
    destroy()
    hook = Hook("fp32", timeout_s=10)

    def trains() -> DistributedDataParallel:
        ddp = ddp_with(hook)
        for step in range(2):  # in the second step DDP communicates
            check(gradient_of(ddp, float(RANK + step)) == MEAN + step, f"step {step}")
        return ddp

    def child() -> None:
        start(inside)
        trains()
        hook.close()

    in_a_fork(child)
    start(after)
    ddp = trains()

    def user() -> None:
        # Raised by the hook or, in some versions of PyTorch, earlier by autograd.
        refused(lambda: gradient_of(ddp, 1.0), Exception, "fork")
        refused(hook.check, gradwire.BadHandle, "fork")
        refused(hook.state_dict, gradwire.BadHandle, "fork")
        hook.close()

    in_a_fork(user)
    check(gradient_of(ddp, 1.0) == 1.0, "the hook no longer works after a fork")
    hook.close()


@scenario(2, ends=True)
def a_fork_has_no_part_in_its_parents_group() -> None:
    averaged()
    with closing(Hook("fp32")) as hook:
        gradient_of(ddp_with(hook), 1.0)
        in_a_fork(lambda: refused(averaged, gradwire.BadHandle, "init_process_group()"))
        in_a_fork(lambda: check(signal.set_wakeup_fd(-1) == -1, "Ctrl-C in a fork interrupts the parent"))
        check(averaged() == MEAN, "allreduce_ after a fork")


@scenario(2, ends=True)
def a_hook_ends_with_its_process_group() -> None:
    """Checks that a hook uses its model's process group, also without the argument process_group."""
    [port] = ports(1)
    words = "destroy_process_group()", "create another Hook"
    parts = [dist.new_group([rank]) for rank in range(WORLD)]
    alone = ddp_with(process_group=parts[RANK])
    refused(lambda: Hook("fp32", model=alone, process_group=dist.group.WORLD), BAD, "process_group")
    with closing(Hook("fp32", model=alone)) as hook:
        alone.register_comm_hook(hook, allreduce_hook)
        check(gradient_of(alone, float(RANK)) == RANK, "the hook averages over other ranks than its model's")
        destroy(parts[RANK])
        refused(lambda: gradient_of(alone, 1.0), Exception, *words)
    with closing(Hook("fp32")) as hook:
        gradient_of(ddp_with(hook), 1.0)
        destroy()
        start(port)
        refused(lambda: gradient_of(ddp_with(hook), 1.0), Exception, *words)


@scenario()
def a_communicator_has_one_owner() -> None:
    comm = gradwire.torch.communicator(timeout_s=60)
    spare = comm.split(0)
    first = Hook("fp32", comm=comm)
    ddp = ddp_with(first)
    gradient_of(ddp, 1.0)
    calls: List[Callable[[], Any]] = [
        lambda: Hook("fp32", comm=comm), lambda: compress(ddp_with(), comm=comm),
        lambda: averaged(comm=comm), lambda: gradwire.Reducer(comm, "fp32", [("w", 3, 1)])]
    for call in calls:
        refused(call, BAD, "a Hook uses this communicator", "split(0)")
    second = Hook("fp32", comm=spare)
    other = ddp_with(second)
    for step in range(5):
        check(gradient_of(ddp, float(step)) == gradient_of(other, float(step)) == step, f"step {step}")
    first.close()
    check(averaged(comm=comm) == MEAN, "after close() the communicator is free")
    for each in (second, comm, spare):
        each.close()


@scenario()
def a_copied_model_is_compressed_by_compress() -> None:
    ddp = ddp_with()
    hook = compress(ddp, "int8:schedule=ring")
    gradient_of(ddp, 1.0)
    threads = threading.active_count()
    for _ in range(3):
        copied = copy.deepcopy(ddp)
    check(threading.active_count() == threads, "copies have started threads")
    ours = compress(copied, "int8:schedule=ring")
    refused(lambda: compress(copied), BAD, "hook")
    gradient_of(copied, float(RANK))
    check(ours.stats()["steps"] == 1, f"the copy is not compressed: {ours.stats()}")
    check(gradient_of(ddp, 1.0) > 0 and hook.stats()["steps"] == 2, "the original is no longer compressed")
    ours.close()
    hook.close()
    check(threading.active_count() <= threads - 1, "close() left a thread")
    refused(hook.state_dict, gradwire.BadHandle, "before close()")
    compress(copy.deepcopy(ddp), "int8:schedule=ring").close()  # the closed hook is in DDP's list
    in_a_fork(lambda: check(copy.deepcopy(ddp) is not ddp, "no copy in a fork"))
