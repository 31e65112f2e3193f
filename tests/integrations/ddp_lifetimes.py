"""Tests communicators, hooks and threads that outlive their process group, process or model."""
from __future__ import annotations

import functools
import copy
import datetime
import signal
import threading
import time
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.torch import Hook, allreduce_hook, compress

import launch
import rank
from launch import in_a_fork
from rank import RANK, WORLD, check, say

refused = functools.partial(rank.refused, within_s=20)


def ports(count: int) -> List[int]:
    """Returns free ports, the same on every rank."""
    chosen: List[Any] = [[launch.free_port() for _ in range(count)]]
    dist.broadcast_object_list(chosen, src=0)
    return list(chosen[0])


def start(port: int, rank: int = RANK, world: int = WORLD) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=60))


def destroy() -> None:
    """Destroys the process group, after a pause in which Gloo's thread completes.

    PyTorch 2.6 holds the GIL while it joins Gloo's thread, which may need the GIL to free a tensor.
    """
    time.sleep(0.05)
    dist.destroy_process_group()


def ddp_with(hook: Optional[Hook] = None) -> DistributedDataParallel:
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(8, 4))
    if hook is not None:
        ddp.register_comm_hook(hook, allreduce_hook)
    return ddp


def gradient_of(ddp: nn.Module, value: float) -> float:
    """Returns the gradient of the loss sum(weight x value): `value`, averaged over the ranks."""
    ddp.zero_grad()
    ddp(torch.full((1, 8), value)).sum().backward()
    return float(next(ddp.parameters()).grad[0, 0])  # type: ignore[index]


def mean(ranks: List[int]) -> float:
    return sum(ranks) / len(ranks)


def allreduce_follows_the_process_group() -> None:
    first, second, third = ports(3)

    def averaged(over: List[int]) -> None:
        got = float(gradwire.allreduce_(torch.full((3,), float(RANK)))[0])
        check(abs(got - mean(over)) < 1e-6, f"{got} is not the mean over ranks {over}")

    everybody = list(range(WORLD))
    averaged(everybody)
    destroy()
    start(first + RANK if RANK == WORLD - 1 else second, 0 if RANK == WORLD - 1 else RANK,
          1 if RANK == WORLD - 1 else WORLD - 1)
    averaged([RANK] if RANK == WORLD - 1 else everybody[:-1])
    destroy()
    start(third)
    averaged(everybody)
    say(f"allreduce_() averages over {WORLD} ranks, then {WORLD - 1} and 1, then {WORLD} again")


def allreduce_recovers_from_a_failure() -> None:
    gradwire.allreduce_(torch.ones(4))
    for _ in range(2):
        dist.barrier()  # A failure of the next call must not reach a rank in the previous call.
        refused(lambda: gradwire.allreduce_(torch.ones(4 + RANK)), gradwire.CommFailed)
        got = gradwire.allreduce_(torch.full((4,), float(RANK)))
        check(float(got[0]) == mean(list(range(WORLD))), f"after a failure: {got}")
    say("allreduce_() works again after CommFailed")


def a_failure_on_some_ranks_is_told_to_all() -> None:
    from gradwire import _allreduce
    [port] = ports(1)
    gradwire.allreduce_(torch.ones(4))
    dist.barrier()
    default = next(iter(_allreduce._defaults.values()))
    # Simulates a last call that failed on this rank only, when the other ranks already had their results.
    if RANK == 0:
        default._completed -= 1
        default._failed = True
    dist.barrier()
    default.communicator().abort("failed") if RANK != 0 else None
    if RANK != 0:
        refused(lambda: gradwire.allreduce_(torch.ones(4)), gradwire.CommFailed, "failed")
    refused(lambda: gradwire.allreduce_(torch.ones(4)), gradwire.CommFailed, "init_process_group()",
            "some of the ranks")
    destroy()
    start(port)
    gradwire.allreduce_(torch.ones(4))
    say("calls that belong to different steps are not averaged")


def a_hook_made_before_a_fork_works_in_it() -> None:
    inside, after = ports(2)
    destroy()
    unused = Hook("fp32", timeout_s=10)

    def child() -> None:
        start(inside)
        for step in range(2):
            got = gradient_of(ddp, float(RANK +
                                         step)) if step else gradient_of(ddp := ddp_with(unused), float(RANK))
            check(abs(got - mean(list(range(WORLD))) - step) < 1e-6, f"step {step}: {got}")
        unused.close()

    in_a_fork(child)
    start(after)
    ddp = ddp_with(unused)
    for _ in range(2):  # in the second step DDP communicates, which hangs in a fork
        check(
            gradient_of(ddp, float(RANK)) == mean(list(range(WORLD))),
            "the hook no longer works in the parent")

    def user() -> None:
        # Raised by the hook or, in some versions of PyTorch, earlier by autograd.
        refused(lambda: gradient_of(ddp, 1.0), Exception, "fork")
        refused(unused.check, gradwire.BadHandle, "fork")
        refused(unused.state_dict, gradwire.BadHandle, "fork")
        unused.close()

    in_a_fork(user)
    check(gradient_of(ddp, 1.0) == 1.0, "the hook no longer works after a fork")
    unused.close()
    say("a hook made before a fork works in it; one that was used before is refused in it, without a hang")


def a_fork_has_no_part_in_its_parents_group() -> None:
    gradwire.allreduce_(torch.ones(3))
    hook = Hook("fp32")
    gradient_of(ddp_with(hook), 1.0)
    in_a_fork(lambda: refused(lambda: gradwire.allreduce_(torch.ones(3)), gradwire.BadHandle,
                              "init_process_group()"))
    in_a_fork(lambda: check(signal.set_wakeup_fd(-1) == -1, "Ctrl-C in a fork interrupts the parent's step"))
    check(float(gradwire.allreduce_(torch.ones(3))[0]) == 1.0, "allreduce_ after a fork")
    hook.close()
    say("a fork is refused its parent's process group, and does not interrupt its parent")


def a_hook_ends_with_its_process_group() -> None:
    [port] = ports(1)
    hook = Hook("fp32")
    gradient_of(ddp_with(hook), 1.0)
    destroy()
    start(port)
    refused(lambda: gradient_of(ddp_with(hook), 1.0), Exception, "destroy_process_group()",
            "create another Hook")
    hook.close()
    say("a hook whose process group has ended is refused")


def a_hook_belongs_to_its_own_process_group() -> None:
    """Checks that a hook uses its model's process group, also without the argument process_group."""
    parts = [dist.new_group([rank]) for rank in range(WORLD)]
    torch.manual_seed(3)
    alone = DistributedDataParallel(nn.Linear(8, 4), process_group=parts[RANK])
    refused(lambda: Hook("fp32", model=alone, process_group=dist.group.WORLD), gradwire.BadArgument,
            "process_group")
    hook = Hook("fp32", model=alone)
    alone.register_comm_hook(hook, allreduce_hook)
    check(
        gradient_of(alone, float(RANK)) == RANK,
        "the hook averages over the ranks of another group than its model's")
    time.sleep(0.05)
    dist.destroy_process_group(parts[RANK])
    refused(lambda: gradient_of(alone, 1.0), Exception, "destroy_process_group()", "create another Hook")
    hook.close()
    say("a hook averages over its model's group, and is refused when that has ended")


def a_communicator_has_one_owner() -> None:
    comm = gradwire.torch.communicator(timeout_s=60)
    spare = comm.split(0)
    first = Hook("fp32", comm=comm)
    ddp = ddp_with(first)
    gradient_of(ddp, 1.0)
    refused(lambda: Hook("fp32", comm=comm), gradwire.BadArgument, "a Hook uses this communicator",
            "split(0)")
    refused(lambda: compress(ddp_with(), comm=comm), gradwire.BadArgument, "split(0)")
    refused(lambda: gradwire.allreduce_(torch.ones(3), comm=comm), gradwire.BadArgument, "split(0)")
    refused(lambda: gradwire.Reducer(comm, "fp32", [("w", 3, 1)]), gradwire.BadArgument, "split(0)")
    second = Hook("fp32", comm=spare)
    other = ddp_with(second)
    for step in range(5):
        check(
            gradient_of(ddp, float(step)) == step and gradient_of(other, float(step)) == step, f"step {step}")
    first.close()
    check(
        float(gradwire.allreduce_(torch.ones(3), comm=comm)[0]) == 1.0,
        "after close() the communicator is free")
    second.close()
    comm.close()
    spare.close()
    say("a second user of a hook's communicator is refused, with what to do")


def a_copied_model_is_compressed_by_compress() -> None:
    ddp = ddp_with()
    hook = compress(ddp, "int8:schedule=ring")
    gradient_of(ddp, 1.0)
    threads = threading.active_count()
    for times in range(3):
        copied = copy.deepcopy(ddp)
    check(threading.active_count() == threads,
          f"copies have started {threading.active_count() - threads} threads")
    ours = compress(copied, "int8:schedule=ring")
    refused(lambda: compress(copied), gradwire.BadArgument, "hook")
    gradient_of(copied, float(RANK))
    check(ours.stats()["steps"] == 1, f"the copy is not compressed: {ours.stats()}")
    check(gradient_of(ddp, 1.0) > 0 and hook.stats()["steps"] == 2, "the original is no longer compressed")
    ours.close()
    hook.close()
    check(threading.active_count() <= threads - 1, "close() left a thread")
    refused(hook.state_dict, gradwire.BadHandle, "before close()")
    again = compress(copy.deepcopy(ddp), "int8:schedule=ring")  # the closed hook is in DDP's list
    again.close()
    in_a_fork(lambda: check(copy.deepcopy(ddp) is not ddp, "no copy in a fork"))
    say("a deep copy of a compressed DDP can be compressed, and leaves no thread")


SCENARIOS: List[Callable[[], None]] = [
    allreduce_follows_the_process_group, allreduce_recovers_from_a_failure,
    a_failure_on_some_ranks_is_told_to_all, a_hook_made_before_a_fork_works_in_it,
    a_fork_has_no_part_in_its_parents_group, a_hook_ends_with_its_process_group,
    a_hook_belongs_to_its_own_process_group, a_communicator_has_one_owner,
    a_copied_model_is_compressed_by_compress
]
