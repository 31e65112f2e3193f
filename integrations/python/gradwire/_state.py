"""The layout of a reducer's state (docs/state-format.md), for taking states apart by tensor and putting them together.

PyTorch regroups its buckets after the first step, and a state must follow its tensors into their new bucket.
"""
from __future__ import annotations

import struct
import zlib
from typing import Dict, NamedTuple

_HEADER = struct.Struct("<8sIIQqII")
_TENSOR = struct.Struct("<qqqqQ")
_MAGIC, _VERSION = b"GRADWIRE", 1


class TensorState(NamedTuple):
    """What is kept of one (rows, cols) tensor; residual and q are little-endian float32, empty where nothing is kept."""

    rows: int
    cols: int
    residual: bytes
    q: bytes


class State(NamedTuple):
    """A reducer's state. `identity` is what the loading reducer must agree in."""

    identity: str
    steps: int
    tensors: Dict[str, TensorState]


def unpack(blob: "bytes | bytearray") -> State:
    """Takes apart what gw_reducer_state_save wrote."""
    view = memoryview(blob)
    magic, version, crc, size, steps, count, identity_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or size != len(view) or crc != zlib.crc32(view[_HEADER.size:]):
        raise ValueError("this is not a whole state of version 1")
    at = _HEADER.size
    identity = bytes(view[at:at + identity_bytes]).decode()
    at += identity_bytes
    tensors = {}
    for _ in range(count):
        rows, cols, residual_count, q_count, name_bytes = _TENSOR.unpack_from(view, at)
        at += _TENSOR.size
        name = bytes(view[at:at + name_bytes]).decode()
        at += name_bytes
        residual = bytes(view[at:at + 4 * residual_count])
        at += 4 * residual_count
        tensors[name] = TensorState(rows, cols, residual, bytes(view[at:at + 4 * q_count]))
        at += 4 * q_count
    return State(identity, steps, tensors)


def pack(state: State) -> bytes:
    """The inverse of unpack()."""
    identity = state.identity.encode()
    parts = [identity]
    for name, t in state.tensors.items():
        encoded = name.encode()
        parts += [_TENSOR.pack(t.rows, t.cols, len(t.residual) // 4, len(t.q) // 4, len(encoded)), encoded, t.residual,
                  t.q]
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(body), _HEADER.size + len(body), state.steps, len(state.tensors),
                        len(identity)) + body
