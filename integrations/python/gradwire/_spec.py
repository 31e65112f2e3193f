"""Compression specs: what the library says about them, their texts, and wire formats written in Python."""
from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from gradwire import _native


class Info(NamedTuple):
    """What a spec does to a tensor: the fields of gw_spec_info."""

    method: str
    wire: str
    bits: float
    exact: bool
    small: bool
    rank: int
    alternate: bool
    start: int
    seed: int


def matrix(shape: Sequence[int]) -> Tuple[int, int]:
    """Returns (rows, cols) of a tensor for the library: the first dimension, and the product of the others."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


@functools.lru_cache(maxsize=4096)
def info_of(spec: str, shape: Tuple[int, ...] = ()) -> Info:
    """Returns what the library says about a spec and a tensor. Raises BadArgument if the spec is invalid."""
    found = _native.SpecInfo()
    _native.call("gw_spec_query", _native.text(spec, "the spec"), *matrix(shape), ctypes.byref(found))
    return Info(found.method.decode(), found.wire.decode(), found.bits, bool(found.exact), bool(found.small),
                found.rank, bool(found.alternate), found.start, found.seed)


def split(spec: str) -> Tuple[str, List[str]]:
    """Returns the method's name and the options, as "key=value". Raises TypeError if `spec` is not a str."""
    if not isinstance(spec, str):
        raise TypeError('spec must be a str such as "int8" or "powersgd:rank=4" (docs/formats.md), not '
                        f"{spec!r}")
    method, *options = spec.replace(":", ",", 1).split(",")
    return method, [option for option in options if option]


def method_of(spec: str) -> str:
    """Returns the method's name."""
    return split(spec)[0]


def with_options(spec: str, *options: str) -> str:
    """Returns `spec` with more options, each "key=value"."""
    separator = "," if ":" in spec or "," in spec else ":"
    return spec + (separator + ",".join(options) if options else "")


def encoded_once(spec: str) -> str:
    """Returns `spec`, by default with schedule=two_shot: each rank encodes once, and the owner adds."""
    given = any(option.startswith("schedule=") for option in split(spec)[1])
    return spec if given else with_options(spec, "schedule=two_shot")


def is_plain(spec: str) -> bool:
    return method_of(spec) == "fp32"


def stays_dense(shape: Sequence[int], spec: str) -> bool:
    """Returns whether a tensor of this shape is small, and the wire format has fewer than 16 bits."""
    info = info_of(spec, tuple(shape))
    return info.small and info.bits < 16


# ---- Registered formats ------------------------------------------------------------------------------------

# The library may call them until the process ends.
_kept: List[Any] = []


def register_format(name: str, *, block: int, bytes: int, encode: Callable[[Any], Any],
                    decode: Callable[[Any], Any]) -> None:
    """Registers a custom wire format in this process. Every spec can then contain `name`. Host only.

    Call it on every rank with the same functions. Ranks whose block or bytes differ get CommFailed in the
    first call that uses the format. Registering a name again with the same block and bytes, as a notebook or
    a reload does, replaces the functions. register_format() tries both functions on random blocks.

    Error feedback works as for other formats. A call covers many blocks, up to 2**20 values, so a bucket
    takes few calls into Python. The arrays are copies, which the functions may change or keep. The last block
    of a chunk is padded with zeros. The functions run on other threads, and concurrently where ranks are
    threads: they should not change shared state.

    Args:
        name: letters, digits and '_'. allreduce_(t, "mine"), Reducer(comm, "mine:schedule=ring", ...),
            Hook("mine"), Hook("powersgd:rank=4,wire=mine").
        block: values per block, 1 to 65536.
        bytes: bytes per encoded block, 1 to 1048576.
        encode: float32 array (n, block) -> uint8 array (n, bytes).
        decode: uint8 array (n, bytes) -> float32 array (n, block). Must depend on the bytes alone, so that
            all ranks get the same bits. Should return NaN where a value was NaN or infinite, so that the
            error shows.

    Raises:
        BadArgument: the name or a size is invalid; the name is a built-in format, or registered with other
            sizes; a function raised, or returned an array of the wrong shape or type. When a function fails
            later, the call that uses the format raises CommFailed on every rank. On this rank the function's
            error is its cause.
    """
    import numpy as np

    def callback(function: Callable[[Any], Any], taken: Tuple[int, Any], given: Tuple[int, Any]) -> Any:
        def run(_user: Optional[int], source: int, blocks: int, destination: int) -> Optional[int]:
            _native.callbacks.running += 1
            try:
                array = np.empty((blocks, taken[0]), taken[1])
                ctypes.memmove(array.ctypes.data, source, array.nbytes)
                result = function(array)
                if not isinstance(result, np.ndarray) or result.dtype != given[1] \
                        or result.shape != (blocks, given[0]) or hasattr(result, "mask"):
                    return _native.failed(f"returned {_described(result)}, expected "
                                          f"{np.dtype(given[1])} of shape {(blocks, given[0])}")
                result = np.ascontiguousarray(result)
                ctypes.memmove(destination, result.ctypes.data, result.nbytes)
                return None
            except BaseException as error:  # ctypes would print it and continue
                return _native.failed(f"raised {type(error).__name__}: {error}", error)
            finally:
                _native.callbacks.running -= 1

        return _native.FormatCallback(run)

    values, encoded = (block, np.float32), (bytes, np.uint8)
    format = _native.Format(name=_native.text(name, "the format's name"), block=block, bytes=bytes,
                            encode=callback(encode, values, encoded),
                            decode=callback(decode, encoded, values))
    _kept.append(format)
    _native.call("gw_format_register", ctypes.byref(format))


def _described(result: Any) -> str:
    if hasattr(result, "dtype") and hasattr(result, "shape"):
        kind = "" if type(result).__module__ == "numpy" else f" ({type(result).__name__})"
        return f"{result.dtype} of shape {tuple(result.shape)}{kind}"
    return type(result).__name__
