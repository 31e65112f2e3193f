"""Gradwire's calls in torch.profiler: each is a range with its format and its bytes."""
from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.profiler import record_function


def during(spec: str, call: str, *tensors: torch.Tensor) -> "contextlib.AbstractContextManager[Any]":
    """A range for a call that returns when it is done. tensors: what is averaged or gathered, uncompressed."""
    if not torch.autograd._profiler_enabled():
        return contextlib.nullcontext()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return record_function(f"gradwire {spec}: {call}, {size} bytes")


def until(future: Any, spec: str, call: str, *tensors: torch.Tensor) -> Any:
    """A range from now until `future` is done. Returns `future`, or one that is done when the range has ended."""
    with during(spec, call, *tensors) as until_done:
        # The range is one of this thread, which the profiler records. It does not record the thread that makes the call.
        return future if until_done is None else until_done._call_end_callbacks_on_future(future)
