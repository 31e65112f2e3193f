"""Checks the arguments of gradwire.fsdp.compress()."""
from __future__ import annotations

import fnmatch
from typing import Callable, List, Optional, Sequence

import torch

from gradwire import _native
from gradwire._communicator import Communicator
from gradwire._fsdp_low_rank import LowRankSpec
from gradwire._spec import info_of, is_plain, split, stays_dense

_WHOLE_MATRICES = ("powersgd", "randk", "dion")


def check_spec(argument: str, spec: str) -> None:
    method, options = split(spec)
    if method in _WHOLE_MATRICES:
        raise _native.Unsupported(
            f"{argument}={spec!r} needs whole tensors, but FSDP2 gives each rank a slice: use a wire format, "
            "such as 'int4:rotate=hadamard', the smallest for gradients, or DistributedDataParallel with "
            "gradwire.torch.compress(). PowerSGD is a format of replicas, over the replicas of a 2-D mesh")
    for option in options:
        key = option.partition("=")[0]
        if argument == "weights" and key == "ef_decay":
            raise _native.BadArgument(f"weights={spec!r} has the option {option}, but only gradients have a "
                                      "residual")
        if key in ("ef", "residual", "dense"):
            raise _native.BadArgument(f"{argument}={spec!r} has the option {option}: pass compress() the "
                                      "argument residual or dense in its place (residual='off' for ef=off)")
    values, part = (torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(2))
    with Communicator() as alone:
        if argument == "weights":
            alone.all_gather(values, part, spec)
        else:
            alone.reduce_scatter(part, values, spec)


def dense_rule(dense: "bool | Sequence[str]", spec: str,
                low_rank: Optional[LowRankSpec] = None) -> Callable[[str, torch.Size], bool]:
    patterns: Optional[List[str]] = None
    if not isinstance(dense, bool):
        if isinstance(dense, str):
            raise _native.BadArgument(f"dense must be True, False or a sequence of names, not {dense!r}: "
                                      f"write [{dense!r}]")
        patterns = list(dense)

    def rule(name: str, shape: torch.Size) -> bool:
        if is_plain(spec):
            return False
        if low_rank is not None and low_rank.rank_of(shape) == 0:
            return True
        if patterns is None:
            if low_rank is not None:
                info = info_of(low_rank.spec, tuple(shape))
                return bool(dense) and info.bits < 8 and info.small
            return bool(dense) and stays_dense(shape, spec)
        return any(info_of(spec, tuple(shape)).small if p == "auto" else fnmatch.fnmatchcase(name, p)
                   for p in patterns)

    return rule
