"""What the oracles of PowerSGD and Dion share: the gradients, Gradwire's results, and their distance."""
import pathlib
import subprocess
import tempfile

import numpy


def gradients(shapes: list, steps: int, world: int, seed: int) -> list:
    """Returns [step][rank][tensor] float32: a slowly rotating part that all ranks share, plus noise."""
    rng = numpy.random.default_rng(seed)
    shared = [rng.standard_normal(s) for s in shapes]
    result = []
    for _ in range(steps):
        shared = [0.9 * s + 0.3 * rng.standard_normal(s.shape) for s in shared]
        result.append([[(s + 0.5 * rng.standard_normal(s.shape)).astype(numpy.float32) for s in shared]
                       for _ in range(world)])
    return result


def run_ours(binary: str, shapes: list, values: list, rank: int = 0, start: int = 0, flags: tuple = ()):
    """Returns the first Q of each tensor (empty: not compressed), and Gradwire's results: [step][tensor]."""
    head = [len(values[0]), len(values), rank, start, len(shapes)]
    for shape in shapes:
        head += [len(shape), *shape]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tensors = [t.tobytes() for step in values for of_rank in step for t in of_rank]
        (folder / "input").write_bytes(b"".join([numpy.array(head, numpy.int64).tobytes(), *tensors]))
        subprocess.run([binary, *flags, folder / "input", folder / "output"], check=True, timeout=120)
        data = (folder / "output").read_bytes()
    position = 0

    def take(dtype, count):
        nonlocal position
        array = numpy.frombuffer(data, dtype, count, position)
        position += array.nbytes
        return array

    qs = [take(numpy.float32, int(take(numpy.int64, 1)[0])) for _ in shapes]
    outputs = [[take(numpy.float32, int(numpy.prod(s))).reshape(s) for s in shapes] for _ in values]
    assert position == len(data), f"{len(data) - position} bytes left in the output"
    return qs, outputs


def distance(a: list, b: list) -> float:
    """Returns the norm of the difference divided by the norm of b, over all tensors."""
    difference = sum(numpy.sum((x.astype(numpy.float64) - y) ** 2) for x, y in zip(a, b))
    return float(numpy.sqrt(difference / sum(numpy.sum(y.astype(numpy.float64) ** 2) for y in b)))
