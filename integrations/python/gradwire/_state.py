"""Splits a reducer's state (docs/checkpoints.md) by tensor, and joins it again.

PyTorch rebuilds its buckets after the first step, and each tensor's state must move to its new bucket.
"""
from __future__ import annotations

import struct
import zlib
from typing import Dict, Iterator, NamedTuple, Tuple

_HEADER = struct.Struct("<8sIIQqII")
_TENSOR, _ENTRY = struct.Struct("<qqQQ"), struct.Struct("<8sQQ")
_MAGIC, _VERSION = b"GRADWIRE", 2
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


class Entry(NamedTuple):
    """Part of a tensor's state: little-endian elements. `dtype` is a safetensors name such as "F32"."""

    dtype: str
    data: bytes


class TensorState(NamedTuple):
    """The state of one (rows, cols) tensor by kind: "residual", PowerSGD's "factor", ..."""

    rows: int
    cols: int
    entries: Dict[str, Entry]


class State(NamedTuple):
    """A reducer's state. The reducer that loads it must have the same `identity`."""

    identity: str
    steps: int
    tensors: Dict[str, TensorState]


def _walk(view: memoryview) -> Iterator[Tuple[str, int, int, Iterator[Tuple[str, str, memoryview]]]]:
    """Yields (tensor, rows, cols, its entries) from the memory of a state.

    An entry is (kind, dtype, elements). Read all entries of a tensor before the next tensor.
    """
    at = _HEADER.size + _HEADER.unpack_from(view)[-1]

    def text(size: int) -> str:
        nonlocal at
        at += size
        return bytes(view[at - size:at]).decode()

    def entries(count: int) -> Iterator[Tuple[str, str, memoryview]]:
        nonlocal at
        for _ in range(count):
            dtype_bytes, elements, kind_bytes = _ENTRY.unpack_from(view, at)
            at += _ENTRY.size
            kind, dtype = text(kind_bytes), dtype_bytes.rstrip(b"\0").decode()
            at += _BYTES[dtype] * elements
            yield kind, dtype, view[at - _BYTES[dtype] * elements:at]

    for _ in range(_HEADER.unpack_from(view)[-2]):
        rows, cols, count, name_bytes = _TENSOR.unpack_from(view, at)
        at += _TENSOR.size
        yield text(name_bytes), rows, cols, entries(count)


def entries_of(blob: bytearray) -> Iterator[Tuple[str, str, str, memoryview]]:
    """Yields (tensor, kind, dtype, elements) of each entry of a state from gw_reducer_state_save.

    The elements are in the memory of `blob`, which is not validated.
    """
    for name, _, _, entries in _walk(memoryview(blob)):
        for kind, dtype, elements in entries:
            yield name, kind, dtype, elements


def unpack(blob: "bytes | bytearray") -> State:
    """Parses the output of gw_reducer_state_save."""
    view = memoryview(blob)
    magic, version, crc, size, steps, _, identity_bytes = _HEADER.unpack_from(view)
    if (magic, version, size, crc) != (_MAGIC, _VERSION, len(view), zlib.crc32(view[_HEADER.size:])):
        raise ValueError(f"not a reducer's state of version {_VERSION}, or it is truncated or damaged")
    identity = bytes(view[_HEADER.size:_HEADER.size + identity_bytes]).decode()
    return State(identity, steps, {
        name: TensorState(rows, cols, {kind: Entry(dtype, bytes(data)) for kind, dtype, data in entries})
        for name, rows, cols, entries in _walk(view)})


def pack(state: State) -> bytes:
    """Inverts unpack(): returns the bytes of a state."""
    identity = state.identity.encode()
    parts = [identity]
    for name, t in state.tensors.items():
        encoded = name.encode()
        parts += [_TENSOR.pack(t.rows, t.cols, len(t.entries), len(encoded)), encoded]
        for kind, entry in t.entries.items():
            encoded = kind.encode()
            elements = len(entry.data) // _BYTES[entry.dtype]
            parts += [_ENTRY.pack(entry.dtype.encode(), elements, len(encoded)), encoded, entry.data]
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(body), _HEADER.size + len(body), state.steps,
                        len(state.tensors), len(identity)) + body
