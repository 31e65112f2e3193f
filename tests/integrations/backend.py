"""The suite of scenarios.py for torch.distributed on gradwire.torch.Backend: CPU."""
from __future__ import annotations

import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
import laws
from gradwire.torch import Backend, register_backend
from launch import in_a_fork
from rank import RANK, WORLD, check, refused
from scenarios import scenario
from training import flat

LARGE = 1 << 19  # floats: 2 MiB
RULES: Dict[str, str] = {"reduce_scatter": "int8", "all_gather": "bf16"}


def begin() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    register_backend("int8", **RULES)
    register_backend(None, name="exact")
    register_backend("int8", **RULES, min_bytes=1, name="small")
    dist.init_process_group("gradwire", timeout=timedelta(seconds=60))


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


def values(count: int = LARGE, rank: int = RANK) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def summed(count: int = LARGE, ranks: Any = range(WORLD)) -> torch.Tensor:
    return torch.stack([values(count, rank) for rank in ranks]).sum(0)


def small_group() -> Any:
    """Creates a group that compresses tensors of any size, except tensors of one element or other types."""
    return dist.new_group(backend="small")


def compresses(calls: int, what: str, call: Callable[[], Any], group: Any = None) -> Any:
    """Returns the result of `call`, in which the group must compress this number of calls."""
    group = group or dist.group.WORLD
    check(isinstance(group, Backend), f"the group is {group}")
    before = group.compressed
    result = call()
    check(group.compressed - before == calls, f"{what}: {group.compressed - before} calls were compressed")
    return result


def near(what: str, result: torch.Tensor, exact: torch.Tensor, lossy: bool = True) -> None:
    laws.near(what, result.double(), exact.double(), 0.05 if lossy else 1e-6, 1e-6 if lossy else 0)


@scenario()
def large_sums_are_compressed_and_nothing_else() -> None:
    for op, wanted in ((dist.ReduceOp.SUM, summed()), (dist.ReduceOp.AVG, summed() / WORLD)):
        own = values()
        check(compresses(1, f"{op}", lambda: dist.all_reduce(own, op)) is None, "a result of all_reduce")
        near(f"all_reduce {op}", own, wanted)
        laws.ranks_agree(f"all_reduce {op}", own.numpy())
    columns, halves, own = values().view(2, -1).t(), values().bfloat16(), values()
    for tensor, exact in ((columns, summed().view(2, -1).t()), (halves, summed())):
        compresses(1, "a transposed tensor, or bfloat16", lambda: dist.all_reduce(tensor))
        near("a transposed tensor, or bfloat16", tensor, exact)
    compresses(1, "all_reduce_coalesced", lambda: dist.all_reduce_coalesced([own]))
    near("all_reduce_coalesced", own, summed())
    small, largest = values(1000), values()
    compresses(0, "a small tensor", lambda: dist.all_reduce(small))
    near("a small tensor", small, summed(1000), lossy=False)
    compresses(0, "a maximum", lambda: dist.all_reduce(largest, dist.ReduceOp.MAX))
    check(torch.equal(largest, torch.stack([values(rank=r) for r in range(WORLD)]).amax(0)), "the maximum")
    compresses(0, "messages", messages)
    # pytorch_suite.py checks the results of these calls.
    inherited = [name for name in (
        "broadcast", "reduce", "gather", "scatter", "alltoall", "all_to_all_single", "barrier", "send",
        "recv", "recv_anysource", "allreduce", "allgather", "reduce_scatter", "allreduce_coalesced")
        if getattr(Backend, name) is getattr(dist.ProcessGroup, name)]
    check(not inherited, f"inherited, and so with Python's lock held: {inherited}")


def messages() -> None:
    sent = values()
    dist.broadcast(sent, WORLD - 1)
    check(torch.equal(sent, values(rank=WORLD - 1)), "the broadcast")
    if RANK == 0:
        dist.send(values(), 1)
    elif RANK == 1:
        check(dist.recv(sent) == 0 and torch.equal(sent, values(rank=0)), "a message from any rank")
    exchanged = torch.empty(WORLD)
    dist.all_to_all_single(exchanged, torch.full((WORLD,), float(RANK)))
    check(exchanged.tolist() == list(range(WORLD)), f"{exchanged}")


@scenario()
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
        check(total[0] == WORLD and sent[0] == 0 and gathered[-1][0] == WORLD - 1, f"{total} {gathered}")


@scenario()
def work_is_done_when_it_says_so() -> None:
    tensors = [values() for _ in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors[:3]]
    if RANK == 0:
        dist.barrier()  # Gloo's calls do not wait for running calls
    works.append(dist.all_reduce(tensors[3], async_op=True))
    if RANK > 0:
        dist.barrier()
    seen: List[torch.Tensor] = []
    future = works[1].get_future().then(lambda f: seen.append(f.value()[0].clone()))
    for work, tensor in zip(works, tensors):
        check(work.wait() is True and work.is_completed() and work.is_success() and work.exception() is None,
              "done")
        check(work.get_future().value()[0] is tensor and work.result()[0] is tensor, "its tensor")
        near("an asynchronous sum", tensor, summed())
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


@scenario()
def shards_are_compressed() -> None:
    """Checks reduce_scatter and all_gather, of tensors and of lists: the halves of an all_reduce."""
    output, gathered = torch.empty(LARGE // WORLD), torch.empty(LARGE)
    compresses(1, "reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(output, values()))
    near("reduce_scatter_tensor", output, summed().chunk(WORLD)[RANK])
    compresses(1, "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(gathered, output))
    near("all_gather_into_tensor", gathered, summed())
    laws.ranks_agree("all_gather_into_tensor", gathered.numpy())
    sizes = [LARGE + 1000 * r for r in range(WORLD)]
    own = torch.empty(sizes[RANK])
    compresses(1, "uneven parts", lambda: dist.reduce_scatter(own, list(values(sum(sizes)).split(sizes))))
    near("reduce_scatter", own, summed(sum(sizes)).split(sizes)[RANK])
    outputs, small = [torch.empty(2, LARGE // 2) for _ in range(WORLD)], torch.empty(4)
    compresses(1, "all_gather", lambda: dist.all_gather(outputs, values().view(2, -1)))
    for rank, output in enumerate(outputs):
        near(f"all_gather from rank {rank}", output, values(rank=rank).view(2, -1))
    compresses(0, "a small one", lambda: dist.reduce_scatter(small, list(torch.ones(4 * WORLD).split(4))))
    check(small.tolist() == [WORLD] * 4, f"{small}")
    compresses(0, "a small one", lambda: dist.all_gather([torch.empty(4) for _ in range(WORLD)], small))


@scenario()
def functional_collectives_and_dtensors_are_compressed() -> None:
    world = dist.group.WORLD
    calls: List[Tuple[Callable[[], Any], Any]] = [
        (lambda: functional.all_reduce(values(), "sum", world), summed()),
        (lambda: functional.reduce_scatter_tensor(values(), "sum", 0, world), summed().chunk(WORLD)[RANK]),
        (lambda: functional.all_gather_tensor(values(), 0, world),
         torch.cat([values(rank=r) for r in range(WORLD)]))]
    for number, (call, wanted) in enumerate(calls):
        near(f"call {number}", compresses(1, "a call", lambda: functional.wait_tensor(call())), wanted)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(2 * x, "sum", world) + 1

    near("compiled", compresses(1, "compiled", lambda: compiled(values())), 2 * summed() + 1)
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = values(rank=0).view(1024, -1)
    sharded = DTensor.from_local(whole.chunk(WORLD)[RANK], mesh, [Shard(0)])
    near("a DTensor", compresses(1, "a DTensor's all-gather", sharded.full_tensor), whole)
    product = sharded.redistribute(mesh, [Replicate()]).t() @ sharded  # partial sums
    near("a product of DTensors", product.full_tensor(), whole.t() @ whole)


def model(width: int = 512) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 32),
                         nn.Linear(32, width))


def train(step: Any, optimizer: Any, steps: int = 4, width: int = 512) -> float:
    """Trains `step`: a model, or a function of it. Returns the last loss."""
    generator = torch.Generator().manual_seed(RANK)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(16, width, generator=generator)
        optimizer.zero_grad()
        loss = (step(x) - 2 * x).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def sgd(net: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr)


def as_over_gloo(what: str, trained: torch.Tensor, wanted: torch.Tensor, width: int, most: float = 0.05,
                 agree: bool = True) -> None:
    """Checks that weights are near those trained over Gloo, relative to the change by training."""
    laws.near(what, trained, wanted, most, 1e-9, scale=wanted - flat(model(width)))
    if agree:
        laws.ranks_agree(f"{what}: the model", trained.numpy())


@scenario()
def ddp_zero_and_fsdp2_train_as_over_gloo() -> None:
    plain = DistributedDataParallel(model(), process_group=dist.new_group(backend="gloo"))
    wanted = train(plain, sgd(plain))
    for what in ("DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard"):
        before, net = dist.group.WORLD.compressed, model()
        if what == "fully_shard":
            net = fully_shard(net)
            loss = train(net, sgd(net))
            # The backend gathers these weights in bfloat16. The limit is therefore larger.
            whole = torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])
            as_over_gloo(what, whole, flat(plain), 512, 0.4)
        else:
            ddp = DistributedDataParallel(net, bucket_cap_mb=0.25)  # large and small buckets
            loss = train(ddp, sgd(ddp) if what == "DistributedDataParallel" else ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, lr=1.0))
            as_over_gloo(what, flat(ddp), flat(plain), 512, 0.1)
        check(dist.group.WORLD.compressed - before >= 4, f"{what}: too few calls were compressed in 4 steps")
        check(abs(loss - wanted) < 0.02 * wanted, f"{what}: loss {loss}, not {wanted}")


@scenario()
def compiled_models_hooks_and_uneven_inputs_train_as_over_gloo() -> None:
    gloo, small = dist.new_group(backend="gloo"), small_group()
    one = torch.ones(1)  # join() counts ranks
    compresses(0, "one number", lambda: dist.all_reduce(one, group=small, async_op=True).wait(), small)
    check(float(one) == WORLD, "the sum of one number")

    def ddp_of(group: Any, net: Any = None) -> DistributedDataParallel:
        return DistributedDataParallel(model(64) if net is None else net, process_group=group)

    plain = ddp_of(gloo)
    train(plain, sgd(plain, 0.1), width=64)
    wraps: Dict[str, Callable[[nn.Module], Any]] = {
        "compiled around": lambda m: torch.compile(ddp_of(small, m), backend="aot_eager"),
        "compiled inside": lambda m: ddp_of(small, torch.compile(m, backend="aot_eager")),
        "without the optimizer for DDP": lambda m: torch.compile(ddp_of(small, m), backend="aot_eager")}
    for what, wrap in wraps.items():
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = "without" not in what
        before, net = small.compressed, model(64)
        train(wrap(net), sgd(net, 0.1), width=64)
        check(small.compressed > before, f"{what}: nothing was compressed")
        as_over_gloo(what, flat(net), flat(plain), 64)
    torch._dynamo.config.optimize_ddp = True

    def with_hook(group: Any, state: Callable[[Any], Any], hook: Any) -> torch.Tensor:
        ddp = ddp_of(group)
        ddp.register_comm_hook(state(group), hook)
        train(ddp, sgd(ddp, 0.1), width=64)
        return flat(ddp)

    def joined(group: Any, static: bool) -> torch.Tensor:
        ddp = ddp_of(group)
        with ddp.join(divide_by_initial_world_size=static):
            train(ddp, sgd(ddp, 0.1), steps=2 * RANK, width=64)  # rank 0 has no inputs
        return flat(ddp)

    hooks: List[Tuple[Callable[[Any], Any], Any]] = [
        (lambda group: group, default_hooks.allreduce_hook),
        (lambda group: group, default_hooks.bf16_compress_hook),
        (lambda group: group, quantization_hooks.quantization_pertensor_hook),
        (lambda group: powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2),
         powerSGD_hook.powerSGD_hook)]  # its callbacks start sums and wait for them
    for state, hook in hooks:
        as_over_gloo(hook.__name__, with_hook(small, state, hook), with_hook(gloo, state, hook), 64, 0.1)
    for static in (True, False):
        as_over_gloo(f"join, {static}", joined(small, static), joined(gloo, static), 64)


@scenario(2)
def the_profiler_shows_calls() -> None:
    small = small_group()
    own, whole = torch.ones(WORLD * 6), torch.empty(WORLD * WORLD * 6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(own, group=small)
        dist.reduce_scatter_tensor(torch.empty(6), own, group=small)
        dist.all_gather_into_tensor(whole, own, group=small)
    names = [event.name for event in profile.events() if event.name.startswith("gradwire ")]
    calls = ("int8: all_reduce", WORLD * 24), ("int8: reduce_scatter", WORLD * 24), (
        "bf16: all_gather", WORLD * WORLD * 24)
    check(names == [f"gradwire {call}, {size} bytes" for call, size in calls], f"ranges: {names}")


@scenario()
def groups_have_rules_of_their_own_and_end() -> None:
    ranks = list(range(1, WORLD)) if WORLD > 2 else [0, 1]
    default, exact = dist.new_group(ranks), dist.new_group(ranks, backend="exact")
    if RANK in ranks:
        for part, calls in ((default, 1), (exact, 0)):
            own = values()
            compresses(calls, "a group's sum", lambda: dist.all_reduce(own, group=part), part)
            near("a group's sum", own, summed(ranks=ranks), calls > 0)
        check((dist.get_backend(exact), dist.get_backend(default)) == ("exact", "gradwire"), "names")
        dist.destroy_process_group(default)
        refused(lambda: default.allreduce(values()).wait(), gradwire.BadHandle, "new_group()")
    dist.barrier()
    for wrong in ("int3", "powersgd:rank=2"):
        refused(lambda: register_backend(wrong, name="wrong"), gradwire.BadArgument)


@scenario()
def a_fork_is_refused_its_parents_group() -> None:
    """Checks groups for which the parent has created a communicator, and groups for which it has not.

    A group without a communicator would use the store, which belongs to the parent.
    """
    unused = dist.new_group(list(range(WORLD)))
    dist.all_reduce(values())
    in_a_fork(lambda: [refused(lambda: dist.all_reduce(values(), group=part), gradwire.BadHandle,
                               "init_process_group() in this process") for part in (None, unused)])
    dist.barrier()
    dist.all_reduce(values(), group=unused)


@scenario(2, 4, ends=True)
def a_process_may_end_without_leaving_the_group() -> None:
    waited = dist.all_reduce(values(), async_op=True)
    # The backend's thread, in PyTorch's code, requests the GIL every millisecond while Python exits.
    waited.get_future().then(lambda _: [time.sleep(0.001) for _ in range(1000)])
    waited._finished.wait()  # type: ignore[attr-defined]
    sys.exit(0)


@scenario(2, 4, ends=True)
def a_dead_peer_is_named_by_every_kind_of_call() -> None:
    dist.all_reduce(values())
    if RANK < WORLD - 1:
        world = dist.group.WORLD
        for call in (lambda: dist.all_reduce(values()),
                     lambda: dist.all_reduce(values(), async_op=True).get_future().wait(),
                     lambda: functional.wait_tensor(functional.all_reduce(values(), "sum", world))):
            refused(call, RuntimeError, f"rank {WORLD - 1}")
    os._exit(0)  # without leaving the group; Gloo's destructor would wait for the dead rank


COUNT = 4096  # elements; divisible by the number of ranks
ALL = "all_reduce reduce_scatter all_gather"


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(RANK)
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=generator)
    found = torch.randn(*shape, generator=generator)
    if dtype == torch.bool:
        return found > 0
    return found.to(dtype) if dtype.is_floating_point else (10 * found).abs().to(dtype)


def floats(*shape: int) -> torch.Tensor:
    return numbers(torch.float32, *shape)


# A tensor, and the operations that compress it.
CASES: Dict[str, Tuple[Callable[[], torch.Tensor], str]] = {
    **{str(dtype): (lambda dtype=dtype: numbers(dtype, COUNT), compressed)  # type: ignore[misc]
       for dtype, compressed in (
           (torch.float32, ALL), (torch.bfloat16, ALL), (torch.float16, ALL), (torch.float64, ""),
           (torch.int8, ""), (torch.uint8, ""), (torch.int16, ""), (torch.int32, ""), (torch.int64, ""),
           (torch.bool, ""), (torch.complex64, "all_reduce all_gather"),  # PyTorch passes pairs of float32
           (torch.complex128, ""))},
    "float8": (lambda: floats(COUNT).to(torch.float8_e4m3fn), ""),
    "quantized": (lambda: torch.quantize_per_tensor(floats(COUNT), 0.1, 0, torch.qint8), ""),
    "transposed": (lambda: floats(64, COUNT // 64).t(), ALL),
    "strided": (lambda: floats(COUNT, 2)[:, 0], ALL),
    "channels_last": (lambda: floats(4, COUNT // 64, 4, 4).to(memory_format=torch.channels_last), ALL),
    "0-dim": (lambda: floats(1)[0], ""),
    "one element": (lambda: floats(1), ""),
    "empty": (lambda: floats(0), ""),
    "expanded": (lambda: floats(1, COUNT // 4).expand(4, COUNT // 4), ALL),
    "requires_grad": (lambda: floats(COUNT).requires_grad_(), ALL),
    "negated view": (lambda: torch._neg_view(floats(COUNT)), ALL),
    "sparse": (lambda: torch.eye(64).to_sparse() * (RANK + 1), ""),
    "nested": (lambda: torch.nested.nested_tensor([floats(4), floats(8)], layout=torch.jagged), ""),
}
# Gloo refuses these layouts, or uses their memory order. Contiguous copies are the reference.
OWN_REFERENCE = ("transposed", "strided", "channels_last", "expanded", "negated view", "requires_grad")


def outcome(operation: str, tensor: torch.Tensor, group: Any) -> Any:
    """Returns the dense result of an operation, or the text of its error."""
    def zeros(rows: int) -> torch.Tensor:
        return torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)

    rows = tensor.shape[:1].numel()
    try:
        if operation == "all_reduce":
            dist.all_reduce(tensor, group=group)
            return dense(tensor.detach())
        output = zeros(rows // WORLD if operation == "reduce_scatter" else rows * WORLD)
        call = dist.reduce_scatter_tensor if operation == "reduce_scatter" else dist.all_gather_into_tensor
        call(output, tensor, group=group)
        return dense(output)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        return tensor.values()
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense().resolve_neg().contiguous()


@scenario()
def every_type_and_layout_is_compressed_or_as_with_gloo() -> None:
    small, gloo = small_group(), dist.new_group(backend="gloo")
    for name, (make, compressed) in CASES.items():
        for operation in ALL.split():
            if (name, operation) == ("0-dim", "reduce_scatter"):
                continue  # ends the process in Gloo
            what, wanted = f"{operation} of {name}", operation in compressed.split()
            ours = compresses(wanted, what, lambda: outcome(operation, make(), small), small)
            reference = dense(make().detach()) if name in OWN_REFERENCE else make()
            theirs = outcome(operation, reference, gloo)
            if isinstance(ours, str) or isinstance(theirs, str):
                overlaps = (name, operation) == ("expanded", "all_reduce")
                check(type(ours) is type(theirs) or overlaps, f"{what}: {ours}, with Gloo {theirs}")
                continue
            same = (ours.dtype, ours.numel()) == (theirs.dtype, theirs.numel())
            check(same, f"{what}: {ours}, not {theirs}")
            if wanted:
                a, b = (t.flatten().to(torch.complex128) for t in (ours, theirs))
                least = 0.0 if "16" in name else 1e-9
                laws.near(what, a, b, 0.05, least)
            else:
                check(torch.equal(ours.flatten(), theirs.flatten()), f"{what}: {ours}, with Gloo {theirs}")
