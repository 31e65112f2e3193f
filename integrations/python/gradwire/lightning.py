"""Gradwire for Lightning: a callback.

    trainer = lightning.Trainer(strategy="ddp", callbacks=[gradwire.lightning.Compress("int8")])

With Fabric: hook = gradwire.torch.compress(model), where model is the result of fabric.setup(); and the hook as
one more object of fabric.save() and fabric.load().
"""
from __future__ import annotations

from typing import Any, Dict

from gradwire import _native
from gradwire._attach import Attached
from gradwire._hook import Hook

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise _native.Unsupported("gradwire.lightning needs Lightning: pip install lightning") from error

__all__ = ["Compress"]


class Compress(Callback):
    """Compresses gradients with strategy="ddp", and saves the residuals in the trainer's checkpoints.

    trainer.fit(ckpt_path=...) continues with the residuals of the checkpoint, also with another number of
    ranks. A weights-only checkpoint contains no residuals. The model stays compressed after fit(), so that
    trainer.save_checkpoint() has the residuals.

    Args:
        spec: see gradwire.torch.Hook.
        options: of gradwire.torch.compress().
    """

    def __init__(self, spec: str = "int8", **options: Any) -> None:
        Hook(spec, **options).close()  # wrong arguments must fail here, not when training begins
        self._spec, self._options = spec, options
        self._attached: "Attached | None" = None
        self._loaded: Dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if getattr(trainer.strategy, "_ddp_comm_hook", None) is not None:
            raise _native.BadArgument("the strategy has a ddp_comm_hook, which Compress replaces (and which "
                                      "Lightning ignores on the CPU): remove it")
        if self._attached is not None:
            self._attached.close()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attached = Attached(trainer.strategy.model, self._spec, scaler, **self._options)
        self._attached.load_state_dict(self._loaded)
        self._loaded = {}

    def state_dict(self) -> Dict[str, Any]:
        """Returns the residuals of all ranks on rank 0. Lightning calls it on every rank."""
        return self._loaded if self._attached is None else self._attached.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Keeps the state until training starts, when the model has its strategy's wrapper."""
        self._loaded = state_dict
