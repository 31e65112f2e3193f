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
import pathlib
import subprocess
import sys
import tempfile

import numpy

SHAPES = [(10,), (64, 48), (7, 5), (33, 129), (16, 3, 7, 7), (200, 20), (96, 96)]
STEPS, TOLERANCE = 50, 1e-5


def gradients(world: int, seed: int) -> list:
    """Returns [step][rank][tensor] float32: a slowly rotating part shared by all ranks, plus noise per
    rank."""
    rng = numpy.random.default_rng(seed)
    shared = [rng.standard_normal(s) for s in SHAPES]
    result = []
    for _ in range(STEPS):
        shared = [0.9 * s + 0.3 * rng.standard_normal(s.shape) for s in shared]
        result.append([[(s + 0.5 * rng.standard_normal(s.shape)).astype(numpy.float32) for s in shared]
                       for _ in range(world)])
    return result


def run_ours(binary: str, world: int, spec: str, values: list):
    head = [world, STEPS, 0, 0, len(SHAPES)]
    for shape in SHAPES:
        head += [len(shape), *shape]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with open(folder / "input", "wb") as file:
            file.write(numpy.array(head, numpy.int64).tobytes())
            for step in values:
                for tensors in step:
                    for t in tensors:
                        file.write(t.tobytes())
        command = [binary, "--spec", spec, folder / "input", folder / "output"]
        subprocess.run(command, check=True, timeout=120)
        data = (folder / "output").read_bytes()
    position = 0

    def take(dtype, count):
        nonlocal position
        array = numpy.frombuffer(data, dtype, count, position)
        position += array.nbytes
        return array

    qs = [take(numpy.float32, int(take(numpy.int64, 1)[0])) for _ in SHAPES]
    outputs = [[take(numpy.float32, int(numpy.prod(s))).reshape(s) for s in SHAPES] for _ in range(STEPS)]
    assert position == len(data), f"{len(data) - position} bytes left in the output"
    return qs, outputs


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


def distance(a: list, b: list) -> float:
    """Returns the norm of the difference divided by the norm of b, over all tensors."""
    difference = sum(numpy.sum((x.astype(numpy.float64) - y) ** 2) for x, y in zip(a, b))
    return float(numpy.sqrt(difference / sum(numpy.sum(y.astype(numpy.float64) ** 2) for y in b)))


def main() -> int:
    failures = 0
    cases = [(1, 4, 0.95, False), (2, 1, 0.95, False), (2, 8, 0.9, False), (4, 4, 0.95, False),
             (2, 80, 0.95, False), (1, 4, 0.95, True), (3, 8, 0.95, True)]
    for world, rank, mu, orth in cases:
        values = gradients(world, seed=100 * world + rank)
        qs, ours = run_ours(sys.argv[1], world, f"dion:rank={rank},mu={mu}" + orth * ",orth=on", values)
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
