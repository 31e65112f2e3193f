"""Memory of arrays, and handles of the library."""
from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, NamedTuple

from gradwire import _native


class Memory(NamedTuple):
    """A contiguous array: address, number of elements, gw_dtype and device."""

    address: int
    count: int  # type: ignore[assignment]  # not tuple's method
    dtype: int
    device: int


TORCH_DTYPES = {"torch.float32": _native.FLOAT32, "torch.bfloat16": _native.BFLOAT16,
                 "torch.float16": _native.FLOAT16}
_NUMPY_DTYPES = {"<f4": _native.FLOAT32, "<f2": _native.FLOAT16}


def memory_of(array: Any) -> Memory:
    """Returns the memory of a torch tensor or a numpy array.

    Raises:
        TypeError: the type or device is not supported.
        ValueError: the array is not contiguous, or is read-only.
    """
    if hasattr(array, "data_ptr"):
        dtype = TORCH_DTYPES.get(str(array.dtype))
        if dtype is None:
            raise TypeError(f"the tensor is {array.dtype}; expected float32, bfloat16 or float16")
        if not array.is_contiguous():
            raise ValueError("the tensor is not contiguous: reduce tensor.contiguous() and copy the result "
                             "back")
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f"the tensor is on {array.device}; expected cpu or cuda")
        device = _native.HOST if array.device.type == "cpu" else array.device.index
        return Memory(array.data_ptr(), array.numel(), dtype, device)
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"expected a torch tensor or a numpy array, not {type(array).__name__}")
    dtype = _NUMPY_DTYPES.get(interface["typestr"])
    if dtype is None:
        raise TypeError(f"the numpy array is {interface['typestr']}; expected float32 (<f4) or float16 (<f2)")
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous: reduce a contiguous copy")
    address, read_only = interface["data"]
    if read_only:
        raise ValueError("the array is read-only: reduce a writable copy")
    return Memory(address, array.size, dtype, _native.HOST)


class Handle:
    """A handle of the library, released by close() or when the object is collected."""

    def __init__(self, function: str, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._finalizer = weakref.finalize(self, destroy, function, handle)

    def close(self) -> None:
        """Blocks until work in flight is done, and releases the handle. May be called twice."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Returns whether close() was called."""
        return not self._finalizer.alive


def destroy(function: str, handle: ctypes.c_void_p) -> None:
    if _native.callbacks.running > 0:
        # The garbage collector runs this function inside a wire format's function, where destroying the
        # handle would deadlock.
        threading.Thread(target=destroy, args=(function, handle)).start()
        return
    try:
        _native.call(function, handle)
    except _native.BadHandle:  # in a fork of the process that created the handle
        pass
