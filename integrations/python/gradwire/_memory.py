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
        address, dtype = address_of(array), TORCH_DTYPES.get(str(array.dtype))
        if dtype is None:
            raise TypeError(f"the tensor is {array.dtype}; expected float32, bfloat16 or float16")
        return Memory(address, array.numel(), dtype, array.device.index if array.is_cuda else _native.HOST)
    name = type(array).__name__
    if numpy is not None and isinstance(array, numpy.generic):
        raise TypeError(f"a NumPy scalar ({name}) is a copy, which cannot be written: pass "
                        "numpy.array([x]), or a[i:i + 1] in place of a[i]")
    if numpy is None or not isinstance(array, numpy.ndarray):
        raise TypeError(f"expected a torch tensor or a numpy array, not {name}")
    if hasattr(array, "mask") and hasattr(array, "filled"):
        raise TypeError(f"a {name}'s masked values would be reduced: pass array.filled(0)")
    dtype = _NUMPY_DTYPES.get(array.dtype.str)
    if dtype is None:
        raise TypeError(f"the numpy array is {array.dtype.str}; expected float32 (<f4) or float16 (<f2)")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError("the array is not contiguous or not aligned: reduce array.copy() and copy the "
                         "result back")
    if not array.flags.writeable:
        raise ValueError("the array is read-only: reduce a writable copy")
    return Memory(array.ctypes.data, array.size, dtype, _native.HOST)


def address_of(tensor: Any) -> int:
    """Returns the address of a contiguous torch tensor, of any type, on the host or a CUDA device.

    Raises:
        TypeError: the tensor has no memory of its own there.
        ValueError: the tensor is not contiguous, or its memory was released.
    """
    torch, name = sys.modules["torch"], type(tensor).__name__
    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} has no contiguous memory: pass to_dense()")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"a {name} has no memory of its own: pass a plain tensor (of a DTensor, to_local())")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"the tensor is on {tensor.device}; expected cpu or cuda")
    try:
        storage = getattr(tensor, "untyped_storage", tensor.storage)()
        address, end = int(tensor.data_ptr()), tensor.storage_offset() + tensor.numel()
    except (RuntimeError, ValueError) as error:  # inside of torch.func's transforms; uninitialized parameters
        raise TypeError(f"a {name} has no memory of its own here: {error}") from error
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError("the tensor is not contiguous, or a negative view: reduce "
                         "tensor.resolve_neg().contiguous() and copy the result back")
    if tensor.numel() > 0 and storage.nbytes() < end * tensor.element_size():
        raise ValueError("the tensor's memory was released: its storage was resized")
    return address


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
