"""Runs one rank of the tests of registered formats, for format_test.py."""
from __future__ import annotations

import copy
import faulthandler
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import gradwire
import gradwire.torch
from gradwire import _reducer
from gradwire.torch import Hook

from ddp_training import TASKS, Run, same_on_all_ranks
from rank import RANK, WORLD, check, say
from launch import chosen
from four_bits import BLOCK, BYTES, decode, encode


def nothing_is_lost() -> None:
    gradwire.register_format("mine", block=BLOCK, bytes=BYTES, encode=encode, decode=decode)
    comm = gradwire.torch.communicator(timeout_s=60)
    shapes = {"w": (300, 41), "b": (77, 1)}
    for method in ("mine", "powersgd:rank=2,wire=mine"):
        for schedule in ("ring", "tree", "two_shot", "auto"):
            spec = f"{method}{',' if ':' in method else ':'}schedule={schedule}"
            reducer = gradwire.Reducer(comm, spec, [(name, *shape) for name, shape in shapes.items()])
            rng = np.random.default_rng(RANK)
            size = sum(rows * cols for rows, cols in shapes.values())
            put_in, applied = np.zeros(size), np.zeros(size)
            for step in range(10):
                gradients = [rng.standard_normal(shape).astype(np.float32) for shape in shapes.values()]
                put_in += np.concatenate([g.ravel() for g in gradients])
                reducer.allreduce(gradients)
                applied += np.concatenate([g.ravel() for g in gradients])
            same_on_all_ranks(torch.from_numpy(applied), spec)
            state = _reducer.unpack(reducer.save_state())
            kept = np.concatenate([np.frombuffer(state.tensors[name].entries["residual"].data, np.float32)
                                   for name in shapes])
            check(bool(np.abs(kept).max() > 1e-3), f"{spec} lost nothing at all")
            totals = torch.from_numpy(np.stack([kept - put_in, put_in]))
            dist.all_reduce(totals)
            lost = float((totals[0] + torch.from_numpy(WORLD * applied)).norm() / totals[1].norm())
            check(lost < 1e-5, f"{spec}: {lost:.1e} of what was put in is lost")
            say(f"{spec}, {WORLD} ranks: {lost:.1e} lost in 10 steps")
            reducer.close()
    comm.close()


def ddp_trains() -> None:
    gradwire.register_format("mine", block=BLOCK, bytes=BYTES, encode=encode, decode=decode)
    for spec in ("mine", "powersgd:rank=4,wire=mine"):
        plain = Run(TASKS["vit"])
        hook = Hook(spec)
        hooked = Run(TASKS["vit"], hook, model=copy.deepcopy(plain.model), bucket_cap_mb=0.25)
        for step in range(3):
            plain.step(step)
            hooked.step(step)
            if step == 0 and spec == "mine":
                error = float((plain.gradients() - hooked.gradients()).norm() / plain.gradients().norm())
                check(1e-3 < error < 0.25, f"the first step's gradients are off by {error:.2f}")
                say(f"{spec}: relative error of the first step {error:.3f}")
        same_on_all_ranks(hooked.parameters(), "the model")
        stats = hook.stats()
        check(stats["wire_bytes"] < stats["dense_bytes"] / 3, f"{stats}")
        check(bool(torch.isfinite(hooked.parameters()).all()), "the parameters are not finite")
        say(
            f"{spec}: {stats['dense_bytes'] / stats['wire_bytes']:.1f} times fewer bytes, {stats['buckets']}"
            " buckets"
        )
        hook.close()


def other_sizes_are_refused() -> None:
    size = 64 if RANK == 0 else 32
    gradwire.register_format("sized", block=size, bytes=4 * size, encode=lambda v: v.view(np.uint8),
                             decode=lambda d: d.view(np.float32))

    def in_allreduce(comm: gradwire.Communicator) -> Any:
        return gradwire.allreduce_(np.ones(1000, np.float32), "sized:schedule=ring", comm=comm)

    def in_reducer(comm: gradwire.Communicator) -> Any:
        return gradwire.Reducer(comm, "powersgd:rank=1,wire=sized", [("w", 10, 10)])

    for call in (in_allreduce, in_reducer):
        comm = gradwire.torch.communicator(timeout_s=60)
        try:
            call(comm)
            check(False, f"{call.__name__}: ranks with other sizes were not noticed")
        except gradwire.CommFailed as error:
            for block in (64, 32):
                check(f"sized in {4 * block} bytes per {block} values" in str(error),
                      f"{call.__name__}: {error}")
        dist.barrier()  # no rank leaves before both ranks have the error
        comm.close()


def an_error_in_backward() -> None:
    broken = False

    def moody(values: Any) -> Any:
        if broken:
            raise KeyError("lunch")
        return encode(values)

    gradwire.register_format("moody", block=BLOCK, bytes=BYTES, encode=moody, decode=decode)
    hook = Hook("moody", timeout_s=3600)
    run = Run(TASKS["vit"], hook)
    run.step(0)
    dist.barrier()
    broken = RANK == 1
    try:
        run.step(1)
        check(False, "backward did not raise")
    except RuntimeError as error:
        check("wire format 'moody': encode: raised KeyError: 'lunch'" in str(error), str(error))
        check(RANK == 1 or "rank 1" in str(error), str(error))
    dist.barrier()
    hook.close()


SCENARIOS = [nothing_is_lost, ddp_trains, other_sizes_are_refused, an_error_in_backward]


def main() -> None:
    faulthandler.dump_traceback_later(140, exit=True)  # shows where a hang occurs
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in chosen(SCENARIOS):
        scenario()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
