"""Scenarios of the DDP hook: the models that compress() takes, finds or refuses, and every parameter's type."""
from __future__ import annotations

import copy
from types import SimpleNamespace as Namespace
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch
import laws
from gradwire.torch import Hook, allreduce_hook, compress
from rank import RANK, WORLD, check, refused, say
from scenarios import scenario
from training import TODAY, closing, ddp_of, flat, small, train

BAD = gradwire.BadArgument


@scenario()
def one_line_is_the_hook() -> None:
    ddp, shorter = ddp_of(small()), ddp_of(small())
    spec = "int8:schedule=ring"  # schedule=auto could choose differently for each run
    with closing(Hook(spec, model=ddp), compress(shorter, spec)) as (hook, ours):
        ddp.register_comm_hook(hook, allreduce_hook)
        check(torch.equal(train(ddp), train(shorter)), "compress() trains other weights than its hook")
        laws.ranks_agree("the model", flat(ddp).numpy())
        check(names_of(ours) == {name for name, _ in small().named_parameters()}, f"{names_of(ours)}")
        check(ours.stats()["wire_bytes"] < ours.stats()["dense_bytes"] / 2, f"{ours.stats()}")
        check(ours.ranks == list(range(WORLD)), "hook.ranks without min_ranks")


def names_of(hook: Hook) -> Any:
    return set(hook.state_dict(gather=False)["tensors"])


@scenario(4)
def a_hook_averages_over_the_models_own_group() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = ddp_of(small(), process_group=pairs[RANK % 2])
    with closing(compress(ddp, "fp32")):
        mine = train(ddp, 1)
        equal = [torch.equal(mine, other) for other in laws.of_all_ranks(mine)]
        check(equal == [rank % 2 == RANK % 2 for rank in range(WORLD)], f"same weights as ranks {equal}")


@scenario()
def compiled_models_keep_their_names() -> None:
    if not TODAY:
        return
    wanted = train(ddp_of(small()))
    for wrap in (lambda m: torch.compile(ddp_of(m), backend="aot_eager"),
                 lambda m: ddp_of(torch.compile(m, backend="aot_eager"))):
        compiled = wrap(small())
        with closing(compress(compiled, "fp32")) as hook:
            laws.near("compiled weights", train(compiled), wanted, 1e-6)
            check(names_of(hook) == {name for name, _ in small().named_parameters()}, f"{names_of(hook)}")


@scenario()
def compress_finds_the_one_ddp() -> None:
    holders: List[Callable[[Any], Any]] = [
        lambda ddp: ddp.module, lambda ddp: nn.Sequential(ddp),  # Lightning Fabric's wrapper is a module
        lambda ddp: Namespace(model=ddp.module, model_wrapped=ddp, arguments={"lr": 0.1}),  # transformers
        lambda ddp: Namespace(strategy=Namespace(model=ddp.module, model_wrapped=ddp))]  # Lightning
    for holder in holders:
        ddp = ddp_of(small())
        with closing(compress(holder(ddp))) as hook:
            train(ddp, 1)
            stats = hook.stats()
            check(hook.spec == Hook().spec == "int8" and stats["steps"] == 1, f"{stats}")
            check(stats["ratio"] == stats["dense_bytes"] / stats["wire_bytes"] > 1, f"{stats}")
            check(f"'int8': {WORLD} ranks, 1 DDP buckets" in repr(hook), repr(hook))
            train(ddp, 2)
            total = hook.stats()["total_wire_bytes"]
            check(3 * stats["wire_bytes"] <= total < 4 * stats["wire_bytes"], f"{total} bytes, {stats}")
    refused(hook.stats, (gradwire.BadHandle,), "call stats() before close()")
    refused(lambda: compress(nn.ModuleList([ddp_of(small()), ddp_of(small())])), BAD, "ModuleList has 2",
            "compress() for each")
    refused(lambda: compress(nn.DataParallel(small())), BAD,
            "DataParallel(Sequential) is not a DistributedDataParallel")
    refused(lambda: compress(torch.optim.SGD(small().parameters(), lr=1.0)), BAD, "SGD is not a model")


@scenario()
def models_that_cannot_be_compressed_are_refused() -> None:
    refused(lambda: compress(small()), BAD, "wrap the model first", "DistributedDataParallel(model)")
    refused(lambda: compress([small()]), BAD, "list is not a model")  # type: ignore[arg-type]
    ddp = ddp_of(small())
    refused(lambda: compress(ddp, "int3"), BAD, "int3")
    with closing(compress(ddp)):
        refused(lambda: compress(ddp), BAD, "hook")
        check(bool(train(ddp, 1).isfinite().all()), "the first hook no longer works")
    if TODAY:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        sharded = small()
        fully_shard(sharded)
        refused(lambda: compress(sharded), BAD, "gradwire.fsdp.compress")
        refused(lambda: compress(FullyShardedDataParallel(small(), device_id=torch.device("cpu"))), BAD,
                "FSDP1", "gradwire.fsdp.compress")
        python_reducer_is_refused()


def python_reducer_is_refused() -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    words = "python_reducer", "set it to True"
    try:
        ddp = ddp_of(small())
        refused(lambda: compress(ddp), gradwire.Unsupported, *words)
        hook = Hook("fp32")
        ddp.register_comm_hook(hook, allreduce_hook)
        if torch.__version__ >= (2, 9):  # earlier versions use python_reducer in compiled programs only
            refused(lambda: train(ddp, 1), gradwire.Unsupported, *words)

        @torch.compile(backend="aot_eager")
        def step() -> None:
            ddp(torch.ones(8, 16)).mean().backward()

        torch._dynamo.config.compiled_autograd = True
        refused(step, gradwire.Unsupported, *words)
        hook.close()
    finally:
        torch._dynamo.config.compiled_autograd = False
        torch._dynamo.config.optimize_ddp = True


@scenario(2)
def the_profiler_shows_each_bucket() -> None:
    def ranges(call: Callable[[], Any]) -> List[Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return [event for event in profile.events() if event.name.startswith("gradwire ")]

    ddp = ddp_of(small())
    with closing(compress(ddp, "int8:schedule=ring")) as hook:
        train(ddp, 2)
        found = ranges(lambda: train(ddp, 3))
        name = f"gradwire int8:schedule=ring: DDP bucket 0, {4 * flat(ddp).numel()} bytes"
        check([event.name for event in found] == [name] * 3, f"{found}, not 3 of {name}")
        check(min(event.time_range.elapsed_us() for event in found) > 0, f"{found}")
        check(hook.stats()["comm_ms"] > 0, f"{hook.stats()}")
    names = [event.name for event in ranges(lambda: gradwire.allreduce_(torch.ones(5), "bf16"))]
    check(names == ["gradwire bf16: allreduce_, 20 bytes"], f"{names}")


class Of(nn.Module):
    """Parameters whose gradients differ between ranks and between elements."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, factor: float) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for p in self.values:
            weights = torch.arange(p.numel(), dtype=torch.float64).view(p.shape).remainder(7) + factor
            value = p.to(torch.complex128) * (1 + 0.5j) if p.is_complex() else p.to(torch.float64)
            loss = loss + ((value.real + 2 * value.imag if p.is_complex() else value) * weights).sum()
        return loss


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.other.weight = self.one.weight

    def forward(self, factor: float) -> torch.Tensor:
        return self.other(self.one(torch.full((2, 6), factor))).sum()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, factor: float) -> torch.Tensor:
        return (self.linear(self.embedding(torch.tensor([RANK, 9, 9]))) * factor).sum()


def ones(*shapes: Any, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    """Several parameters in one bucket, so that a wrong offset shows."""
    return lambda: Of(*(torch.ones(shape, dtype=dtype) for shape in shapes))


def with_integers() -> nn.Module:
    model = Of(torch.ones(4))
    model.count = nn.Parameter(torch.arange(3), requires_grad=False)
    model.register_buffer("steps", torch.arange(3))
    return model


UNEVEN = ((5, 3), 7, (2, 3, 4))
CELLS: Dict[str, Callable[[], nn.Module]] = {
    **{str(dtype): ones(*UNEVEN, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float16)},
    "float32 and float64": lambda: Of(torch.ones(5, 3), torch.ones(4, dtype=torch.float64), torch.ones(3)),
    "frozen integers": with_integers,
    "transposed": lambda: Of(torch.ones(12, 18).t(), torch.ones(3)),
    "channels_last": lambda: Of(torch.ones(8, 3, 3, 3).to(memory_format=torch.channels_last), torch.ones(3)),
    "strided": lambda: Of(torch.ones(8, 6)[::2, ::3], torch.ones(3)),
    "0-dim": lambda: Of(torch.tensor(2.0), torch.ones(3), torch.tensor(1.0)),
    "tied": Tied,
    "sparse": Sparse,
}
# Without a hook, DDP on Gloo also rejects empty parameters in PyTorch 1.13, and other types in PyTorch 2.6.
if TODAY:
    CELLS["empty"] = ones(3, (0, 4), 5, 0)
if torch.__version__ >= (2, 9):
    CELLS.update({str(dtype): ones(*UNEVEN, dtype=dtype)
                  for dtype in (torch.bfloat16, torch.complex64, torch.complex128)})
    CELLS["float32 and complex64"] = lambda: Of(torch.ones(3), torch.ones(4, 2, dtype=torch.complex64),
                                                torch.ones(5))


def gradients(model: nn.Module) -> List[torch.Tensor]:
    found = [p.grad.to_dense() if p.grad.is_sparse else p.grad
             for p in model.parameters() if p.grad is not None]
    return [torch.view_as_real(g.to(torch.complex128)) if g.is_complex() else g.double() for g in found]


@scenario()
def every_type_and_layout_is_averaged() -> None:
    """Compares each gradient with the mean in float64. docs/for-pytorch.md has the table."""
    comm = gradwire.torch.communicator(timeout_s=60)
    for name, cell in CELLS.items():
        rounding = 4e-3 if "bfloat16" in name else 1e-3 if "float16" in name else 1e-6
        view = {} if name == "sparse" else {"gradient_as_bucket_view": True}  # rejected by DDP
        for spec, limit, each in (("fp32", rounding, ({}, view, {"bucket_cap_mb": 1e-5})),
                                  ("int8", 5e-2, (view,)), ("powersgd:rank=4", 0.6, ({},))):
            for options in each:
                torch.manual_seed(3)
                alone = cell()
                ddp = DistributedDataParallel(copy.deepcopy(alone), **options)
                hook = compress(ddp, spec, comm=comm)
                for step in range(3):  # DDP rebuilds its buckets after the first step
                    ddp.zero_grad()
                    alone.zero_grad()
                    for model in (alone, ddp):
                        model(float(1 + RANK + step)).backward()
                    check(len(gradients(ddp)) == len(gradients(alone)), "gradients are missing")
                    for got, mean in zip(gradients(ddp), gradients(alone)):
                        mean = mean.contiguous()
                        dist.all_reduce(mean)
                        laws.near(f"{name}, {spec}, {options}", got, mean / WORLD, limit)
                matrices = {(t["rows"], t["cols"]) for t in hook.state_dict(gather=False)["tensors"].values()}
                wanted = {"transposed": (12, 18), "channels_last": (8, 27)}.get(name)  # as stored in a bucket
                check(wanted is None or wanted in matrices, f"{name}: matrices {matrices}")
                hook.close()
    comm.close()


@scenario(2)
def gradients_that_cannot_be_averaged_are_refused_by_name() -> None:
    sparse = DistributedDataParallel(Sparse(), broadcast_buffers=False)
    refused(lambda: compress(sparse, "fp32", min_ranks=1), BAD, "sparse=False", "embedding")
    if TODAY:
        from ddp import OneTensor  # DDP itself creates no bucket of integers
        integers: Any = OneTensor(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
        with closing(Hook("fp32")) as hook:
            refused(lambda: hook(integers), gradwire.Unsupported, "int64")


@scenario(2)
def ddp_refuses_what_the_page_says() -> None:
    """Checks that DDP rejects these types without a hook. If a new PyTorch accepts one, add it to CELLS."""
    if torch.__version__ < (2, 9):
        return  # an error leaves a broken connection in earlier versions of Gloo
    ragged = [torch.ones(2), torch.ones(3)]
    tensors: Dict[str, Callable[[], torch.Tensor]] = {
        "expanded": lambda: torch.ones(1, 4).expand(3, 4),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor(ragged),
        "nested, jagged": lambda: torch.nested.nested_tensor(ragged, layout=torch.jagged),
        "sparse parameter": lambda: torch.eye(4).to_sparse(),
        "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        text = refused(lambda: ddp_of(Of(tensor(), torch.ones(3))), (RuntimeError, TypeError))
        say(f"{name}: {text.splitlines()[0][:80] if text else ''}")
