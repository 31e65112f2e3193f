"""Compresses the model of a training framework, whatever wraps it, with one state for rank 0's checkpoint."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Union

import torch.distributed as dist

from gradwire._process_group import normal_tensors
from gradwire.torch import compress

_log = logging.getLogger("gradwire")


class Attached:
    """The compression of a model that DistributedDataParallel or fully_shard() distributes.

    With one rank there is nothing to compress: then a warning is logged, and the state is empty.

    Args:
        model: the DistributedDataParallel, a model inside of one, or a model sharded by fully_shard().
        spec: see gradwire.torch.Hook. With fully_shard(), the format of the gradients.
        scaler: the GradScaler of the training loop, or None.
        options: of gradwire.torch.compress() or gradwire.fsdp.compress().
    """

    def __init__(self, model: Any, spec: str, scaler: Any = None, **options: Any) -> None:
        self.handle: Any = None
        self._sharded = any(base.__name__ == "FSDPModule" for base in type(model).__mro__)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            _log.warning("%s: nothing is compressed, because this run has one rank", spec)
            return
        if self._sharded:
            from gradwire import fsdp
            self.handle = fsdp.compress(model, gradients=spec, **options)
            self._group = dist.new_group(backend="gloo")  # gathers on the host, not in the GPUs' memory
        else:
            self.handle = compress(model, spec, **options)
        if scaler is not None and scaler.is_enabled():
            self.handle.use_scaler(scaler)

    def state_dict(self) -> Dict[str, Any]:
        """Returns the states of all ranks on rank 0, in its host memory. On other ranks, their own. Collective."""
        if self.handle is None:
            return {}
        state: Dict[str, Any] = self.handle.state_dict()
        if not self._sharded:
            return state  # already gathered
        states: Optional[List[Any]] = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with normal_tensors():
            dist.gather_object(state, states, group=self._group)
        return {"ranks": states or [state]}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restores rank 0's state_dict(), on every rank. Does nothing with the state of a run of one rank."""
        if self.handle is not None and state:
            loaded: Union[Dict[str, Any], List[Any]] = state.get("ranks", state)
            self.handle.load_state_dict(loaded)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
