"""Parses a compression spec's text, and decides which tensors stay dense."""
from __future__ import annotations

import math
from typing import List, Sequence, Tuple

# In elements, as in collectives/codec/policy_codec.h: the longest dense vector, and the smallest matrix that
# is not dense.
LONGEST_VECTOR, _SMALL_MATRIX = 65_536, 1_024
# Formats of 16 bits and more, which are accurate enough for vectors.
_WIDE = ("fp32", "bf16")
# Formats of at least 8 bits per element, on average over 2**20. register_format() adds to them.
fine_formats = {*_WIDE, "fp8", "int8", "mxfp8", "natural", "qsgd"}


def split(spec: str) -> Tuple[str, List[str]]:
    """Returns the method's name and the options, as "key=value"."""
    method, *options = spec.replace(":", ",", 1).split(",")
    return method, [option for option in options if option]


def method_of(spec: str) -> str:
    """Returns the method's name."""
    return split(spec)[0]


def encoded_once(spec: str) -> str:
    """Returns `spec`, by default with schedule=two_shot: each rank encodes once, and the owner adds."""
    options = split(spec)[1]
    if any(option.startswith("schedule=") for option in options):
        return spec
    return f"{spec}{',' if options else ':'}schedule=two_shot"


def is_plain(spec: str) -> bool:
    return method_of(spec) == "fp32"


def is_small(shape: Sequence[int]) -> bool:
    """Returns whether dense=auto means a tensor of this shape."""
    elements = math.prod(shape)
    return elements <= LONGEST_VECTOR if len(shape) <= 1 else elements < _SMALL_MATRIX


def stays_dense(shape: Sequence[int], spec: str) -> bool:
    """Returns whether a tensor of this shape is sent uncompressed."""
    return method_of(spec) not in _WIDE and is_small(shape)


def is_coarse(wire: str) -> bool:
    """Returns whether a wire format has fewer than 8 bits per element: dense=auto is then its default.

    topk counts as coarse even if its k is a third of its block.
    """
    method, options = split(wire)
    return method not in fine_formats or "bits=4" in options


def powersgd_rank(rows: int, cols: int, rank: int, min_ratio: float) -> int:
    """Returns the rank of a matrix's factors; 0: not compressed. As in collectives/codec/low_rank_codec.cpp.

    Args:
        rank, min_ratio: PowerSGD's options.
    """
    if rows <= 1 or cols <= 1 or max(rows, cols) >= 1 << 30 or rows * cols >= 1 << 40:
        return 0
    rank = min(rows, cols, rank)
    return rank if float((rows + cols) * rank) * min_ratio < float(rows * cols) else 0


def patterns(every: Sequence[str], some: Sequence[str]) -> List[str]:
    """Returns names and patterns for dense= ("layer1.*") that match exactly `some` of the names `every`."""
    wanted, found = set(some), []
    left = list(some)
    while left:
        name = left[0]
        parts = name.split(".")
        prefixes = [".".join(parts[:n]) + "." for n in range(1, len(parts))]
        whole = [p for p in prefixes if all(other in wanted for other in every if other.startswith(p))]
        found.append(f"{whole[0]}*" if whole else name)
        left = [other for other in left[1:] if not whole or not other.startswith(whole[0])]
    return found


def with_dense(spec: str, names: Sequence[str]) -> str:
    """Returns the spec with more dense tensors: names or patterns."""
    return f"{spec}{',' if ':' in spec else ':'}dense=+{'+'.join(names)}"


def without_dense(spec: str) -> str:
    """Reverses with_dense()."""
    position = spec.rfind("dense=+")
    return spec if position < 0 else spec[:position - 1]
