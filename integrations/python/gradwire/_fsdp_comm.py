"""Replaces FSDP2's collectives: one ParamGroup per FSDP parameter group.

    backward    FSDP copies the group's gradients into one buffer of world x shard elements, from allocate().
                reduce_scatter() encodes it once; the owner of a shard adds the ranks' values in FP32
    HSDP        all_reduce() then averages the shard over the replicas, as the group's all-reduce hook
    forward     FSDP copies this rank's shards into its part of the output. all_gather() encodes them once.
                All ranks, including the owner, decode the same bytes and hold the same bits

Dense tensors take a separate call in FP32, or in BF16 if FSDP's buffer is BF16. In the call for compressed
tensors, dense tensors are replaced by zeros. So compressed tensors need no copy, and dense values do not
affect a block's scale.
"""
from __future__ import annotations

import fnmatch
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._auto import GroupAuto, now
from gradwire._communicator import Communicator
from gradwire._fsdp_low_rank import Axes, LowRank, LowRankSpec
from gradwire._fsdp_residual import Layout, Part, Residual
from gradwire._process_group import communicator, during, stream_of
from gradwire._spec import encoded_once, info_of, is_plain, split, stays_dense

# ---- The arguments of gradwire.fsdp.compress() -------------------------------------------------------------

_WHOLE_MATRICES = ("powersgd", "randk", "dion")


def check_spec(argument: str, spec: str) -> None:
    method, options = split(spec)
    if method in _WHOLE_MATRICES:
        raise _native.Unsupported(
            f"{argument}={spec!r} needs whole tensors, but FSDP2 gives each rank a slice: use a wire format, "
            "such as 'int4:rotate=hadamard', the smallest for gradients, or DistributedDataParallel with "
            "gradwire.torch.compress(). PowerSGD is a format of replicas, over the replicas of a 2-D mesh")
    for option in options:
        key = option.partition("=")[0]
        if argument == "weights" and key == "ef_decay":
            raise _native.BadArgument(f"weights={spec!r} has the option {option}, but only gradients have a "
                                      "residual")
        if key in ("ef", "residual", "dense"):
            raise _native.BadArgument(f"{argument}={spec!r} has the option {option}: pass compress() the "
                                      "argument residual or dense in its place (residual='off' for ef=off)")
    values, part = (torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(2))
    with Communicator() as alone:
        if argument == "weights":
            alone.all_gather(values, part, spec)
        else:
            alone.reduce_scatter(part, values, spec)


def dense_rule(dense: "bool | Sequence[str]", spec: str,
                low_rank: Optional[LowRankSpec] = None) -> Callable[[str, torch.Size], bool]:
    patterns: Optional[List[str]] = None
    if not isinstance(dense, bool):
        if isinstance(dense, str):
            raise _native.BadArgument(f"dense must be True, False or a sequence of names, not {dense!r}: "
                                      f"write [{dense!r}]")
        patterns = list(dense)

    def rule(name: str, shape: torch.Size) -> bool:
        if is_plain(spec):
            return False
        if low_rank is not None and low_rank.rank_of(shape) == 0:
            return True
        if patterns is None:
            if low_rank is not None:
                info = info_of(low_rank.spec, tuple(shape))
                return bool(dense) and info.bits < 8 and info.small
            return bool(dense) and stays_dense(shape, spec)
        return any(info_of(spec, tuple(shape)).small if p == "auto" else fnmatch.fnmatchcase(name, p)
                   for p in patterns)

    return rule

# ---- Collectives -------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """The validated arguments of compress()."""

    gradients: str
    weights: str
    replicas: str
    residual: str
    dense_gradients: Callable[[str, torch.Size], bool]
    dense_weights: Callable[[str, torch.Size], bool]
    dense_replicas: Callable[[str, torch.Size], bool]
    low_rank: Optional[LowRankSpec]  # the parsed `replicas`, if that is PowerSGD
    timeout_s: float
    seed: int


class Communicators:
    """Gradwire's communicators, one per purpose and process group. FSDP uses one stream per purpose."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._made: Dict[Tuple[str, Any], Communicator] = {}
        self._scratch: Dict[torch.device, torch.Tensor] = {}

    def scratch(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns a float32 tensor (count,) at a fixed address: the library then reuses its program."""
        if device not in self._scratch or self._scratch[device].numel() < count:
            self._scratch[device] = torch.empty(count, dtype=torch.float32, device=device)
        return self._scratch[device][:count]

    def of(self, purpose: str, group: Any, device: torch.device) -> Communicator:
        """Returns the communicator for a purpose and group. The first call is collective over the group."""
        found = self._made.get((purpose, group))
        if found is None:
            found = communicator(group, "host" if device.type == "cpu" else device.index, self._timeout_s)
            self._made[purpose, group] = found
        elif device.type == "cuda":
            found.check()  # an earlier call may have failed on its stream, which reports no errors
        return found

    def close(self) -> None:
        for made in self._made.values():
            made.close()


class Allocates:
    """The first half of FSDP's `Comm` interface: allocates plain memory, which collectives use in place.

    The memory is not pooled: gradients are views of the reduced buffer, and live as long as the user holds
    them.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(Allocates):
    """The reduce-scatter for FSDPModule.set_custom_reduce_scatter()."""

    def __init__(self, ours: "ParamGroup") -> None:
        self._ours = ours

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any,
                 async_op: bool = False) -> None:
        """Enqueues on the current stream; on the host blocks until the result is ready, for any async_op."""
        with during(*self._ours.of_gradients, input_tensor):
            self._ours.reduce_scatter(output_tensor, input_tensor, group, op)


class AllGather(Allocates):
    """The all-gather for FSDPModule.set_custom_all_gather()."""

    def __init__(self, ours: "ParamGroup") -> None:
        self._ours = ours

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any,
                 async_op: bool = False) -> Any:
        """Enqueues on the current stream; on the host blocks until the result is ready, for any async_op."""
        with during(*self._ours.of_weights, output_tensor):
            return self._ours.all_gather(output_tensor, input_tensor, group, async_op)


class ParamGroup:
    """The collectives and residuals of one FSDP parameter group.

    Args:
        theirs: FSDP's parameter group.
        names: parameter names by id() of FSDPParam.
        options: the arguments of compress().
        communicators: shared by all groups.
        number: the group's number, which is part of the seed.
        first_param: the number of parameters in earlier groups.
    """

    def __init__(self, theirs: Any, names: Dict[int, str], options: Options, communicators: Communicators,
                 number: int, first_param: int) -> None:
        self.theirs = theirs
        self.names = {id(p): names[id(p)] for p in theirs.fsdp_params}
        self.first_name = next(iter(self.names.values()), "a group without parameters")
        self._options = options
        self.auto: Optional[GroupAuto] = None
        # Format and name of the calls, for the profiler.
        self.of_gradients = options.gradients, f"gradients of {self.first_name}"
        self.of_weights = options.weights, f"weights of {self.first_name}"
        self._communicators = communicators
        self._pending: Optional[List[Any]] = None  # the FSDPParams in the next buffer
        self._layouts: Dict[Tuple[Any, ...], Layout] = {}
        self.replicas: Any = None  # process group of HSDP's replicas
        self.handle: Any = None  # the result of compress()
        # A different seed for each rank, so that rounding errors of residuals are independent.
        self._seed = (options.seed * 4099 + number * 2) * 65537 + dist.get_rank()
        self.residual = self._residual(options.gradients, self._seed)
        self.replica_residual = self._residual(options.replicas, self._seed + 65537)
        self.low_rank = None if options.low_rank is None else LowRank(
            options.low_rank, {name: first_param + i for i, name in enumerate(self.names.values())})

    def _residual(self, spec: str, seed: int) -> Optional[Residual]:
        mode = self._options.residual
        return None if mode == "off" or is_plain(spec) else Residual(mode, self.theirs.device, seed)

    def use(self, options: Options, can_undo: bool) -> None:
        """Reduces gradients in another format from now on, without a residual at first."""
        self._options = options
        self.of_gradients = options.gradients, self.of_gradients[1]
        self.residual = self._residual(options.gradients, self._seed)
        if self.residual is not None:
            self.residual.can_undo = can_undo

    def keeps(self, name: str, param: Any) -> bool:
        """Returns whether a parameter has a residual after its first gradient."""
        shape, options = param._orig_size, self._options
        return bool(param.sharded_param.requires_grad) and (
            (self.residual is not None and not options.dense_gradients(name, shape))
            or (self.replica_residual is not None and self.replicas is not None
                and not options.dense_replicas(name, shape)))

    def is_low_rank(self, name: str, param: Any) -> bool:
        return self.low_rank is not None and not self._options.dense_replicas(name, param._orig_size)

    # ---- The parameters' places in FSDP's buffers ----------------------------------------------------------

    def expect(self, params: Sequence[Any]) -> None:
        """Sets the parameters in the next gradient buffer, in order."""
        self._pending = list(params)

    def _layout(self, params: Sequence[Any], rows: int, dense: Callable[[str, torch.Size], bool]) -> Layout:
        key = (rows, dense, *map(id, params))
        found = self._layouts.get(key)
        if found is None:
            parts, begin = [], 0
            for param in params:
                name, count = self.names[id(param)], param.padded_sharded_param_size.numel()
                parts.append(Part(name, begin, count, dense(name, param._orig_size)))
                begin += count
            found = self._layouts[key] = Layout(tuple(parts), rows, begin)
        return found

    def _gradient_layout(self, rows: int, count: int, dense: Callable[[str, torch.Size], bool]) -> Layout:
        params = self._pending
        if params is None:  # before PyTorch 2.15 the list is unknown: assume all trained parameters
            params = [p for p in self.theirs.fsdp_params if p.sharded_param.requires_grad]
        layout = self._layout(params, rows, dense)
        if layout.rows * layout.shard != count:
            raise _native.Unsupported(
                f"the gradients of the group of {self.first_name!r} have {count} elements, its parameters "
                f"{layout.rows * layout.shard}: some parameters have no gradient in this backward, and "
                f"PyTorch {torch.__version__} does not report which. Use PyTorch 2.15, or freeze them "
                "(requires_grad_(False))")
        return layout

    # ---- The collectives -----------------------------------------------------------------------------------

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, group: Any, op: Any) -> None:
        """Reduces `buffer`, (world * shard,), into `output`, (shard,). May overwrite `buffer`."""
        if not buffer.dtype.is_floating_point:  # no wire format supports complex types
            _native_reduce_scatter(output, buffer, group, op)
            return
        comm = self._communicators.of("gradients", group, buffer.device)
        auto, measured = self.auto if comm.world > 1 else None, None
        if auto is not None:
            chosen = auto.called(self, buffer)
            if chosen is not None:
                self.handle._use(chosen)
            measured = buffer.clone() if auto.measures(self) else None
        begin = None if auto is None else now(buffer)
        self._reduce_scatter(comm, output, buffer, op)
        if auto is not None:
            auto.reduced(begin, buffer)
        if auto is not None and measured is not None:
            layout = self._gradient_layout(comm.world, buffer.numel(), self._options.dense_gradients)
            with _Supported(measured) as values:
                auto.measure(comm, self, {f"{part.name}, shard {i}": row[part.begin:part.end] for i, row in
                                          enumerate(values.view(layout.rows, layout.shard))
                                          for part in layout.parts}, stream_of(buffer))

    def _reduce_scatter(self, comm: Communicator, output: torch.Tensor, buffer: torch.Tensor,
                        op: Any) -> None:
        options, error_feedback = self._options, self.residual
        layout = self._gradient_layout(comm.world, buffer.numel(), options.dense_gradients)
        stream, tag = stream_of(buffer), self.of_gradients[1]
        factor, ours = None, "avg" if op == dist.ReduceOp.AVG else "sum"
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):  # PREMUL_SUM
            factor = self.theirs.gradient_divide_factor
        with _Supported(output, write=True) as result, _Supported(buffer) as source:
            dense = _DensePart(layout, source) if layout.dense else None
            if dense is not None:
                reduced = torch.empty(dense.shard, dtype=source.dtype, device=buffer.device)
                comm.reduce_scatter(reduced, dense.values, encoded_once(plain(source.dtype)), ours,
                                    stream=stream, tag=f"dense {tag}")
                if not dense.is_all:
                    dense.clear(source)
            if dense is None or not dense.is_all:
                residual = None if error_feedback is None else error_feedback.open(layout)
                comm.reduce_scatter(result, source, options.gradients, ours, residual=residual,
                                    stream=stream, tag=tag)
                if error_feedback is not None:
                    error_feedback.close()
            if dense is not None:
                dense.put(reduced, result, 1)
            if factor is not None:
                result.div_(factor)

    def all_reduce(self, shard: torch.Tensor) -> None:
        """Averages `shard` over HSDP's replicas, in place."""
        with during(self._options.replicas, f"replicas' gradients of {self.first_name}", shard):
            self._all_reduce(shard)

    def _all_reduce(self, shard: torch.Tensor) -> None:
        if not shard.dtype.is_floating_point:
            dist.all_reduce(shard, group=self.replicas)
            if self.theirs.gradient_divide_factor is None:
                shard.div_(self.replicas.size())
            return
        comm = self._communicators.of("replicas", self.replicas, shard.device)
        layout = self._gradient_layout(1, shard.numel(), self._options.dense_replicas)
        stream, tag = stream_of(shard), f"replicas' gradients of {self.first_name}"
        # FSDP applies a user's divide factor as a whole in the reduce-scatter.
        op = "avg" if self.theirs.gradient_divide_factor is None else "sum"
        small = sum(part.count for part in layout.dense)
        values, reduced = self._communicators.scratch(layout.shard + small,
                                                      shard.device).split([layout.shard, small])
        values.copy_(shard)
        dense = _DensePart(layout, values) if layout.dense else None
        if self.low_rank is not None and (dense is None or not dense.is_all):
            self._average_low_rank(self.low_rank, layout, values, dense, stream, tag)
            if op == "sum":
                values.mul_(self.replicas.size())
            shard.copy_(values)
            return
        if dense is not None:
            reduced.copy_(dense.values)
            comm.allreduce_(reduced, encoded_once(plain(shard.dtype)), op, stream, f"dense {tag}")
            if not dense.is_all:
                dense.clear(values)
        if dense is None or not dense.is_all:
            residual = None if self.replica_residual is None else self.replica_residual.open(layout)
            comm.allreduce_(values, self._options.replicas, op, stream, tag, residual=residual)
            if self.replica_residual is not None:
                self.replica_residual.close()
        if dense is not None:
            dense.put(reduced, values, 1)
        shard.copy_(values)

    def _average_low_rank(self, low_rank: LowRank, layout: Layout, values: torch.Tensor,
                          dense: Optional["_DensePart"], stream: int, tag: str) -> None:
        mesh, of = self.theirs.mesh_info, self._communicators.of
        params = {self.names[id(param)]: param for param in self.theirs.fsdp_params}
        places = [(part.begin, params[part.name], part.name) for part in layout.parts if not part.dense]
        fast = of("factors", mesh.shard_process_group, values.device) if mesh.shard_mesh_size > 1 else None
        slow = of("replicas", self.replicas, values.device) if self.replicas.size() > 1 else None
        axes = Axes(mesh.shard_mesh_rank, mesh.shard_mesh_size, fast, slow)
        residual = None if self.replica_residual is None else self.replica_residual.open(layout)
        low_rank.average(values, residual, None if dense is None else dense.values, places, axes, stream, tag)
        if self.replica_residual is not None:
            self.replica_residual.close()
        if dense is not None:
            dense.put(dense.values, values, 1)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Gathers `shard`, this rank's part of `output`, into `output`, (world * shard,)."""
        own = self.theirs.mesh_info.shard_process_group
        if group is not own or shard.dtype not in (torch.float32, torch.bfloat16):
            # Sent uncompressed: weights within a node that were already gathered and encoded
            # (reshard_after_forward=N), and bytes of parameters of several types or with all-gather
            # extensions (float8).
            return _native_all_gather(output, shard, group, async_op)
        comm = self._communicators.of("weights", group, shard.device)
        layout = self._layout(self.theirs.fsdp_params, comm.world, self._options.dense_weights)
        stream, tag = stream_of(shard), self.of_weights[1]
        dense = None
        if layout.dense and layout.shard == shard.numel():
            dense = _DensePart(layout._replace(rows=1), shard)
            # Dense values are gathered in the parameters' type.
            gathered = torch.empty(comm.world * dense.shard, dtype=shard.dtype, device=shard.device)
            comm.all_gather(gathered, dense.values, plain(shard.dtype), stream=stream, tag=f"dense {tag}")
            if not dense.is_all:
                dense.clear(shard)
        if dense is None or not dense.is_all:
            spec = plain(shard.dtype) if is_plain(self._options.weights) else self._options.weights
            comm.all_gather(output, shard, spec, stream=stream, tag=tag)
        if dense is not None:
            dense.put(gathered, output, comm.world)
        return None


class _Supported:
    """A float32 or bfloat16 tensor, or a float32 copy of another tensor, which write=True copies back."""

    def __init__(self, tensor: torch.Tensor, write: bool = False) -> None:
        self._tensor, self._write = tensor, write
        self._copy = tensor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.float()

    def __enter__(self) -> torch.Tensor:
        return self._copy

    def __exit__(self, failed: Any, *_: object) -> None:
        if self._write and failed is None and self._copy is not self._tensor:
            self._tensor.copy_(self._copy)


class _DensePart:
    """A copy of the dense columns of a (rows, shard) buffer."""

    def __init__(self, layout: Layout, buffer: torch.Tensor) -> None:
        rows = buffer.view(layout.rows, layout.shard)
        self._layout = layout
        self.values = torch.cat([rows[:, part.begin:part.end] for part in layout.dense], dim=1).view(-1)
        self.shard = self.values.numel() // layout.rows
        self.is_all = len(layout.dense) == len(layout.parts)

    def clear(self, buffer: torch.Tensor) -> None:
        rows = buffer.view(self._layout.rows, self._layout.shard)
        for part in self._layout.dense:
            rows[:, part.begin:part.end].zero_()

    def put(self, values: torch.Tensor, buffer: torch.Tensor, rows: int) -> None:
        """Copies `values`, (rows * self.shard,), into their columns of `buffer`, (rows, shard)."""
        target, source = buffer.view(rows, self._layout.shard), values.view(rows, self.shard)
        begin = 0
        for part in self._layout.dense:
            target[:, part.begin:part.end].copy_(source[:, begin:begin + part.count])
            begin += part.count


def plain(dtype: torch.dtype) -> str:
    """Returns the spec that sends elements of this type exactly."""
    return "bf16" if dtype == torch.bfloat16 else "fp32"


def _native_reduce_scatter(output: torch.Tensor, buffer: torch.Tensor, group: Any, op: Any) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, buffer, op=op, group=group)


def _native_all_gather(output: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=async_op)
