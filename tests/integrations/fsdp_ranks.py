"""Runs one rank of the FSDP2 tests, for fsdp_test.py.

Every rank runs the scenarios named on the command line, in order. A failed check ends the rank, and so the
test.
"""
from __future__ import annotations

import faulthandler
import sys

import torch
import torch.distributed as dist

import fsdp_auto
import fsdp_defaults
import fsdp_failures
import fsdp_features
import fsdp_low_rank
import fsdp_loss_scale
import fsdp_mesh
import fsdp_numbers
import fsdp_rule
import fsdp_types
import fsdp_undo
import fsdp_unused

SCENARIOS = {
    name: function
    for module in (fsdp_auto, fsdp_defaults, fsdp_failures, fsdp_features, fsdp_loss_scale, fsdp_low_rank,
                   fsdp_mesh, fsdp_numbers, fsdp_rule, fsdp_types, fsdp_undo, fsdp_unused)
    for name, function in vars(module).items()
    if callable(function) and getattr(function, "__module__", "") == module.__name__
}


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        SCENARIOS[name]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
