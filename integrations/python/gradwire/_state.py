"""Splits a reducer's state (docs/checkpoints.md) by tensor, and joins it again.

PyTorch rebuilds its buckets after the first step, and each tensor's state must move to its new bucket.
"""
from __future__ import annotations

import struct
import zlib
from typing import Dict, Iterator, NamedTuple, Tuple

_HEADER = struct.Struct("<8sIIQqII")
_TENSOR, _ENTRY = struct.Struct("<qqQQ"), struct.Struct("<8sQQ")
_TENSOR_1 = struct.Struct("<qqQQQ")  # version 1 had two kinds, both float32
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


def entries_of(blob: bytearray) -> Iterator[Tuple[str, str, str, memoryview]]:
    """(tensor, kind, dtype, elements) of each entry of a gw_reducer_state_save, in its memory. Nothing is checked."""
    view, at = memoryview(blob), _HEADER.size
    count, identity_bytes = _HEADER.unpack_from(view)[-2:]
    at += identity_bytes
    for _ in range(count):
        _, _, entry_count, name_bytes = _TENSOR.unpack_from(view, at)
        at += _TENSOR.size + name_bytes
        name = bytes(view[at - name_bytes:at]).decode()
        for _ in range(entry_count):
            dtype_bytes, elements, kind_bytes = _ENTRY.unpack_from(view, at)
            at += _ENTRY.size + kind_bytes
            dtype, kind = dtype_bytes.rstrip(b"\0").decode(), bytes(view[at - kind_bytes:at]).decode()
            yield name, kind, dtype, view[at:at + _BYTES[dtype] * elements]
            at += _BYTES[dtype] * elements


def unpack(blob: "bytes | bytearray") -> State:
    """Parses the output of gw_reducer_state_save, of this version or version 1."""
    view = memoryview(blob)
    magic, version, crc, size, steps, count, identity_bytes = _HEADER.unpack_from(view)
    known = magic == _MAGIC and version in (1, _VERSION)
    if not known or size != len(view) or crc != zlib.crc32(view[_HEADER.size:]):
        raise ValueError(f"not a reducer's state of version 1 or {_VERSION}, or it is truncated or damaged")
    at = _HEADER.size

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        return bytes(view[at - n:at])

    identity = take(identity_bytes).decode()
    tensors = {}
    for _ in range(count):
        entries: Dict[str, Entry] = {}
        if version == 1:
            rows, cols, residual_count, factor_count, name_bytes = _TENSOR_1.unpack(take(_TENSOR_1.size))
            name = take(name_bytes).decode()
            for kind, elements in (("residual", residual_count), ("factor", factor_count)):
                if elements:
                    entries[kind] = Entry("F32", take(4 * elements))
        else:
            rows, cols, entry_count, name_bytes = _TENSOR.unpack(take(_TENSOR.size))
            name = take(name_bytes).decode()
            for _ in range(entry_count):
                dtype_bytes, elements, kind_bytes = _ENTRY.unpack(take(_ENTRY.size))
                dtype, kind = dtype_bytes.rstrip(b"\0").decode(), take(kind_bytes).decode()
                entries[kind] = Entry(dtype, take(_BYTES[dtype] * elements))
        tensors[name] = TensorState(rows, cols, entries)
    return State(identity, steps, tensors)


def pack(state: State) -> bytes:
    """The inverse of unpack()."""
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
