"""Laws that hold for every way to average with Gradwire: DDP, FSDP2, the backend, JAX, and bare calls.

Each rank passes its own NumPy arrays. `everyones` returns the arrays of all ranks; by default over PyTorch's
default process group.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List

import numpy as np

Arrays = Dict[str, Any]  # by the tensor's name


def of_all_ranks(value: Any) -> List[Any]:
    import torch.distributed as dist
    everyones: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def ranks_agree(what: str, *arrays: Any, everyones: Callable[[Any], List[Any]] = of_all_ranks) -> None:
    """Checks that all ranks have the same bits."""
    bits = everyones([np.ascontiguousarray(a).tobytes() for a in arrays])
    different = [rank for rank, other in enumerate(bits) if other != bits[0]]
    assert not different, f"{what}: ranks {different} have other bits than rank 0"


def nothing_is_lost(what: str, given: Arrays, before: Arrays, mean: Arrays, after: Arrays,
                    limit: float = 1e-5, extra: "Arrays | None" = None,
                    everyones: Callable[[Any], List[Any]] = of_all_ranks, ranks: int = 0) -> None:
    """Checks that gradients and residuals before a step add up to means and residuals after it.

    extra: gradients of ranks that no longer take part, but are in the means. ranks: the number of ranks in
    the means, if it is another than now.
    """
    mine = {name: (np.float64(given[name]) + before[name], np.float64(after[name])) for name in given}
    all_ranks = everyones(mine)
    for name in given:
        put_in = sum(each[name][0] for each in all_ranks) + (extra[name] if extra else 0)
        found = (ranks or len(all_ranks)) * np.float64(mean[name]) + sum(each[name][1] for each in all_ranks)
        lost = float(np.linalg.norm(found - put_in)) / max(float(np.linalg.norm(put_in)), 1e-30)
        assert lost <= limit or not put_in.any() and not found.any(), f"{what}: {lost:.1e} of {name} is lost"


def near(what: str, got: Any, exact: Any, most: float, least: float = 0.0, scale: Any = None) -> float:
    """Checks a relative error, and returns it. `least` above 0: the result must have been compressed."""
    norm = float(np.linalg.norm(exact if scale is None else scale))
    error = float(np.linalg.norm(np.asarray(got) - np.asarray(exact))) / max(norm, 1e-30)
    assert least <= error <= most, f"{what}: {error:.1e} off, expected {least:g} to {most:g}"
    return error


def same_bits(some: Any, others: Any) -> bool:
    """Compares nested states; arrays and tensors by their bits."""
    if isinstance(some, dict):
        return some.keys() == others.keys() and all(same_bits(some[key], others[key]) for key in some)
    if isinstance(some, (list, tuple)):
        return len(some) == len(others) and all(map(same_bits, some, others))
    if hasattr(some, "detach"):
        return bool(some.detach().equal(others.detach()))
    return np.array_equal(some, others)
