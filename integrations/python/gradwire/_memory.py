"""Memory of arrays, and handles of the library."""
from __future__ import annotations

import ctypes
import sys
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
    """Returns the memory of a torch tensor or a numpy array, which the library reads and writes.

    Raises:
        TypeError: the object is not a tensor or array with memory of its own, or its type or device is not
            supported.
        ValueError: the array is not contiguous, or is read-only.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return _memory_of_tensor(array, torch)
    name = type(array).__name__
    if numpy is not None and isinstance(array, numpy.generic):
        raise TypeError(f"a NumPy scalar ({name}) cannot be written: pass numpy.array([x]), or x[i:i + 1] in "
                        "place of x[i]")
    if numpy is None or not isinstance(array, numpy.ndarray):
        raise TypeError(f"expected a torch tensor or a numpy array, not {name}")
    if any(base.__name__ == "MaskedArray" for base in type(array).__mro__):
        raise TypeError("masked values of a MaskedArray would be reduced, too: pass array.filled(0)")
    kind = array.dtype.str
    dtype = _NUMPY_DTYPES.get(kind)
    if dtype is None:
        raise TypeError(f"the numpy array is {kind}; expected float32 (<f4) or float16 (<f2)")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError("the array is not contiguous: reduce a contiguous copy")
    if not array.flags.writeable:
        raise ValueError("the array is read-only: reduce a writable copy")
    return Memory(array.ctypes.data, array.size, dtype, _native.HOST)


def _memory_of_tensor(tensor: Any, torch: Any) -> Memory:
    name = type(tensor).__name__
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        raise TypeError(f"a {name if tensor.layout == torch.strided else 'sparse tensor'} has no memory of its "
                        "own: pass a plain tensor, such as to_local() of a DTensor")
    dtype = TORCH_DTYPES.get(str(tensor.dtype))
    if dtype is None:
        raise TypeError(f"the tensor is {tensor.dtype}; expected float32, bfloat16 or float16")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"the tensor is on {tensor.device}; expected cpu or cuda")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError("the tensor is not contiguous: reduce tensor.contiguous() and copy the result back")
    device = _native.HOST if tensor.device.type == "cpu" else tensor.device.index
    return Memory(tensor.data_ptr(), tensor.numel(), dtype, device)


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
