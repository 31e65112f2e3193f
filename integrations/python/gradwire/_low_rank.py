"""Orthonormalizes the columns of factors whose rows several ranks may share, as the library does.

The columns, re-seeded columns included, are those of kernels/powersgd/orthonormalize.h to FP32 rounding:
Cholesky QR with a Gram matrix in FP64, repeated until its pivots are large enough.
"""
from __future__ import annotations

import contextlib
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch

# The pivots and passes of kernels/math/orthonormalize.h.
_DEPENDENT, _FINAL, _MOST_PASSES = 1e-14, 1e-6, 16
_LOW = 0xffffffff

# Sums Gram matrices, (matrices, rank, rank) in float64, over the ranks that share the rows.
Total = Callable[[torch.Tensor], torch.Tensor]


class Factor:
    """This rank's rows of a factor.

    Args:
        values: (rows, rank) float32. orthonormalize() replaces the tensor.
        number: the matrix's number in random draws, the same on every rank.
        first_row: the number of the first row in the whole factor.
        is_counted: False on the other ranks that hold the same rows.
    """

    def __init__(self, values: torch.Tensor, number: int, first_row: int = 0,
                 is_counted: bool = True) -> None:
        self.values, self.number, self.first_row, self.is_counted = values, number, first_row, is_counted


def orthonormalize(factors: Sequence[Factor], which: int, seed: int, step: int,
                   total: Optional[Total] = None) -> List[bool]:
    """Orthonormalizes the columns of each factor. Collective if there is a `total`.

    A zero or dependent column is replaced by a random direction, the same on every rank. On CUDA, blocks the
    host once per pass.

    Args:
        which: 0 for P, 1 for Q.
        total: sums over the ranks; None: this rank has all rows.

    Returns:
        For each factor, whether all values are finite. Other factors are unchanged.
    """
    widest = max((factor.values.shape[1] for factor in factors), default=0)
    finite = [True] * len(factors)
    order = torch.arange(widest, dtype=torch.int64, device="cpu").repeat(len(factors), 1)
    attempts = torch.zeros(len(factors), widest, dtype=torch.int64, device="cpu")
    active = list(range(len(factors)))
    for turn in range(_MOST_PASSES):
        if not active:
            break
        gram = torch.stack([_gram(factors[i], widest) for i in active])
        gram = (gram if total is None else total(gram)).cpu()
        if turn == 0:
            for i, ok in zip(active, gram.isfinite().flatten(1).all(dim=1).tolist()):
                finite[i] = ok
            gram = gram[torch.tensor(finite, dtype=torch.bool, device="cpu")]
            active = [i for i in active if finite[i]]
        for i, row in enumerate(active):
            padding = torch.arange(factors[row].values.shape[1], widest, dtype=torch.int64, device="cpu")
            gram[i, padding, padding] = 1
        weights, dependent, smallest = _weights(gram, order[active])
        for i, w, again in zip(active, weights, dependent):
            _apply(factors[i], w, again, which, seed, step, attempts[i])
        attempts[active] += dependent.long()
        order[active] = order[active].gather(1, torch.argsort(attempts[active].gather(1, order[active]) > 0,
                                                              dim=1, stable=True))
        active = [i for i, pivot in zip(active, smallest.tolist()) if pivot < _FINAL]
    return finite


def _gram(factor: Factor, widest: int) -> torch.Tensor:
    rank = factor.values.shape[1]
    gram = torch.zeros(widest, widest, dtype=torch.float64, device=factor.values.device)
    if factor.is_counted:
        values = factor.values.double()
        gram[:rank, :rank] = values.t() @ values
    return gram


def _apply(factor: Factor, weights: torch.Tensor, dependent: torch.Tensor, which: int, seed: int, step: int,
           attempts: torch.Tensor) -> None:
    rows, rank = factor.values.shape
    weights = weights[:rank, :rank].to(factor.values.device)
    factor.values = (factor.values.double() @ weights).float()
    for column in dependent[:rank].nonzero().flatten().tolist():
        numbers = torch.arange(factor.first_row, factor.first_row + rows, dtype=torch.int64,
                               device=factor.values.device)
        factor.values[:, column] = _random(seed, step, factor.number, which, column, int(attempts[column]),
                                           numbers)


def _weights(gram: torch.Tensor, order: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors Gram matrices, with columns scaled to norm 1, in the elimination order `order`.

    Returns:
        The weights that orthonormalize the columns, the dependent columns, and the smallest pivots, which are
        0 with a dependent column.
    """
    diagonal = gram.diagonal(dim1=1, dim2=2)
    scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0)
    scaled = _permuted(gram * scale[:, :, None] * scale[:, None, :], order)
    lower, failed = torch.linalg.cholesky_ex(scaled)
    smallest = lower.diagonal(dim1=1, dim2=2).square().amin(dim=1)
    dependent = torch.zeros(scale.shape, dtype=torch.bool, device="cpu")
    for i in ((failed > 0) | ~(smallest > _DEPENDENT)).nonzero().flatten().tolist():
        lower[i], dependent[i] = _factored(scaled[i])
        smallest[i] = 0
    identity = torch.eye(gram.shape[1], dtype=torch.float64, device="cpu").expand_as(gram)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    back = torch.argsort(order, dim=1)
    return _permuted(inverse.mT, back) * scale[:, :, None], dependent.gather(1, back), smallest


def _permuted(matrices: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    rows = matrices.gather(1, order[:, :, None].expand_as(matrices))
    return rows.gather(2, order[:, None, :].expand_as(matrices))


def _factored(matrix: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the Cholesky factor without the dependent columns, and which these are."""
    rest, lower = matrix.clone(), torch.eye(len(matrix), dtype=torch.float64, device="cpu")
    dependent = torch.zeros(len(matrix), dtype=torch.bool, device="cpu")
    for j in range(len(matrix)):
        if not rest[j, j] > _DEPENDENT:
            dependent[j] = True
            continue
        lower[j:, j] = rest[j:, j] / rest[j, j].sqrt()
        rest[j:, j:] -= torch.outer(lower[j:, j], lower[j:, j])
    return lower, dependent


def _random(seed: int, step: int, number: int, which: int, column: int, attempt: int,
            rows: torch.Tensor) -> torch.Tensor:
    """Returns reseed_value() of kernels/math/orthonormalize.h, with Philox-4x32-10, for each row."""
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    c0, c1 = rows & _LOW, torch.full_like(rows, step & _LOW)
    c2 = torch.full_like(rows, which << 24 | (attempt & 0xff) << 16 | column & 0xffff)
    c3 = torch.full_like(rows, number & _LOW)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64
        c0, c1, c2, c3 = p1 >> 32 & _LOW ^ c1 ^ k0, p1 & _LOW, p0 >> 32 & _LOW ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    u0, u1, u2, u3 = (((c >> 9).float() + 0.5) * 2.0**-23 for c in (c0, c1, c2, c3))
    return (u0 + u1 + u2 + u3 - 2) * 1.7320508


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
