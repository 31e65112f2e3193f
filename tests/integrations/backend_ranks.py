"""Runs one rank of the backend's tests, for backend_test.py.

Every rank runs the scenarios named on the command line, in order. A failed check ends the rank, and so the
test.
"""
from __future__ import annotations

import faulthandler
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
import backend_ddp
import backend_types
from launch import chosen, in_a_fork
from rank import RANK, WORLD, check, refused, say
from gradwire.torch import Backend, register_backend

LARGE = 1 << 19  # floats: 2 MiB


def values(count: int = LARGE, rank: int = RANK) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def group() -> Backend:
    world = dist.group.WORLD
    check(isinstance(world, Backend), f"the default group is {world}")
    return world  # type: ignore[return-value]


def same_everywhere(tensor: torch.Tensor, what: str) -> None:
    everybody: List[Any] = [None] * WORLD
    dist.all_gather_object(everybody, tensor)
    check(all(torch.equal(everybody[0], other) for other in everybody), f"{what} differs between ranks")


class Compressed:
    """Checks how many calls in its block were compressed."""

    def __init__(self, calls: int, what: str) -> None:
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        self._before = group().compressed

    def __exit__(self, failed: Any, *_: object) -> None:
        if failed is None:
            calls = group().compressed - self._before
            check(calls == self._calls, f"{self._what}: {calls} calls were compressed, not {self._calls}")


def near(result: torch.Tensor, exact: torch.Tensor, what: str, lossy: bool = True) -> None:
    error = float((result.double() - exact.double()).norm() / exact.double().norm())
    check(error < 0.05 if lossy else error < 1e-6, f"{what} is {error:.1e} off")
    check(not lossy or error > 1e-6, f"{what} is {error:.1e} off: not compressed")


def large_sums_are_compressed_and_nothing_else() -> None:
    exact = torch.stack([values(rank=r) for r in range(WORLD)]).sum(0)
    for op, wanted in ((dist.ReduceOp.SUM, exact), (dist.ReduceOp.AVG, exact / WORLD)):
        own = values()
        with Compressed(1, f"a large tensor, {op}"):
            check(dist.all_reduce(own, op) is None, "a synchronous call returned something")
        near(own, wanted, f"all_reduce {op}")
        same_everywhere(own, f"all_reduce {op}")
    own = values()
    with Compressed(1, "one tensor of all_reduce_coalesced"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced([own])
    near(own, exact, "all_reduce_coalesced")
    columns = values().view(2, -1).t()
    with Compressed(1, "a transposed tensor"):
        dist.all_reduce(columns)
    near(columns, exact.view(2, -1).t(), "all_reduce of a transposed tensor")
    halves = values().bfloat16()
    with Compressed(1, "bfloat16"):
        dist.all_reduce(halves)
    near(halves, exact, "all_reduce of bfloat16")
    with Compressed(0, "a small tensor, a maximum, other types, broadcasts and objects"):
        small = values(1000)
        dist.all_reduce(small)
        near(small,
             torch.stack([values(1000, r) for r in range(WORLD)]).sum(0), "a small tensor", lossy=False)
        largest = values()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        check(torch.equal(largest,
                          torch.stack([values(rank=r) for r in range(WORLD)]).amax(0)), "the maximum")
        for dtype in (torch.float64, torch.int64):
            counted = torch.full((LARGE,), RANK, dtype=dtype)
            dist.all_reduce(counted)
            check(bool((counted == WORLD * (WORLD - 1) // 2).all()), f"the sum of {dtype}")
        sent = values()
        dist.broadcast(sent, WORLD - 1)
        check(torch.equal(sent, values(rank=WORLD - 1)), "the broadcast")
        if RANK == 0:
            dist.send(values(), 1)
        elif RANK == 1:
            check(dist.recv(sent) == 0 and torch.equal(sent, values(rank=0)), "a message from any rank")
        dist.barrier()
        other_collectives()
    say(
        "sums and averages of large float32 and bfloat16 tensors are compressed, the same bits everywhere;"
        " all else is Gloo's"
    )


def other_collectives() -> None:
    """Makes every call that the backend forwards to Gloo, and checks that no call is inherited."""
    own, n = torch.full((WORLD,), float(RANK)), WORLD * (WORLD - 1) / 2
    total = own.clone()
    dist.reduce(total, 0)
    check(RANK > 0 or total.tolist() == [n] * WORLD, f"reduce: {total}")
    parts = [torch.empty(WORLD) for _ in range(WORLD)]
    dist.gather(own, parts if RANK == 0 else None, 0)
    check(RANK > 0 or [int(p[0]) for p in parts] == list(range(WORLD)), f"gather: {parts}")
    mine = torch.empty(1)
    dist.scatter(mine, list(torch.arange(float(WORLD)).split(1)) if RANK == 0 else None, 0)
    check(mine.item() == RANK, f"scatter: {mine}")
    exchanged = torch.empty(WORLD)
    dist.all_to_all_single(exchanged, own)
    check(exchanged.tolist() == list(range(WORLD)), f"all_to_all_single: {exchanged}")
    pieces = [torch.empty(1) for _ in range(WORLD)]
    dist.all_to_all(pieces, list(own.split(1)))
    check(torch.cat(pieces).tolist() == list(range(WORLD)), f"all_to_all: {pieces}")
    two = [own.clone(), own.clone()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(two)
    check([t[0].item() for t in two] == [n, n], f"all_reduce_coalesced: {two}")
    called = [
        name for name in ("broadcast", "reduce", "gather", "scatter", "alltoall", "all_to_all_single",
                          "barrier", "send", "recv", "recv_anysource", "allreduce", "allgather",
                          "reduce_scatter", "allreduce_coalesced")
        if getattr(Backend, name) is getattr(dist.ProcessGroup, name)
    ]
    check(not called, f"inherited, and so with Python's lock held: {called}")


def many_calls_at_once_do_not_deadlock() -> None:
    """Makes 500 rounds of three calls at once.

    An inherited broadcast() makes four ranks hang within a thousand rounds: see _gloos() of backend.py.
    """
    for step in range(500):
        gathered = [torch.empty(5) for _ in range(WORLD)]
        total, sent = torch.ones(10), torch.full((10,), float(RANK))
        works = [dist.all_reduce(total, async_op=True), dist.broadcast(sent, 0, async_op=True),
                 dist.all_gather(gathered, torch.full((5,), float(RANK)), async_op=True)]
        if step % 3 == 0:
            dist.broadcast(torch.ones(10), 0)
        for work in works:
            work.wait()
        check(total[0] == WORLD and sent[0] == 0 and gathered[-1][0] == WORLD - 1,
              f"{total}, {sent}, {gathered}")
    say("2000 calls of Gloo's, three at once")


def work_is_done_when_it_says_so() -> None:
    exact = torch.stack([values(rank=r) for r in range(WORLD)]).sum(0)
    tensors = [values() for _ in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors[:3]]
    if RANK == 0:
        dist.barrier()  # Gloo's calls do not wait for running calls
        late = dist.all_reduce(tensors[3], async_op=True)
    else:
        dist.barrier()
        late = dist.all_reduce(tensors[3], async_op=True)
    seen: List[torch.Tensor] = []
    future = works[1].get_future().then(lambda f: seen.append(f.value()[0].clone()))
    for work, tensor in zip([*works, late], tensors):
        check(work.wait() is True and work.is_completed() and work.is_success() and work.exception() is None,
              "done")
        check(work.get_future().value()[0] is tensor and work.result()[0] is tensor, "its tensor")
        near(tensor, exact, "an asynchronous sum")
    future.wait()
    check(torch.equal(seen[0], tensors[1]), "a callback of the future saw another sum")
    dist.barrier()
    if RANK == 0:
        # The other ranks make the call only after wait() has timed out on rank 0.
        alone = dist.all_reduce(tensors[0], async_op=True)
        check(not alone.is_completed(), "done before the others have come")
        refused(alone.result, RuntimeError, "wait()")
        refused(lambda: alone.wait(timedelta(seconds=0.2)), gradwire.CommFailed, "0.2 s")
        dist.barrier()
        alone.wait()
    else:
        dist.barrier()
        dist.all_reduce(tensors[0])
    say("asynchronous calls: wait(), its limit, futures and their callbacks")


def shards() -> None:
    exact = torch.stack([values(rank=r) for r in range(WORLD)]).sum(0)
    chunk = exact.chunk(WORLD)[RANK]
    output = torch.empty(LARGE // WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.15 renames these two functions; 2.14 does not
        with Compressed(1, "reduce_scatter_tensor"):
            dist.reduce_scatter_tensor(output, values())
        near(output, chunk, "reduce_scatter_tensor")
        gathered = torch.empty(LARGE)
        with Compressed(1, "all_gather_into_tensor"):
            dist.all_gather_into_tensor(gathered, output)
        near(gathered, exact, "all_gather_into_tensor")
    same_everywhere(gathered, "all_gather_into_tensor")
    sizes = [LARGE + 1000 * r for r in range(WORLD)]
    parts = list(values(sum(sizes)).split(sizes))
    own = torch.empty(sizes[RANK])
    with Compressed(1, "reduce_scatter of uneven parts"):
        dist.reduce_scatter(own, parts)
    near(own,
         torch.stack([values(sum(sizes), r) for r in range(WORLD)]).sum(0).split(sizes)[RANK],
         "reduce_scatter")
    outputs = [torch.empty(2, LARGE // 2) for _ in range(WORLD)]
    with Compressed(1, "all_gather"):
        dist.all_gather(outputs, values().view(2, -1))
    for r, output in enumerate(outputs):
        near(output, values(rank=r).view(2, -1), f"all_gather from rank {r}")
    with Compressed(0, "small ones"):
        small = torch.empty(4)
        dist.reduce_scatter(small, list(torch.ones(4 * WORLD).split(4)))
        check(small.tolist() == [WORLD] * 4, f"{small}")
        dist.all_gather([torch.empty(4) for _ in range(WORLD)], small)
    say("reduce_scatter and all_gather, of tensors and of lists")


def functional_collectives_and_dtensors() -> None:
    exact = torch.stack([values(rank=r) for r in range(WORLD)]).sum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, call, wanted in (
            ("all_reduce", lambda: functional.all_reduce(values(), "sum", dist.group.WORLD), exact),
            ("reduce_scatter", lambda: functional.reduce_scatter_tensor(values(), "sum", 0, dist.group.WORLD),
             exact.chunk(WORLD)[RANK]), ("all_gather",
                                         lambda: functional.all_gather_tensor(values(), 0, dist.group.WORLD),
                                         torch.cat([values(rank=r) for r in range(WORLD)]))):
            with Compressed(1, f"functional {what}"):
                near(functional.wait_tensor(call()), wanted, f"functional {what}")

        @torch.compile(backend="aot_eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(2 * x, "sum", dist.group.WORLD) + 1

        with Compressed(1, "compiled"):
            near(compiled(values()), 2 * exact + 1, "compiled")
        mesh = init_device_mesh("cpu", (WORLD,))
        whole = values(rank=0).view(1024, -1)
        sharded = DTensor.from_local(whole.chunk(WORLD)[RANK], mesh, [Shard(0)])
        with Compressed(1, "a DTensor's all-gather"):
            near(sharded.full_tensor(), whole, "a DTensor, gathered")
        product = sharded.redistribute(mesh, [Replicate()]).t() @ sharded  # partial sums
        near(product.full_tensor(), whole.t() @ whole, "a product of DTensors")
    say("functional collectives, eager and compiled; DTensor")


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 32), nn.ReLU(),
                         nn.Linear(32, 512))


def train(net: nn.Module, optimizer: Any, steps: int = 4) -> float:
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        x = torch.randn(16, 512, generator=generator)
        optimizer.zero_grad()
        loss = (net(x) - 2 * x).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def whoever_calls_torch_distributed() -> None:
    def off(trained: torch.Tensor) -> float:
        """Returns the distance from the weights trained over Gloo, relative to the change by training."""
        return float((trained - flat(plain)).norm() / (flat(plain) - flat(model())).norm())

    gloo = dist.new_group(backend="gloo")
    plain = DistributedDataParallel(model(), process_group=gloo)
    wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=5.0))
    losses: Dict[str, float] = {}
    for name in ("DistributedDataParallel", "ZeroRedundancyOptimizer"):
        before = group().compressed
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.25)  # large and small buckets
        optimizer = torch.optim.SGD(ddp.parameters(), lr=5.0) if name == "DistributedDataParallel" else \
            ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=5.0)
        losses[name] = train(ddp, optimizer)
        check(group().compressed - before >= 4,
              f"{name}: {group().compressed - before} calls were compressed in 4 steps")
        same_everywhere(flat(ddp), f"{name}: the model")
        check(1e-6 < off(flat(ddp)) < 0.1, f"{name}: weights are {off(flat(ddp)):.1e} off")
    before = group().compressed
    sharded = model()
    fully_shard(sharded)
    losses["fully_shard"] = train(sharded, torch.optim.SGD(sharded.parameters(), lr=5.0))
    check(group().compressed - before >= 8,
          f"fully_shard: {group().compressed - before} calls were compressed in 4 steps")
    # The backend gathers the weights of fully_shard() in bfloat16. Its limit is therefore larger.
    whole = torch.cat([p.full_tensor().detach().flatten()
                       for p in sharded.parameters()])  # type: ignore[attr-defined]
    check(1e-6 < off(whole) < 0.4, f"fully_shard: weights are {off(whole):.1e} off")
    for name, loss in losses.items():
        check(abs(loss - wanted) < 0.02 * wanted, f"{name}: loss {loss}, not {wanted}")
    say(f"loss {wanted:.4f} with Gloo; " + ", ".join(f"{loss:.4f} with {name}"
                                                     for name, loss in losses.items()))


def groups_have_rules_of_their_own() -> None:
    ranks = list(range(1, WORLD)) if WORLD > 2 else [0, 1]
    default, exact = dist.new_group(ranks), dist.new_group(ranks, backend="exact")
    if RANK in ranks:
        for part, calls, lossy in ((default, 1, True), (exact, 0, False)):
            own = values()
            dist.all_reduce(own, group=part)
            near(own, torch.stack([values(rank=r) for r in ranks]).sum(0), "a group's sum", lossy)
            check(part.compressed == calls, f"{part.compressed} calls were compressed")
        check(
            dist.get_backend(exact) == "exact" and dist.get_backend(default) == "gradwire",
            "names of backends")
        dist.destroy_process_group(default)
        refused(lambda: default.allreduce(values()).wait(), gradwire.BadHandle, "new_group()")
    dist.barrier()
    for wrong in ("int3", "powersgd:rank=2"):
        refused(lambda: register_backend(wrong, name="wrong"), gradwire.BadArgument)
    say("groups of some ranks, with the default's rule or another; formats that don't fit are refused")


def a_fork_is_refused_its_parents_group() -> None:
    """Checks groups for which the parent has created a communicator, and groups for which it has not.

    A group without a communicator would use the store, which belongs to the parent.
    """
    unused = dist.new_group(list(range(WORLD)))
    dist.all_reduce(values())

    def child() -> None:
        for part in (None, unused):
            refused(lambda: dist.all_reduce(values(), group=part), gradwire.BadHandle,
                    "init_process_group() in this process")

    in_a_fork(child)
    dist.barrier()
    dist.all_reduce(values(), group=unused)
    say("a fork is refused its parent's process group, at once")


def a_process_may_end_without_leaving_the_group() -> None:
    waited = dist.all_reduce(values(), async_op=True)
    # The backend's thread, in PyTorch's code, requests the GIL every millisecond while Python exits.
    waited.get_future().then(lambda _: [time.sleep(0.001) for _ in range(1000)])
    waited._finished.wait()  # type: ignore[attr-defined]
    say("the process ends now")
    sys.exit(0)


def a_dead_peer_raises() -> None:
    dist.all_reduce(values())
    if RANK == WORLD - 1:
        os._exit(0)  # without leaving the group
    for call in (lambda: dist.all_reduce(values()),
                 lambda: dist.all_reduce(values(), async_op=True).get_future().wait(),
                 lambda: functional.wait_tensor(functional.all_reduce(values(), "sum", dist.group.WORLD))):
        refused(call, RuntimeError, f"rank {WORLD - 1}")
    say("a dead rank is named by every kind of call")
    os._exit(0)  # Gloo's destructor would wait for the dead rank


SCENARIOS: List[Callable[[], None]] = [
    large_sums_are_compressed_and_nothing_else, many_calls_at_once_do_not_deadlock,
    work_is_done_when_it_says_so, shards, functional_collectives_and_dtensors,
    whoever_calls_torch_distributed, groups_have_rules_of_their_own, a_fork_is_refused_its_parents_group,
    a_process_may_end_without_leaving_the_group, a_dead_peer_raises, *backend_ddp.SCENARIOS,
    *backend_types.SCENARIOS
]


def main() -> None:
    faulthandler.dump_traceback_later(380, exit=True)  # shows where a hang occurs
    torch.set_num_threads(1)
    register_backend("int8", reduce_scatter="int8", all_gather="bf16")
    register_backend(None, name="exact")
    dist.init_process_group("gradwire", timeout=timedelta(seconds=60))
    for scenario in chosen(SCENARIOS):
        scenario()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
