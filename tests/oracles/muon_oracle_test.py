#!/usr/bin/env python3
"""Compares the trainer's Muon with the published algorithm (Jordan et al., kellerjordan.github.io/posts/muon,
without Nesterov's step), written here in float64 with NumPy: 50 steps of random gradients.

Usage: muon_oracle_test.py MUON_ORACLE_BINARY
"""
import pathlib
import subprocess
import sys
import tempfile

import numpy

SHAPES = [(64, 48), (48, 64), (7, 5), (33, 129), (1, 6), (96, 96), (40, 24)]
STEPS, TOLERANCE = 50, 1e-5


def gradients(seed: int) -> list:
    """Returns [step][matrix] float32; the last matrix has zero gradients for ten steps."""
    rng = numpy.random.default_rng(seed)
    result = [[rng.standard_normal(s).astype(numpy.float32) for s in SHAPES] for _ in range(STEPS)]
    for step in result[:10]:
        step[-1][:] = 0
    return result


def run_ours(binary: str, mu: float, values: list) -> list:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with open(folder / "input", "wb") as file:
            file.write(numpy.array([STEPS, len(SHAPES)], numpy.int64).tobytes() + numpy.float64(mu).tobytes())
            file.write(numpy.array(SHAPES, numpy.int64).tobytes())
            for step in values:
                for matrix in step:
                    file.write(matrix.tobytes())
        subprocess.run([binary, folder / "input", folder / "output"], check=True, timeout=120)
        data = numpy.fromfile(folder / "output", numpy.float32)
    sizes = [rows * cols for rows, cols in SHAPES] * STEPS
    parts = iter(numpy.split(data, numpy.cumsum(sizes)[:-1]))
    return [[next(parts).reshape(shape) for shape in SHAPES] for _ in range(STEPS)]


def published(mu: float, values: list) -> list:
    momenta = [numpy.zeros(shape) for shape in SHAPES]
    result = []
    for step in values:
        result.append([])
        for i, (rows, cols) in enumerate(SHAPES):
            momenta[i] = mu * momenta[i] + step[i]
            x = momenta[i].T if rows > cols else momenta[i]
            x = x / (numpy.linalg.norm(x) + 1e-8)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            result[-1].append(numpy.sqrt(rows / cols) * (x.T if rows > cols else x))
    return result


def main() -> int:
    failures = 0
    for mu in (0.0, 0.95):
        values = gradients(seed=int(100 * mu))
        worst = 0.0
        for ours, theirs in zip(run_ours(sys.argv[1], mu, values), published(mu, values)):
            for x, y in zip(ours, theirs):
                size = numpy.linalg.norm(y)
                worst = max(worst, float(numpy.linalg.norm(x - y)) / (size or 1))
        failures += not worst <= TOLERANCE
        print(f"mu {mu}: relative difference of a matrix's step at most {worst:.1e} (limit {TOLERANCE:.0e}): "
              f"{'ok' if worst <= TOLERANCE else 'TOO FAR'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
