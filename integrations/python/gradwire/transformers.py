"""Gradwire for transformers' Trainer: a callback.

    trainer = Trainer(model, arguments, callbacks=[gradwire.transformers.Compress("int8")], ...)
"""
from __future__ import annotations

import logging
import math
import os
import pathlib
from typing import Any

import torch

from gradwire import _native
from gradwire._attach import Attached
from gradwire._find_ddp import the_ddp
from gradwire._hook import Hook

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise _native.Unsupported("gradwire.transformers needs transformers: pip install transformers") from error

__all__ = ["Compress"]

_FILE = "gradwire.pt"
_log = logging.getLogger("gradwire")


class Compress(TrainerCallback):
    """Compresses gradients under DistributedDataParallel, and saves the residuals in the Trainer's checkpoints.

    trainer.train(resume_from_checkpoint=...) continues with the residuals in the checkpoint's gradwire.pt.

    Args:
        spec: see gradwire.torch.Hook.
        options: of gradwire.torch.compress().
    """

    def __init__(self, spec: str = "int8", **options: Any) -> None:
        Hook(spec, **options).close()  # wrong arguments must fail here, not when training begins
        self._spec, self._options = spec, options
        self._attached: "Attached | None" = None
        self._wrapped: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Compresses the model, after the Trainer has wrapped it, and loads the checkpoint's residuals."""
        scaler = getattr(more.get("optimizer"), "scaler", None)
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        wrapped = the_ddp(more["model"]) if several else more["model"]
        if self._attached is None or self._wrapped is not wrapped:
            self._close()
            self._attached = Attached(wrapped, self._spec, scaler, **self._options)
            self._wrapped = wrapped
        if state.global_step == 0 or self._attached.handle is None:
            return
        given = args.resume_from_checkpoint
        file = pathlib.Path(given if isinstance(given, str) else _folder(args, state), _FILE)
        if file.exists():
            saved = torch.load(file, map_location="cpu")
            if math.isclose(saved["squares"], _squares(more["model"]), rel_tol=1e-9):
                self._attached.load_state_dict(saved["hook"])
            else:
                _log.warning("%s was saved with other weights than this checkpoint's, at step %d: residuals "
                             "begin at zero", file, saved["step"])
        else:
            _log.warning("%s does not exist: residuals begin at zero", file)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Adds the residuals of all ranks to the checkpoint. The Trainer calls it on every rank."""
        if self._attached is None or self._attached.handle is None or args.save_only_model:
            return
        saved = self._attached.state_dict()
        folder = _folder(args, state)
        if torch.distributed.get_rank() != 0:
            return
        if not folder.is_dir():  # a hyperparameter search has other folders
            _log.warning("%s does not exist: the residuals are not saved", folder)
            return
        torch.save({"step": state.global_step, "squares": _squares(more["model"]), "hook": saved},
                   folder / (_FILE + ".new"))
        os.replace(folder / (_FILE + ".new"), folder / _FILE)  # never a part of a file

    def _close(self) -> None:
        if self._attached is not None:
            self._attached.close()
            self._attached = None


def _squares(model: Any) -> float:
    """Returns the sum of the squares of all weights, which tells one run's checkpoints from another's."""
    with torch.no_grad():
        return float(sum(p.double().square().sum().item() for p in model.parameters()))


def _folder(args: Any, state: Any) -> pathlib.Path:
    return pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}")
