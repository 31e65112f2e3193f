"""Shows Gradwire's calls in torch.profiler: a range for each call, with format and bytes."""
from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.profiler import record_function


def during(spec: str, call: str, *tensors: torch.Tensor) -> "contextlib.AbstractContextManager[Any]":
    """Returns a context manager that records a blocking call as a range.

    Args:
        spec, call: the call's format and name.
        tensors: the tensors that are averaged or gathered, whose uncompressed bytes the range shows.
    """
    if not torch.autograd._profiler_enabled():
        return contextlib.nullcontext()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return record_function(f"gradwire {spec}: {call}, {size} bytes")


def until(future: Any, spec: str, call: str, *tensors: torch.Tensor) -> Any:
    """Records a range until `future` is done. Returns `future`, or a Future of the end of the range."""
    with during(spec, call, *tensors) as until_done:
        # The range belongs to this thread: the profiler does not record the thread that makes the call.
        return future if until_done is None else until_done._call_end_callbacks_on_future(future)
