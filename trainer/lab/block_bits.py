"""Bits that vary by block within a message of fixed size (the idea of DynamiQ): rotated Lloyd-Max levels (EDEN:
Vargaftik et al., ICML 2022) of 0 to 8 bits, chosen to minimize the squared error of all blocks. All ranks
choose alike, from the norms of the last step's mean, so that no bits are sent. With error feedback.

    gradwire compare --ranks 4 --compression eden:bits=3 --compression block_bits.py:bits=3 ...
"""
import functools
import statistics

import numpy

BLOCK = 512
MOST = 8


@functools.lru_cache(None)
def levels(bits: int) -> numpy.ndarray:
    """Returns the Lloyd-Max levels of a standard normal distribution."""
    normal = statistics.NormalDist()
    values = numpy.array([normal.inv_cdf((i + 0.5) / 20000) for i in range(20000)])
    centers = numpy.quantile(values, (numpy.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(150):
        nearest = numpy.searchsorted((centers[1:] + centers[:-1]) / 2, values)
        centers = numpy.bincount(nearest, values, 2**bits) / numpy.maximum(numpy.bincount(nearest), 1)
    return centers.astype(numpy.float32)


@functools.lru_cache(None)
def losses() -> numpy.ndarray:
    """Returns the share of a block's square that 0 to MOST bits lose."""
    values = numpy.random.default_rng(0).standard_normal(50000)
    return numpy.array([1.0] + [float(numpy.mean((values - rounded(values, bits))**2))
                                for bits in range(1, MOST + 1)])


def codes_of(values, bits):
    centers = levels(bits)
    return numpy.searchsorted((centers[1:] + centers[:-1]) / 2, values).astype(numpy.uint8)


def rounded(values, bits):
    return levels(bits)[codes_of(values, bits)]


def hadamard(blocks):
    """Returns the orthonormal Hadamard transform of each row."""
    width = 1
    while width < BLOCK:
        pairs = blocks.reshape(len(blocks), -1, 2, width)
        blocks = numpy.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        width *= 2
    return blocks.reshape(-1, BLOCK) / numpy.float32(numpy.sqrt(BLOCK))


def scaled(rotated, bits):
    """Returns the codes of rotated blocks, and the scales that lose least."""
    size = numpy.sqrt(numpy.mean(rotated**2, axis=1, keepdims=True))
    codes = codes_of(rotated / numpy.where(size > 0, size, 1), bits)
    values = levels(bits)[codes]
    return codes, numpy.sum(values * rotated, axis=1) / numpy.sum(values * values, axis=1)


def lost(blocks, chosen):
    """Returns the squared error of each block."""
    rotated = hadamard(blocks * numpy.random.default_rng(0).choice([-1.0, 1.0], BLOCK).astype(numpy.float32))
    for bits in numpy.unique(chosen[chosen > 0]):
        at = numpy.flatnonzero(chosen == bits)
        codes, scales = scaled(rotated[at], int(bits))
        rotated[at] -= levels(int(bits))[codes] * scales[:, None]
    return numpy.sum(rotated.astype(float)**2, axis=1)


def allocate(weights, mean_bits, least=0, most=MOST):
    """Returns whole bits for each block, mean_bits on average, that minimize the expected sum of errors."""
    bits, lost = numpy.arange(least, most + 1), losses()[least:most + 1]

    def best(price):
        return bits[numpy.argmin(weights[:, None] * lost + price * bits, axis=1)]

    low, high = 1e-30, float(weights.max()) * 10 + 1e-30
    for _ in range(100):
        price = numpy.sqrt(low * high)
        low, high = (price, high) if best(price).mean() > mean_bits else (low, price)
    chosen = best(high)
    # The rest of the message goes to the blocks that gain most from one more bit.
    at = numpy.minimum(chosen - least, most - least - 1)
    gain = numpy.where(chosen < most, weights * (lost[at] - lost[at + 1]), -1)
    spare = int(mean_bits * len(weights)) - int(chosen.sum())
    chosen[numpy.argsort(-gain, kind="stable")[:spare]] += 1
    return chosen


class Codec:
    def __init__(self, bucket, bits=3, least=0, most=MOST, fixed=False):
        self.bits, self.least, self.most, self.fixed = bits, least, most, fixed
        self.elements = bucket.elements
        self.blocks = -(-bucket.elements // BLOCK)
        self.signs = numpy.random.default_rng(bucket.seed).choice([-1.0, 1.0], BLOCK).astype(numpy.float32)
        self.residual = numpy.zeros(bucket.elements, numpy.float32)
        self.chosen = numpy.full(self.blocks, bits)

    def encode(self, gradient):
        wanted = gradient + self.residual
        padded = numpy.zeros(self.blocks * BLOCK, numpy.float32)
        padded[:self.elements] = wanted
        rotated = hadamard(padded.reshape(-1, BLOCK) * self.signs)
        scales = numpy.zeros(self.blocks, numpy.float32)
        packed = []
        for bits, at in self.groups():
            codes, scales[at] = scaled(rotated[at], bits)
            packed.append(numpy.packbits(numpy.unpackbits(codes.reshape(-1, 1), axis=1)[:, 8 - bits:]))
        message = (scales, numpy.concatenate(packed) if packed else numpy.zeros(0, numpy.uint8))
        self.residual = wanted - self.values(*message)
        return message

    def decode(self, messages):
        mean = sum(self.values(*message) for message in messages) / numpy.float32(len(messages))
        if not self.fixed:
            padded = numpy.zeros(self.blocks * BLOCK, numpy.float32)
            padded[:self.elements] = mean
            weights = numpy.sum(padded.reshape(-1, BLOCK).astype(float)**2, axis=1)
            # A block that was silent in this step may not be in the next.
            self.chosen = allocate(weights + 1e-4 * weights.mean(), self.bits, self.least, self.most)
        return mean

    def groups(self):
        """Returns the numbers of bits in use, and their blocks."""
        return [(bits, numpy.flatnonzero(self.chosen == bits)) for bits in range(1, MOST + 1)
                if (self.chosen == bits).any()]

    def values(self, scales, packed):
        rotated = numpy.zeros((self.blocks, BLOCK), numpy.float32)
        begin = 0
        for bits, at in self.groups():
            size = bits * len(at) * BLOCK // 8
            taken = numpy.unpackbits(packed[begin:begin + size]).reshape(-1, bits)
            codes = taken @ (1 << numpy.arange(bits - 1, -1, -1))
            rotated[at] = levels(bits)[codes.reshape(-1, BLOCK)] * scales[at, None]
            begin += size
        return (hadamard(rotated) * self.signs).reshape(-1)[:self.elements]
