"""PowerSGD, ACP-SGD and random-k for gradwire.jax.compress(): JAX computes, Gradwire averages.

The algorithms are the library's (docs/numerics.md), in XLA's arithmetic. The state is a pytree of arrays.
Each step sends one message; PowerSGD sends a second message:

    powersgd               S = gradient + residual; P = mean of S Q, in one message with dense arrays;
                           orthonormalize P; Q = S^T P, residual = S - P Q^T; Q = mean; result P Q^T;
                           orthonormalize Q for the next step
    powersgd:alternate=on  steps alternately send P = S Q and Q = S^T P; the other factor is unchanged
    randk                  S at coordinates drawn from (seed, step, array), the same on every rank

Rounding errors of Q or of values return to the residual. Rounding errors of P only tilt the subspace, by the
same amount on all ranks.
"""
from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp

from gradwire._spec import is_coarse, is_small, powersgd_rank, split

_OWN = {"powersgd": ("rank", "start", "warm", "alternate", "min_ratio", "seed", "wire"),
        "randk": ("ratio", "seed", "wire")}
_MOST_STEPS = 2**31 - 1  # CompressState.step is an int32

# Averages arrays in one message: (arrays, residuals of their shape or empty, spec, name) -> (FP32 means, new
# residuals).
Send = Callable[[Sequence[Any], Sequence[Any], str, str], Tuple[List[Any], List[Any]]]
# lax.cond with branches that may send.
Branch = Callable[..., Any]


class Codec(NamedTuple):
    """A parsed spec."""

    method: str
    wire: str  # the messages' spec, with options such as schedule=
    rank: int
    start: int
    warm: bool
    alternate: bool
    min_ratio: float
    ratio: float
    seed: int

    @property
    def lossy(self) -> bool:
        return self.wire.partition(":")[0] != "fp32"


class Leaf(NamedTuple):
    """An array of the tree, and its state."""

    value: Any
    residual: Any  # has the shape of value, or (0,)
    factor: Any  # has shape (cols, rank), with alternate (cols + rows, rank), or (0,)
    compressed: bool
    place: int  # index in the tree, for different random numbers


def is_codec(method: str) -> bool:
    return method in _OWN


def read(spec: str, leaves: Sequence[Any] = ()) -> Codec:
    """Parses a spec that the library has checked. Without wire=, leaves are sent as BF16 if all are BF16."""
    method, options = split(spec)
    given: Dict[str, str] = dict(option.split("=", 1) for option in options)
    others = [f"{key}={value}" for key, value in given.items() if key not in _OWN[method]]
    wire = given.get("wire", "bf16" if leaves and all(str(leaf.dtype) == "bfloat16" for leaf in leaves)
                     else "fp32")
    return Codec(method, wire + (":" + ",".join(others) if others else ""), int(given.get("rank", 1)),
                 min(int(given.get("start", 0)), _MOST_STEPS), given.get("warm", "on") == "on",
                 given.get("alternate", "off") == "on", float(given.get("min_ratio", 2)),
                 float(given.get("ratio", 0.01)), int(given.get("seed", 0)))


def _matrix(leaf: Any) -> Tuple[int, int]:
    rows = leaf.shape[0] if leaf.ndim > 1 else leaf.size
    return rows, leaf.size // max(rows, 1)


def _rank_of(codec: Codec, leaf: Any) -> int:
    return powersgd_rank(*_matrix(leaf), codec.rank, codec.min_ratio)


def is_compressed(codec: Codec, leaf: Any, dense: bool) -> bool:
    """Returns whether the codec compresses an array. `dense` is compress()'s argument."""
    dense = dense and is_small(leaf.shape)
    if codec.method == "randk":
        return leaf.size > 0 and not dense
    return _rank_of(codec, leaf) > 0 and not (dense and is_coarse(codec.wire))


def first_factor(codec: Codec, leaf: Any, index: int) -> Any:
    """Returns the initial Q, with alternate=on followed by P: orthonormal columns, the same on every rank."""
    rows, cols = _matrix(leaf)
    sizes = (cols, rows) if codec.alternate else (cols,)
    return jnp.concatenate([_orthonormal(_random(codec, index, i, (size, _rank_of(codec, leaf))))
                            for i, size in enumerate(sizes)])


def _random(codec: Codec, index: int, step: Any, shape: Tuple[int, ...]) -> Any:
    """Draws numbers uniformly from [-1, 1), the same on every rank."""
    bits = _random_bits(codec, index, step, math.prod(shape)).reshape(shape)
    return bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-31


def _random_bits(codec: Codec, index: int, step: Any, count: int) -> Any:
    """Draws 32-bit numbers, the same on every rank. XLA takes 0.3 s to compile each call of jax.random."""
    x = jnp.arange(count, dtype=jnp.uint32)
    for key in (codec.seed & 0xffffffff, codec.seed >> 32 & 0xffffffff, index, step):
        x = x + jnp.asarray(key, jnp.uint32) * jnp.uint32(0x9e3779b1) + jnp.uint32(0x85ebca6b)
        for multiplier in (0x7feb352d, 0x846ca68b):
            x = (x ^ x >> 16) * jnp.uint32(multiplier)
        x = x ^ x >> 15
    return x


def _orthonormal(x: Any, spare: Optional[Any] = None) -> Any:
    """Orthonormalizes the columns of x.

    Linearly dependent columns and zero columns are replaced from `spare`, so that zero columns can recover.
    """
    q, r = jnp.linalg.qr(x)
    if spare is None:
        return q
    size = jnp.abs(jnp.diagonal(r))
    lost = size <= 1e-6 * jnp.max(size)
    return jnp.linalg.qr(jnp.where((lost | ~jnp.isfinite(size))[None], spare, q))[0]


def _dot(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def step(codec: Codec, leaves: List[Leaf], number: Any, keeps: bool, send: Send,
         branch: Branch) -> Tuple[List[Any], List[Any], List[Any]]:
    """Averages the leaves.

    Args:
        number: the step's number, from 0, as an array.
        keeps: error feedback is on.

    Returns:
        (means, residuals, factors) of the leaves.
    """
    run = _randk if codec.method == "randk" else _alternate if codec.alternate else _powersgd

    def now(number: Any, *flat: Any) -> Any:
        values, residuals, factors = _thirds(flat)
        mine = [leaf._replace(value=v, residual=r, factor=f)
                for leaf, v, r, f in zip(leaves, values, residuals, factors)]
        means, kept, made = run(codec, [leaf for leaf in mine if leaf.compressed],
                                [leaf for leaf in mine if not leaf.compressed], number, keeps, send, branch)
        return _merged(leaves, means), _merged(leaves, kept), _merged(leaves, made)

    def plain(number: Any, *flat: Any) -> Any:
        values, residuals, factors = _thirds(flat)
        means, lost = send(values, residuals, codec.wire, "before start")
        return [m.astype(v.dtype) for m, v in zip(means, values)], lost, factors

    flat = ([leaf.value for leaf in leaves] + [leaf.residual for leaf in leaves]
            + [leaf.factor for leaf in leaves])
    if codec.start > 0:
        means, residuals, factors = branch(number < codec.start, plain, now, number, *flat)
    else:
        means, residuals, factors = now(number, *flat)
    return list(means), list(residuals), list(factors)


def _thirds(flat: Sequence[Any]) -> Tuple[List[Any], List[Any], List[Any]]:
    n = len(flat) // 3
    return list(flat[:n]), list(flat[n:2 * n]), list(flat[2 * n:])


def _merged(leaves: List[Leaf], parts: Tuple[List[Any], List[Any]]) -> List[Any]:
    """Merges the parts of compressed and of other leaves into the order of the tree."""
    compressed, dense = iter(parts[0]), iter(parts[1])
    return [next(compressed if leaf.compressed else dense) for leaf in leaves]


_Result = Tuple[Tuple[List[Any], List[Any]], Tuple[List[Any], List[Any]], Tuple[List[Any], List[Any]]]


def _sum(leaf: Leaf) -> Any:
    """Returns S = gradient + residual as a matrix."""
    s = leaf.value.astype(jnp.float32)
    return (s + leaf.residual if leaf.residual.size else s).reshape(_matrix(leaf.value))


def _send_with_dense(arrays: List[Any], dense: List[Leaf], codec: Codec, send: Send,
                     what: str) -> Tuple[List[Any], List[Any], List[Any], List[Any]]:
    """Averages arrays without a residual, and the dense leaves, in one message.

    Returns:
        (means, rounding errors, dense means, dense residuals).
    """
    means, lost = send(arrays + [leaf.value for leaf in dense],
                       [jnp.zeros_like(a) if codec.lossy else jnp.zeros(0, jnp.float32) for a in arrays] +
                       [leaf.residual for leaf in dense], codec.wire, what)
    n = len(arrays)
    return (means[:n], lost[:n] if codec.lossy else [jnp.zeros_like(a) for a in arrays],
            [m.astype(leaf.value.dtype) for m, leaf in zip(means[n:], dense)], lost[n:])


def _finish(leaf: Leaf, p: Any, q: Any, rest: Any, finite: Any, keeps: bool) -> Tuple[Any, Any]:
    """Returns (mean, residual). If a gradient is not finite, the mean is NaN and the residual unchanged."""
    mean = jnp.where(finite, _dot(p, q.T), jnp.nan).reshape(leaf.value.shape).astype(leaf.value.dtype)
    if not keeps:
        return mean, leaf.residual
    return mean, jnp.where(finite, rest.reshape(leaf.residual.shape), leaf.residual)


def _powersgd(codec: Codec, compressed: List[Leaf], dense: List[Leaf], number: Any, keeps: bool, send: Send,
              branch: Branch) -> _Result:
    sums = [_sum(leaf) for leaf in compressed]
    before = [leaf.factor if codec.warm
              else _orthonormal(_random(codec, leaf.place, number, leaf.factor.shape)) for leaf in compressed]
    means, _, dense_means, dense_residuals = _send_with_dense(
        [_dot(s, q) for s, q in zip(sums, before)], dense, codec, send, "P")
    finite = [jnp.isfinite(p).all() for p in means]
    sums = [jnp.where(ok, s, 0) for ok, s in zip(finite, sums)]
    ps = [_orthonormal(jnp.where(ok, p, 0)) for ok, p in zip(finite, means)]
    qs = [_dot(s.T, p) for s, p in zip(sums, ps)]
    rests = [s - _dot(p, q.T) for s, p, q in zip(sums, ps, qs)]
    if not compressed:
        return ([], dense_means), ([], dense_residuals), ([], [leaf.factor for leaf in dense])
    q_means, q_lost, _, _ = _send_with_dense(qs, [], codec, send, "Q")
    out, kept, factors = [], [], []
    for leaf, p, q, lost, rest, ok, old in zip(compressed, ps, q_means, q_lost, rests, finite, before):
        ok = ok & jnp.isfinite(q).all()
        mean, residual = _finish(leaf, p, q, rest + _dot(p, lost.T), ok, keeps)
        out.append(mean)
        kept.append(residual)
        spare = _random(codec, leaf.place, number + 1, q.shape)
        factors.append(jnp.where(ok, _orthonormal(jnp.where(ok, q, 0), spare), old))
    return (out, dense_means), (kept, dense_residuals), (factors, [leaf.factor for leaf in dense])


def _alternate(codec: Codec, compressed: List[Leaf], dense: List[Leaf], number: Any, keeps: bool, send: Send,
               branch: Branch) -> _Result:
    def turn(sends_p: bool) -> Callable[..., Any]:
        def run(number: Any, *flat: Any) -> Any:
            values, residuals, factors = _thirds(flat)
            mine = [leaf._replace(value=v, residual=r, factor=f) for leaf, v, r, f in
                    zip(compressed + dense, values, residuals, factors)]
            chosen, others = mine[:len(compressed)], mine[len(compressed):]
            sums = [_sum(leaf) if sends_p else _sum(leaf).T for leaf in chosen]
            # The factor that is unchanged, and the factor that this step updates.
            bases, made = [], []
            for leaf in chosen:
                cols = _matrix(leaf.value)[1]
                q, p = leaf.factor[:cols], leaf.factor[cols:]
                bases.append(q if sends_p else p)
                made.append(p if sends_p else q)
            own = [_dot(s, basis) for s, basis in zip(sums, bases)]
            means, lost, dense_means, dense_residuals = _send_with_dense(own, others, codec, send, "P or Q")
            out, kept, new = [], [], []
            for leaf, s, basis, mine_, mean, gone, old in zip(chosen, sums, bases, own, means, lost, made):
                ok = jnp.isfinite(mean).all()
                rest = jnp.where(ok, s, 0) - _dot(jnp.where(ok, mine_ - gone, 0), basis.T)
                if not sends_p:
                    rest = rest.T
                clean = jnp.where(ok, mean, 0)
                left, right = (clean, basis) if sends_p else (basis, clean)
                result, residual = _finish(leaf, left, right, rest, ok, keeps)
                factor = jnp.where(
                    ok, _orthonormal(clean, _random(codec, leaf.place, number + 2, clean.shape)), old)
                out.append(result)
                kept.append(residual)
                new.append(jnp.concatenate([basis, factor] if sends_p else [factor, basis]))
            return out + dense_means, kept + dense_residuals, new + [leaf.factor for leaf in others]
        return run

    everyone = compressed + dense
    flat = ([leaf.value for leaf in everyone] + [leaf.residual for leaf in everyone]
            + [leaf.factor for leaf in everyone])
    means, kept, factors = branch(number % 2 == 0, turn(True), turn(False), number, *flat)
    n = len(compressed)
    return ((list(means[:n]), list(means[n:])), (list(kept[:n]), list(kept[n:])),
            (list(factors[:n]), list(factors[n:])))


def _randk(codec: Codec, compressed: List[Leaf], dense: List[Leaf], number: Any, keeps: bool, send: Send,
           branch: Branch) -> _Result:
    sums = [_sum(leaf).ravel() for leaf in compressed]
    places = []
    for leaf, s in zip(compressed, sums):
        # Draws one coordinate from each of k contiguous runs: no duplicates, and no sorting.
        count = min(max(1, math.floor(s.size * codec.ratio + 0.5)), s.size)
        shorter, longer = divmod(s.size, count)
        run = jnp.arange(count, dtype=jnp.int32)
        first = run * shorter + jnp.minimum(run, longer)
        bits = _random_bits(codec, leaf.place, number, count)
        places.append(first + (bits % (shorter + (run < longer).astype(jnp.uint32))).astype(first.dtype))
    # All ranks must see non-finite values, even at coordinates that are not drawn.
    drawn = [jnp.where(jnp.isfinite(s).all(), s[at], jnp.nan) for s, at in zip(sums, places)]
    means, lost, dense_means, dense_residuals = _send_with_dense(drawn, dense, codec, send, "values")
    out, kept = [], []
    for leaf, s, at, mean, gone in zip(compressed, sums, places, means, lost):
        # zeros_like(s) would vary over the devices of a mesh.
        result = jnp.zeros(s.shape, s.dtype).at[at].set(mean)
        out.append(result.reshape(leaf.value.shape).astype(leaf.value.dtype))
        rest = s.at[at].set(gone).reshape(leaf.residual.shape) if keeps else leaf.residual
        kept.append(jnp.where(jnp.isfinite(mean).all(), rest, leaf.residual) if keeps else rest)
    return ((out, dense_means), (kept, dense_residuals),
            ([leaf.factor for leaf in compressed], [leaf.factor for leaf in dense]))
