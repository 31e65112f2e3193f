"""Gradwire for Hugging Face Accelerate: one line after accelerator.prepare().

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    gradwire.accelerate.compress(accelerator, model, "int8")
"""
from __future__ import annotations

from typing import Any

from gradwire._attach import Attached

__all__ = ["compress"]


def compress(accelerator: Any, model: Any, spec: str = "int8", **options: Any) -> Attached:
    """Compresses a prepared model's gradients, and saves the residuals with accelerator.save_state().

    Call it once on every rank, after accelerator.prepare() and before accelerator.load_state(). The order of
    calls that register objects for checkpoints must be the same in the run that loads.

    Args:
        accelerator: the Accelerator.
        model: the prepared model: a DistributedDataParallel, or sharded by fully_shard() (fsdp_version=2).
        spec: see gradwire.torch.Hook. With fully_shard(), the format of the gradients.
        options: of gradwire.torch.compress(); with fully_shard(), of gradwire.fsdp.compress().

    Returns:
        The registered object. Its `handle` is the gradwire.torch.Hook or gradwire.fsdp.Compression; None with
        one rank.
    """
    attached = Attached(model, spec, getattr(accelerator, "scaler", None), **options)
    accelerator.register_for_checkpointing(attached)
    return attached
