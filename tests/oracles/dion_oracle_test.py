#!/usr/bin/env python3
"""Compares Gradwire's Dion with the algorithm of the paper (Ahn et al., arXiv 2504.05295, distributed form),
and with orth=on Orth-Dion (Nakamori et al., arXiv 2605.16341: R is orthonormalized, not column by column),
written here in float64 with NumPy: 50 steps of random gradients on 1, 2 and 4 ranks, from the same first Q.

Every rank has a momentum of its own here, as in the paper; Gradwire's momenta are divided by the number of
ranks. Orthonormalization is by Householder QR here: columns of P may have another sign, which columns of R
share, so that the steps agree. Columns of orth(R) point along R's. A small mu amplifies rounding from step to
step: there the paper's algorithm in float32 is the measure: three times its distance from float64.

Usage: dion_oracle_test.py POWERSGD_ORACLE_BINARY
"""
import sys

import numpy
from reducers import distance, gradients, run_ours

SHAPES = [(10,), (64, 48), (7, 5), (33, 129), (16, 3, 7, 7), (200, 20), (96, 96)]
STEPS, TOLERANCE = 50, 1e-5


def orthonormal(r: numpy.ndarray) -> numpy.ndarray:
    """Returns Q of r = Q U with a positive diagonal of U."""
    q, u = numpy.linalg.qr(r)
    return q * numpy.where(numpy.diag(u) < 0, -1, 1).astype(r.dtype)


def paper(world: int, mu: float, orth: bool, values: list, qs: list, dtype: type) -> list:
    """Returns [step][tensor]: the step of each matrix, and the mean gradient of each vector."""
    outputs = [[] for _ in range(STEPS)]
    for i, shape in enumerate(SHAPES):
        if len(shape) < 2:
            for s in range(STEPS):
                outputs[s].append(sum(values[s][r][i].astype(dtype) for r in range(world)) / world)
            continue
        m, n = shape[0], int(numpy.prod(shape[1:]))
        q = qs[i].astype(dtype).reshape(n, -1)
        momenta = [numpy.zeros((m, n), dtype) for _ in range(world)]
        for s in range(STEPS):
            for r in range(world):
                momenta[r] += values[s][r][i].astype(dtype).reshape(m, n)
            p, _ = numpy.linalg.qr(sum(b @ q for b in momenta) / world)
            r_mean = sum(b.T @ p for b in momenta) / world
            momenta = [b - dtype(1 - mu) * p @ r_mean.T for b in momenta]
            unit = r_mean / (numpy.linalg.norm(r_mean, axis=0) + dtype(1e-8))
            q = orthonormal(r_mean) if orth else unit
            outputs[s].append((dtype(numpy.sqrt(m / n)) * p @ q.T).reshape(shape))
    return outputs


def main() -> int:
    failures = 0
    cases = [(1, 4, 0.95, False), (2, 1, 0.95, False), (2, 8, 0.9, False), (4, 4, 0.95, False),
             (2, 80, 0.95, False), (1, 4, 0.95, True), (3, 8, 0.95, True)]
    for world, rank, mu, orth in cases:
        values = gradients(SHAPES, STEPS, world, seed=100 * world + rank)
        spec = f"dion:rank={rank},mu={mu}" + orth * ",orth=on"
        qs, ours = run_ours(sys.argv[1], SHAPES, values, flags=("--spec", spec))
        theirs = paper(world, mu, orth, values, qs, numpy.float64)
        rounded = paper(world, mu, orth, values, qs, numpy.float32)
        worst = max(distance(ours[s], theirs[s]) for s in range(STEPS))
        tensor = max(distance([x], [y]) for s in range(STEPS) for x, y in zip(ours[s], theirs[s]))
        limit = max(TOLERANCE, 3 * max(distance(rounded[s], theirs[s]) for s in range(STEPS)))
        failures += not worst <= limit
        name = f"{world} ranks, rank {rank}, mu {mu}" + orth * ", orth"
        print(f"{name}: relative difference over {STEPS} steps at most {worst:.1e} of a step, "
              f"{tensor:.1e} of a tensor (limit {limit:.1e}): {'ok' if worst <= limit else 'TOO FAR'}",
              flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
