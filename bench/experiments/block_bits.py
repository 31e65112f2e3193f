"""Squared error of bits that vary by block, at the bytes of equal bits: gradients of vit_tiny on 4 ranks.

A message holds rotated Lloyd-Max levels of blocks of 512 values (trainer/lab/block_bits.py). The bits of each
block follow from the norms of the last step's mean, which all ranks have, or from the present step's, which no
rank has in time: a bound. Or parts of 64 values in blocks of 4096 get bits by their scales, which the message
has (8-bit scales, whose bytes count; expected error). "By shard" keeps the bytes of each rank's quarter of the
blocks, as the fixed messages of a two-shot need. 15 seconds.
"""
import importlib.util
import pathlib
import subprocess
import tempfile

from harness import report
from harness.ranks import GRADWIRE, ROOT

MODULES = ("numpy",)
OPTIONS = {
    "data": "fashion-mnist", "steps": (30, 150), "bits": (2, 3, 4), "total_steps": 160, "gradwire": GRADWIRE
}
SMOKE = {"data": "synthetic:256", "steps": (2,), "bits": (3,), "total_steps": 3}
RANKS = 4
CHOICES = ("last mean", "last mean, by shard", "last mean, shards of every 4th block",
           "last mean, one bit more or less", "parts of 4096", "this step")

# Saves every rank's gradients of the wanted steps and of the steps before.
DUMP = """
import numpy
class Codec:
    def __init__(self, bucket):
        self.rank, self.step = bucket.rank, 0
    def encode(self, gradient):
        if self.step in {wanted}:
            numpy.save(f"{folder}/{{self.step}}.{{self.rank}}.npy", gradient)
        self.step += 1
        return gradient
    def decode(self, messages):
        return sum(messages) / numpy.float32(len(messages))
"""


def library():
    spec = importlib.util.spec_from_file_location("block_bits_codec", ROOT / "trainer/lab/block_bits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dump(options, folder):
    wanted = {s for step in options.steps for s in (step - 1, step)}
    codec = pathlib.Path(folder) / "dump.py"
    codec.write_text(DUMP.format(wanted=wanted, folder=folder))
    subprocess.run([
        options.gradwire, "train", "--model", "vit_tiny", "--data", options.data, "--ranks", str(RANKS),
        "--batch-size", "16", "--steps", str(options.total_steps), "--lr", "2e-3", "--seed", "1",
        "--eval-every", "0", "--compression", codec
    ], check=True, stdout=subprocess.DEVNULL, timeout=1800)


def squares(values, width):
    """Returns the squared norm of each block of `width` values."""
    import numpy
    padded = numpy.zeros(-(-values.size // width) * width)
    padded[:values.size] = values
    return numpy.sum(padded.reshape(-1, width)**2, axis=1)


def bits_by_block(lab, choice, bits, last, now):
    """Returns the bits of each block of 512 values. last, now: the squares of these steps' blocks."""
    import numpy
    if choice == "equal":
        return numpy.full(len(now), bits)
    weights = now if choice == "this step" else last
    weights = weights + 1e-4 * weights.mean()
    least, most = (bits - 1, bits + 1) if "one bit" in choice else (0, 8)
    place = numpy.arange(len(weights))
    shard = place % RANKS if "every" in choice else place * RANKS // len(place)
    if "shard" not in choice:
        shard = 0 * place
    chosen = numpy.zeros(len(weights), int)
    for s in range(shard.max() + 1):
        chosen[shard == s] = lab.allocate(weights[shard == s], bits, least, most)
    return chosen


def error_of_parts(lab, bits, values):
    """Returns the expected error of parts of 64 values with `bits` bits on average in each 4096."""
    import numpy
    parts = squares(values[:values.size // 4096 * 4096], 64)
    mean_bits = bits + 32 / 512 - 8 / 64  # the scales' bytes
    chosen = numpy.concatenate([lab.allocate(block, mean_bits) for block in parts.reshape(-1, 64)])
    return float(numpy.sum(parts * lab.losses()[chosen]) / parts.sum())


def measure(options):
    import numpy
    lab = library()
    with tempfile.TemporaryDirectory() as folder:
        dump(options, folder)
        for step in options.steps:
            now, last = ([numpy.load(f"{folder}/{s}.{rank}.npy") for rank in range(RANKS)]
                         for s in (step, step - 1))
            before = squares(sum(last) / RANKS, lab.BLOCK)
            present = sum(squares(g, lab.BLOCK) for g in now)
            for bits in options.bits:
                for choice in ("equal", *CHOICES):
                    if choice == "parts of 4096":
                        error = sum(error_of_parts(lab, bits, g) for g in now) / RANKS
                    else:
                        chosen = bits_by_block(lab, choice, bits, before, present)
                        padding = numpy.zeros(chosen.size * lab.BLOCK - now[0].size, numpy.float32)
                        blocks = [numpy.concatenate([g, padding]).reshape(-1, lab.BLOCK) for g in now]
                        error = float(sum(lab.lost(b, chosen).sum() for b in blocks) / present.sum())
                    yield {"step": step, "bits": bits, "choice": choice, "blocks": len(present),
                           "squared_error": error}


def tables(document):
    errors = {(i["step"], i["bits"], i["choice"]): i["squared_error"] for i in document["items"]}
    rows = [["step", "bits", "equal", *CHOICES]]
    for step, bits in sorted({key[:2] for key in errors}):
        equal = errors[step, bits, "equal"]
        found = [errors.get((step, bits, choice)) for choice in CHOICES]
        rows.append([str(step), str(bits), f"{equal:.4f}",
                     *("" if e is None else f"{e:.4f} ({100 * (e / equal - 1):+.0f} %)" for e in found)])
    return report.markdown(rows)
