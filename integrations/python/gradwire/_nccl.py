"""Loads NCCL for the library."""
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os


def load_nccl() -> str:
    """Loads NCCL, so that the library finds it when it asks the dynamic linker for libnccl.so.2.

    In order of precedence: GRADWIRE_NCCL_LIBRARY; an NCCL that this process has loaded, as PyTorch does; the
    NCCL installed by pip; the NCCL that the dynamic linker finds.

    Returns:
        The version, such as "2.28.9"; "" if there is no NCCL.
    """
    chosen = os.environ.get("GRADWIRE_NCCL_LIBRARY")
    places = [(chosen, os.RTLD_NOW)] if chosen else [("libnccl.so.2", os.RTLD_NOW | os.RTLD_NOLOAD)]
    if not chosen:
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec("nvidia.nccl")
            places += [(os.path.join(folder, "lib", "libnccl.so.2"), os.RTLD_NOW)
                       for folder in (spec.submodule_search_locations or [] if spec else [])]
        places.append(("libnccl.so.2", os.RTLD_NOW))
    for path, mode in places:
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(path, mode=mode).ncclGetVersion(ctypes.byref(number))
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ""
