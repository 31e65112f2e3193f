"""Memory of arrays, and handles of the library."""
from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, NamedTuple

from gradwire import _native


class Memory(NamedTuple):
    """A contiguous array: address, number of elements, type and device."""

    address: int
    count: int  # type: ignore[assignment]  # not tuple's method
    dtype: int
    device: int


TORCH_DTYPES = {"torch.float32": _native.FLOAT32, "torch.bfloat16": _native.BFLOAT16,
                 "torch.float16": _native.FLOAT16}
_NUMPY_DTYPES = {"<f4": _native.FLOAT32, "<f2": _native.FLOAT16}


def memory_of(array: Any) -> Memory:
    """The memory of a torch tensor or a numpy array, which must be contiguous and of a supported type."""
    if hasattr(array, "data_ptr"):
        dtype = TORCH_DTYPES.get(str(array.dtype))
        if dtype is None:
            raise TypeError(f"a tensor of {array.dtype} is not supported; use float32, bfloat16 or float16")
        if not array.is_contiguous():
            raise ValueError("the tensor is not contiguous; reduce tensor.contiguous() and copy it back")
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f"a tensor on {array.device} is not supported; use cpu or cuda")
        device = _native.HOST if array.device.type == "cpu" else array.device.index
        return Memory(array.data_ptr(), array.numel(), dtype, device)
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"{type(array).__name__} is neither a torch tensor nor a numpy array")
    dtype = _NUMPY_DTYPES.get(interface["typestr"])
    if dtype is None:
        raise TypeError(f"a numpy array of {interface['typestr']} is not supported; "
                        "use float32 (<f4) or float16 (<f2)")
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous; reduce a contiguous copy")
    address, read_only = interface["data"]
    if read_only:
        raise ValueError("the array is read-only; reduce a writable copy")
    return Memory(address, array.size, dtype, _native.HOST)


class Handle:
    """A handle of the library, released by close() or with the object."""

    def __init__(self, function: str, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._finalizer = weakref.finalize(self, destroy, function, handle)

    def close(self) -> None:
        """Waits for work in flight and releases the handle. May be called twice."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """True after close()."""
        return not self._finalizer.alive


def destroy(function: str, handle: ctypes.c_void_p) -> None:
    if _native.callbacks.running > 0:
        # The garbage collector found it while a wire format's function ran, for which this would wait.
        threading.Thread(target=destroy, args=(function, handle)).start()
        return
    try:
        _native.call(function, handle)
    except _native.BadHandle:  # in a fork of the process that created it
        pass
