"""Finds the DistributedDataParallel in the argument of compress()."""
from __future__ import annotations

import gc
from typing import Any, Dict, List

import torch

from gradwire import _native

PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" calls a hook for one gradient at a time, inside a '
    "compiled graph and without buckets: set it to True (its default) before wrapping the model in "
    "DistributedDataParallel")
_DDP = torch.nn.parallel.DistributedDataParallel
_DEPTH = 2  # levels of attributes, as in trainer.strategy.model


def the_ddp(given: Any) -> Any:
    """Returns the one DistributedDataParallel that `given` is, contains, or is wrapped in.

    Args:
        given: a model, such as torch.compile(ddp), a module that contains a DDP, or ddp.module; or a trainer
            with a DDP in its attributes.

    Raises:
        BadArgument: there is no DistributedDataParallel, or more than one.
    """
    found: Dict[int, Any] = {}
    _search(given, _DEPTH, found, set())
    if not found and isinstance(given, torch.nn.Module):
        found = _around(given)
        if len(found) > 1:  # one DDP may be garbage in a reference cycle
            found.clear()
            gc.collect()
            found = _around(given)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise _native.BadArgument(_not_ddp(given))
    raise _native.BadArgument(f"{_named(given)} has {len(found)} DistributedDataParallel models, but a hook "
                              "is for one: call compress() for each")


def may_skip(parameters: List[torch.Tensor]) -> bool:
    """Returns whether a step of the DDP that has these parameters may not use some of them."""
    wanted = {id(p) for p in parameters[:1]}
    return any(getattr(ddp, "find_unused_parameters", False) for ddp in gc.get_objects()
               if issubclass(type(ddp), _DDP) and getattr(ddp, "module", None) is not None
               and any(id(p) in wanted for p in ddp.module.parameters()))


def _around(given: torch.nn.Module) -> Dict[int, Any]:
    return {id(ddp): ddp for ddp in gc.get_objects() if issubclass(type(ddp), _DDP)
            and getattr(ddp, "module", None) is given}  # a DDP whose constructor failed has no module


def _search(given: Any, depth: int, found: Dict[int, Any], seen: "set[int]") -> None:
    if id(given) in seen:
        return
    seen.add(id(given))
    if issubclass(type(given), torch.nn.Module):  # isinstance() would follow weak proxies
        found.update((id(module), module) for module in given.modules() if isinstance(module, _DDP))
    elif depth > 0 and not issubclass(type(given), (list, tuple, dict, type)):
        for value in _attributes(given):
            _search(value, depth - 1, found, seen)


def _attributes(given: Any) -> List[Any]:
    try:
        return list(vars(given).values())
    except (TypeError, ReferenceError):
        return []


def _named(given: Any) -> str:
    kind = type(given).__name__
    inside = getattr(given, "module", None)
    return f"{kind}({type(inside).__name__})" if isinstance(inside, torch.nn.Module) else kind


def _not_ddp(model: Any) -> str:
    """Returns the error for a model without DDP. Compares class names: some PyTorch versions lack them."""
    classes = [c.__name__ for c in type(model).__mro__]
    if "FSDPModule" in classes and "ReplicateModule" not in classes:
        return "the model is sharded by fully_shard(): use gradwire.fsdp.compress(model, gradients=spec)"
    if "FullyShardedDataParallel" in classes:
        return ("the model is a FullyShardedDataParallel (FSDP1): shard it with "
                "torch.distributed.fsdp.fully_shard() and use gradwire.fsdp.compress(model, gradients=spec)")
    if "ReplicateModule" not in classes and hasattr(model, "register_comm_hook"):
        return (f"{_named(model)} is not a DistributedDataParallel, but accepts its hooks: call "
                "model.register_comm_hook(Hook(spec, model=model), allreduce_hook)")
    if "Module" not in classes:
        return (f"{_named(model)} is not a model and has no DistributedDataParallel: pass compress() the "
                "DistributedDataParallel")
    return (f"{_named(model)} is not a DistributedDataParallel and does not contain one: wrap the model "
            "first, ddp_model = torch.nn.parallel.DistributedDataParallel(model)")
