"""Tests that PowerSGD over replicas compresses the same matrices as the library."""
from __future__ import annotations

import math

import gradwire
from gradwire._process_group import communicator
from gradwire._reducer import unpack

from fsdp_low_rank import Sharded, gradients_of, meshes
from rank import check, say


def the_library_and_fsdp_compress_the_same_matrices() -> None:
    """Compares which matrices have a factor, for shapes at the limits of the rule."""
    shapes = {"small": (30, 30), "below": (31, 33), "least": (32, 32), "wide": (2, 700), "narrow": (700, 2),
              "row": (1, 2000), "column": (2000, 1), "filter": (40, 4, 3, 3), "vector": (3000,)}
    world, mesh = communicator(), meshes()[0]
    found = set()
    for options in ("rank=1", "rank=2,min_ratio=0", "rank=1,min_ratio=0.5", "rank=500,min_ratio=1",
                    "rank=8,min_ratio=15"):
        for wire in ("fp32", "int8", "int4", "int2", "topk,k=4,of=64"):
            spec = f"powersgd:{options},wire={wire}"
            library = gradwire.Reducer(world, spec, [(n, s[0], math.prod(s[1:])) for n, s in shapes.items()])
            own = gradients_of(1, 0, shapes)
            library.allreduce([g.clone() for g in own.values()])
            tensors = unpack(library.save_state()).tensors
            theirs = {name for name, t in tensors.items() if "factor" in t.entries}
            run = Sharded(mesh, spec, shapes)
            run.step(own)
            check(run.factors().keys() == theirs, f"{spec}: {sorted(run.factors().keys() ^ theirs)}")
            found.add(frozenset(theirs))
            library.close()
            run.handle.close()
    check(len(found) >= 5, f"only {found}")
    world.close()
    say(f"25 specs compress the library's matrices: {len(found)} different choices")
