"""PowerSGD over HSDP's replicas, with factors sharded like the parameters.

Each replica has the whole gradient M = G + E of a matrix, and each of its S ranks a shard M_s. A shard of rows
takes the steps below. Replicas are the slow axis, the ranks of a replica the fast one:

    P_s = M_s Q                  averaged over the replicas; all-gather on the fast axis
    orthonormalize P             by the library, the whole P on every rank
    Q = sum over s of M_s^T P_s  reduce-scatter on the fast axis; a piece averaged over the replicas; all-gather
    E_s = M_s - P_s Q^T          with this replica's Q
    G_s = P_s Q^T                with the mean Q, which is then orthonormalized for the next step

A rank sends rows / S * r and then columns * r / S elements over the slow axis. For a shard of columns P and Q
swap their exchanges. All matrices of a parameter group travel together, with the first exchange also the other
parameters. Factors, residuals and re-seeded columns are those of the library's PowerSGD (low_rank_codec.cpp) to
FP32 rounding. The library's own reducer needs whole matrices, which no rank has here.
"""
from __future__ import annotations

import contextlib
import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._reducer import Reducer, orthonormalize
from gradwire._spec import encoded_once, info_of, is_plain, method_of, split

_REFUSED = ("alternate", "warm", "ef", "ef_decay", "ramp", "momentum", "max_norm", "dense", "residual")
PLAIN = encoded_once("fp32")


class LowRankSpec(NamedTuple):
    """A spec of PowerSGD that the library has parsed."""

    spec: str
    wire: str  # the factors' format
    start: int
    seed: int

    def rank_of(self, shape: Sequence[int]) -> int:
        """Returns the rank of a parameter's factors; 0 if it is not compressed."""
        return info_of(self.spec, tuple(shape)).rank


def is_low_rank(spec: str) -> bool:
    return method_of(spec) == "powersgd"


def read(spec: str) -> LowRankSpec:
    """Parses a spec.

    Raises:
        BadArgument: the library rejects it, or it has an option that this form lacks.
    """
    with Communicator() as alone:
        Reducer(alone, spec, []).close()
    for option in split(spec)[1]:
        if option.partition("=")[0] in _REFUSED:
            raise _native.BadArgument(f"replicas={spec!r} has the option {option}: PowerSGD over replicas "
                                      f"does not take {', '.join(_REFUSED)}")
    info = info_of(spec)
    return LowRankSpec(spec, encoded_once(info.wire), info.start, info.seed)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Computes FP32 products in FP32: the residual must be exact even where the user allows TF32 or BF16."""
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before):
            kind.fp32_precision = precision


class Axes(NamedTuple):
    """A rank's place, and the communicators. Without other ranks on an axis its communicator is None."""

    shard: int
    shards: int
    fast: Optional[Communicator]
    slow: Optional[Communicator]


class _Matrix:
    """A parameter as a matrix of its first dimension by the others, and this rank's shard of it."""

    def __init__(self, param: Any, number: int, spec: LowRankSpec, axes: Axes, device: torch.device) -> None:
        shape, dim = param._orig_size, param.fsdp_placement.dim
        self.number, self.rank = number, spec.rank_of(shape)
        self.rows, self.cols = shape[0], math.prod(shape) // shape[0]
        self.by_rows = dim == 0 or axes.shards == 1
        self.shape, self.first_row, self.padded_rows = (self.rows, self.cols), 0, self.rows
        self.columns: List[torch.Tensor] = []  # for shards of columns: the numbers of each shard's columns
        if axes.shards > 1 and self.by_rows:
            self.shape = (param.sharded_size[0], self.cols)
            self.padded_rows = param.padded_sharded_param_size[0]
            self.first_row = min(axes.shard * self.padded_rows, self.rows)
        elif axes.shards > 1:
            numbers = torch.arange(self.cols, dtype=torch.int64, device=device).view(shape[1:])
            self.columns = [part.flatten() for part in numbers.chunk(axes.shards, dim=dim - 1)]
            self.shape = (self.rows, self.cols // axes.shards)
        self.count = self.shape[0] * self.shape[1]

    def own(self, q: torch.Tensor, shard: int) -> torch.Tensor:
        """Returns the rows of the whole Q for this rank's columns."""
        return q[self.columns[shard]] if self.columns else q


class Exchange(NamedTuple):
    """The communicators of a step, and the arguments of its calls."""

    axes: Axes
    wire: str
    stream: int
    tag: str
    device: torch.device
    buffers: Dict[Tuple[str, int], torch.Tensor]

    def buffer(self, name: str, tensors: Sequence[torch.Tensor], multiple: int = 1) -> torch.Tensor:
        """Returns the tensors' elements one after the other, at a fixed address: see Communicators.scratch().

        Zeros follow up to a multiple of `multiple`.
        """
        sizes = [tensor.numel() for tensor in tensors]
        count = -(-sum(sizes) // multiple) * multiple
        found = self.buffers.get((name, count))
        if found is None:
            found = self.buffers[name, count] = torch.zeros(count, dtype=torch.float32,
                                                             device=self.device)
        for part, tensor in zip(found.split([*sizes, count - sum(sizes)]), tensors):
            part.view(tensor.shape).copy_(tensor)
        return found

    def average(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Averages over the replicas, in place. Returns the errors of this rank's encodes."""
        lost = None if is_plain(self.wire) else torch.zeros_like(values)
        if self.axes.slow is not None and values.numel():
            self.axes.slow.allreduce_(values, self.wire, "avg", self.stream, f"{name} of {self.tag}",
                                      residual=lost)
        return torch.zeros_like(values) if lost is None else lost

    def scatter(self, name: str, partial: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums over the replica's ranks. Returns this rank's piece of the sums, of which all have the same size."""
        if not partial:
            return torch.empty(0, dtype=torch.float32, device=self.device)
        whole = self.buffer(f"{name}, whole", partial, self.axes.shards)
        if self.axes.fast is None or not whole.numel():
            return whole
        piece = self.buffer(f"{name}, piece", [whole[:whole.numel() // self.axes.shards]])
        self.axes.fast.reduce_scatter(piece, whole, PLAIN, "sum", stream=self.stream,
                                      tag=f"{name} of {self.tag}")
        return piece

    def gather(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Returns the pieces of the replica's ranks, (shards, elements)."""
        if self.axes.fast is None or not piece.numel():
            return piece.view(self.axes.shards, -1)
        whole = self.buffer(f"{name}, all", [piece.repeat(self.axes.shards)])
        self.axes.fast.all_gather(whole, self.buffer(f"{name}, own", [piece]), "fp32", stream=self.stream,
                                  tag=f"{name} of {self.tag}")
        return whole.view(self.axes.shards, -1)

    def orthonormal(self, factors: Sequence[torch.Tensor], numbers: Sequence[int], second: bool, seed: int,
                    step: int, flags: torch.Tensor) -> List[torch.Tensor]:
        """Returns the factors with orthonormal columns. Sets the flags of factors that are not finite."""
        sizes = [-(-factor.numel() // 4) * 4 for factor in factors]
        values = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        found = [part[:factor.numel()].view(factor.shape)
                 for part, factor in zip(values.split(sizes), factors)]
        for part, factor in zip(found, factors):
            part.copy_(factor)
        assert self.axes.slow is not None
        shapes = [(f.shape[0], f.shape[1], number) for f, number in zip(factors, numbers)]
        orthonormalize(self.axes.slow, values.data_ptr(), shapes, second, seed, step, flags.data_ptr(),
                       self.stream)
        return found


class LowRank:
    """PowerSGD's state for one parameter group: the factors Q by parameter name, and the number of steps."""

    def __init__(self, spec: LowRankSpec, numbers: Dict[str, int]) -> None:
        self.spec = spec
        self.factors: Dict[str, torch.Tensor] = {}  # (cols, rank), orthonormal, the same on every rank
        self.steps = 0
        self.can_undo = False  # keep the state from before a step until settle()
        self._numbers = numbers
        self._before: Optional[Tuple[Dict[str, torch.Tensor], int]] = None
        self._matrices: Dict[str, _Matrix] = {}
        self._buffers: Dict[Tuple[str, int], torch.Tensor] = {}

    def average(self, values: torch.Tensor, residual: Optional[torch.Tensor], dense: Optional[torch.Tensor],
                places: Sequence[Tuple[int, Any, str]], axes: Axes, stream: int, tag: str) -> None:
        """Averages the matrices in `values`, and `dense`, over the replicas, in place.

        Args:
            values: this rank's shards, float32.
            residual: E, at the same places; changed in place. None: no error feedback.
            dense: elements to average uncompressed.
            places: (first element, FSDPParam, name) of each matrix.
        """
        if self.can_undo and self._before is None:
            self._before = dict(self.factors), self.steps
        self.steps += 1
        exchange = Exchange(axes, self.spec.wire, stream, tag, values.device, self._buffers)
        if self.steps <= self.spec.start:
            plain = exchange._replace(wire=PLAIN)
            plain.average("parameters before start", values)
            if dense is not None:
                plain.average("dense parameters", dense)
            return
        for _, param, name in places:
            if name not in self._matrices:
                self._matrices[name] = _Matrix(param, self._numbers[name], self.spec, axes, values.device)
        matrices = [self._matrices[name] for _, _, name in places]
        ends = [(begin, begin + m.count) for (begin, _, _), m in zip(places, matrices)]
        shards = [values[begin:end].view(m.shape) for (begin, end), m in zip(ends, matrices)]
        kept = [residual[begin:end].view(m.shape) for (begin, end), m in zip(ends, matrices)] if (
            residual is not None) else []
        for shard, e in zip(shards, kept):
            shard.add_(e)
            if axes.slow is None:  # one replica: everything is applied
                e.zero_()
        if axes.slow is not None:
            with full_precision():
                self._step(exchange, matrices, shards, kept, dense, [name for _, _, name in places])

    def _step(self, exchange: Exchange, matrices: List[_Matrix], shards: List[torch.Tensor],
              kept: List[torch.Tensor], dense: Optional[torch.Tensor], names: List[str]) -> None:
        place, step, seed = exchange.axes.shard, self.steps - 1, self.spec.seed
        numbers = [m.number for m in matrices]
        flags = torch.zeros(len(matrices), dtype=torch.int32, device=exchange.device)
        before = [self._factor(exchange, name, m) for name, m in zip(names, matrices)]
        products = [shard @ m.own(q, place) for shard, m, q in zip(shards, matrices, before)]
        wholes = exchange.orthonormal(self._mean_p(exchange, matrices, products, dense), numbers, False, seed,
                                      step, flags)
        ps = [p[m.first_row:m.first_row + m.shape[0]] for p, m in zip(wholes, matrices)]
        ps = [torch.where(flag > 0, 0.0, p) for flag, p in zip(flags, ps)]  # not finite: affects no other Q
        own, means = self._mean_q(exchange, matrices, [s.t() @ p for s, p in zip(shards, ps)])
        qs = exchange.orthonormal(means, numbers, True, seed, step, flags)
        for i, (name, m, shard, flag) in enumerate(zip(names, matrices, shards, flags.tolist())):
            if flag:  # as the library: the whole matrix, and the state is unchanged
                shard.fill_(math.nan)
                continue
            if kept:
                torch.addmm(shard, ps[i], own[i].t(), alpha=-1, out=kept[i])
            torch.mm(ps[i], m.own(means[i], place).t(), out=shard)
            self.factors[name] = qs[i].clone()

    def _factor(self, exchange: Exchange, name: str, m: _Matrix) -> torch.Tensor:
        if name not in self.factors:
            zeros = torch.zeros(m.cols, m.rank, dtype=torch.float32, device=exchange.device)
            flags = torch.zeros(1, dtype=torch.int32, device=exchange.device)
            self.factors[name], = exchange.orthonormal([zeros], [m.number], True, self.spec.seed, 0, flags)
        return self.factors[name]

    @staticmethod
    def _mean_p(exchange: Exchange, matrices: List[_Matrix], products: List[torch.Tensor],
                dense: Optional[torch.Tensor]) -> List[torch.Tensor]:
        """Returns the mean P, all rows. Averages `dense` in place."""
        local = [torch.nn.functional.pad(p, (0, 0, 0, m.padded_rows - len(p)))
                 for p, m in zip(products, matrices) if m.by_rows]
        partial = [p for p, m in zip(products, matrices) if not m.by_rows]
        piece = exchange.scatter("P", partial)
        exact = dense is not None and is_plain(exchange.wire)
        message = exchange.buffer("P", [*local, piece, *([dense] if exact else [])])
        exchange.average("P", message)
        factors = sum(p.numel() for p in local) + piece.numel()
        if dense is not None:
            if exact:
                dense.copy_(message[factors:])
            else:
                exchange._replace(wire=PLAIN).average("dense parameters", dense)
        *rows, pieces = exchange.gather("P", message[:factors]).split(
            [*(p.numel() for p in local), piece.numel()], dim=1)
        summed = pieces.reshape(-1)[:sum(p.numel() for p in partial)].split([p.numel() for p in partial])
        found = iter(rows), iter(summed)
        return [next(found[0 if m.by_rows else 1]).reshape(-1, m.rank)[:m.rows] for m in matrices]

    @staticmethod
    def _mean_q(exchange: Exchange, matrices: List[_Matrix],
                products: List[torch.Tensor]) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """Returns for each matrix what this replica contributed to Q, for this rank's columns, and the mean Q."""
        local = [q for q, m in zip(products, matrices) if not m.by_rows]
        partial = [q for q, m in zip(products, matrices) if m.by_rows]
        piece = exchange.scatter("Q", partial)
        message = exchange.buffer("Q", [*local, piece])
        sent = message.clone()
        sent -= exchange.average("Q", message)
        count, size = message.numel(), sum(q.numel() for q in partial)
        pieces = exchange.gather("Q", torch.cat([sent[count - piece.numel():], message]))
        own, columns, means = pieces.split([piece.numel(), count - piece.numel(), piece.numel()], dim=1)
        sizes = [q.numel() for q in partial]
        own_of = iter(own.reshape(-1)[:size].split(sizes))
        mean_of = iter(means.reshape(-1)[:size].split(sizes))
        own_columns = iter(sent.split([q.numel() for q in local] + [piece.numel()]))
        columns_of = iter(columns.split([q.numel() for q in local], dim=1))
        result: Tuple[List[torch.Tensor], List[torch.Tensor]] = ([], [])
        for m, q in zip(matrices, products):
            if m.by_rows:
                result[0].append(next(own_of).view(q.shape))
                result[1].append(next(mean_of).view(q.shape))
                continue
            result[0].append(next(own_columns).view(q.shape))
            whole = torch.empty(m.cols, m.rank, dtype=torch.float32, device=q.device)
            for numbers, part in zip(m.columns, next(columns_of)):
                whole[numbers] = part.view(-1, m.rank)
            result[1].append(whole)
        return result

    def settle(self, undo: bool) -> None:
        """Ends one or several steps. Restores the state from before them if `undo`."""
        if undo and self._before is not None:
            self.factors, self.steps = self._before
        self._before = None

    def state(self) -> Dict[str, torch.Tensor]:
        return {name: q.to("cpu", copy=True) for name, q in self.factors.items()}

    def load(self, factors: Dict[str, torch.Tensor], steps: int, device: torch.device) -> None:
        self.factors = {name: q.to(device, torch.float32, copy=True) for name, q in factors.items()}
        self.steps, self._before = steps, None
