"""EF21 (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021) with top-k, as a codec for gradwire's trainer:

    gradwire compare --ranks 4 --compression topk:k=41,ef=ef21 --compression ef21.py:k=41 ...

Each rank keeps an estimate of its gradient and sends the k largest differences from it of every `of` values.
All ranks apply the mean of the estimates.
"""
import numpy


class Codec:
    def __init__(self, bucket, k=64, of=4096):
        self.k, self.of = k, of
        self.blocks = -(-bucket.elements // of)
        self.estimate = numpy.zeros(bucket.elements, numpy.float32)  # of this rank's gradient
        self.mean = numpy.zeros(bucket.elements, numpy.float32)  # of all ranks' estimates

    def encode(self, gradient):
        difference = gradient - self.estimate
        positions = self.select(difference)
        values = difference[positions]
        self.estimate[positions] += values
        return positions.astype(numpy.uint32), values

    def decode(self, messages):
        for positions, values in messages:
            self.mean[positions] += values / numpy.float32(len(messages))
        return self.mean

    def select(self, values):
        """Returns the positions of the k largest magnitudes of each block."""
        padded = numpy.zeros(self.blocks * self.of, numpy.float32)
        padded[:values.size] = numpy.abs(values)
        largest = numpy.argpartition(-padded.reshape(self.blocks, self.of), self.k - 1, axis=1)[:, :self.k]
        positions = (largest + self.of * numpy.arange(self.blocks)[:, None]).ravel()
        return numpy.sort(positions[positions < values.size])
