#!/usr/bin/python3
"""Tests what Python asks the library: a spec's effect on a tensor, and steps with the caller's state."""
from __future__ import annotations

import math
import unittest
from contextlib import closing
from typing import Any, Dict, List, Tuple

import numpy as np

import gradwire
from gradwire import _native, _spec
from gradwire._reducer import Reducer, orthonormalize, unpack
from thread_ranks import run_ranks

SHAPES = [(60, 48), (7, 1), (33, 70), (1, 2000), (2, 3)]
TENSORS = [(f"t{i}", *shape) for i, shape in enumerate(SHAPES)]


def gradients(rank: int, step: int) -> List[np.ndarray]:
    rng = np.random.default_rng(step * 100 + rank)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


class CallersState:
    """Residuals and factors in arrays, as JAX keeps them."""

    def __init__(self, spec: str) -> None:
        self.residuals = [np.zeros(shape, np.float32) for shape in SHAPES]
        self.factors: List[Any] = [None] * len(SHAPES)
        flags = np.zeros(1, np.int32)
        with gradwire.Communicator() as alone:
            for i, (rows, cols) in enumerate(SHAPES):
                info = _spec.info_of(spec, (rows, cols))
                sizes = (cols, rows) if info.alternate else (cols,)
                parts = [np.zeros((size, info.rank), np.float32) for size in sizes if info.rank > 0]
                for second, part in zip((True, False), parts):
                    orthonormalize(alone, part.ctypes.data, [(*part.shape, i)], second, info.seed, 0,
                                   flags.ctypes.data)
                if parts:
                    self.factors[i] = np.concatenate(parts)

    def apply(self, reducer: Reducer, own: List[np.ndarray], step: int) -> None:
        states = (_native.State * len(SHAPES))()
        for state, residual, factor in zip(states, self.residuals, self.factors):
            state.residual = residual.ctypes.data
            state.factor = None if factor is None else factor.ctypes.data
        number = np.array(step, np.int32)
        reducer._apply(Reducer.addresses_of([g.ctypes.data for g in own]), states, number.ctypes.data)


def saved(reducer: Reducer) -> Dict[Tuple[str, str], bytes]:
    tensors = unpack(reducer.save_state()).tensors
    return {(name, kind): entry.data for name, t in tensors.items() for kind, entry in t.entries.items()}


class Specs(unittest.TestCase):
    def test_the_callers_state_gives_the_bits_of_a_reducers_own(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            for spec in ("powersgd:rank=2", "powersgd:rank=3,wire=int8,seed=5", "powersgd:rank=2,warm=off",
                         "powersgd:rank=2,alternate=on,wire=bf16", "powersgd:rank=2,start=2",
                         "randk:ratio=0.1,wire=bf16", "int4:dense=off"):
                spec += f"{',' if ':' in spec else ':'}schedule=two_shot"
                own, other = CallersState(spec), gradwire.Reducer(comm, spec, TENSORS)
                reducer = gradwire.Reducer(comm, spec, TENSORS)
                for step in range(4):
                    # A step of another state between two steps changes nothing.
                    CallersState(spec).apply(reducer, gradients(comm.rank, 99), 0)
                    mine, theirs = gradients(comm.rank, step), gradients(comm.rank, step)
                    own.apply(reducer, mine, step)
                    other.allreduce(theirs)
                    for name, a, b in zip(SHAPES, mine, theirs):
                        self.assertEqual(a.tobytes(), b.tobytes(), (spec, step, name))
                state = saved(other)
                for i, (name, *_) in enumerate(TENSORS):
                    self.assertEqual(state.get((name, "residual"), own.residuals[i].tobytes()),
                                     own.residuals[i].tobytes(), (spec, name))
                    if (name, "factor") in state:
                        parts = state[name, "factor"] + state.get((name, "factor_p"), b"")
                        self.assertEqual(parts, own.factors[i].tobytes(), (spec, name))
                for each in (reducer, other):
                    each.close()

        run_ranks(2, body)

    def test_a_world_of_one_changes_nothing(self) -> None:
        with gradwire.Communicator() as alone:
            state, own = CallersState("powersgd:rank=2"), gradients(0, 0)
            with closing(gradwire.Reducer(alone, "powersgd:rank=2", TENSORS)) as reducer:
                state.apply(reducer, own, 0)
            for a, b in zip(own, gradients(0, 0)):
                np.testing.assert_array_equal(a, b)
            self.assertFalse(any(residual.any() for residual in state.residuals))

    def test_state_that_the_caller_cannot_keep_is_refused(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            with closing(gradwire.Reducer(comm, "int8:ef=ef21", TENSORS)) as reducer:
                self.assertRaisesRegex(gradwire.BadArgument, "which gw_state lacks",
                                       CallersState("int8").apply, reducer, gradients(comm.rank, 0), 0)
            with closing(gradwire.Reducer(comm, "powersgd:rank=2", TENSORS)) as reducer:
                self.assertRaisesRegex(gradwire.BadArgument, "factor of 't0' is null",
                                       CallersState("int8").apply, reducer, gradients(comm.rank, 0), 0)

        run_ranks(2, body)

    def test_rows_and_columns_of_one_are_vectors_everywhere(self) -> None:
        for shape in ((1, 2000), (2000, 1), (2000,), ()):
            info = _spec.info_of("powersgd:rank=1,min_ratio=0", shape)
            self.assertEqual((info.rank, info.small), (0, True), shape)
        self.assertFalse(_spec.info_of("int8", (1, 65_537)).small)

    def test_a_specs_messages_and_options(self) -> None:
        info = _spec.info_of("powersgd:rank=4,wire=int4,block=64,schedule=ring,seed=7,start=3", (64, 128))
        self.assertEqual((info.method, info.wire, info.exact, info.rank, info.seed, info.start),
                         ("powersgd", "int4:block=64,schedule=ring", False, 4, 7, 3))
        self.assertTrue(_spec.info_of("powersgd:rank=1,alternate=on").alternate)
        self.assertTrue(math.isclose(_spec.info_of("bf16").bits, 16))
        self.assertRaisesRegex(gradwire.BadArgument, "int9", _spec.info_of, "int9")
        self.assertEqual(_spec.with_options("fp32", "a=1", "b=2"), "fp32:a=1,b=2")
        self.assertEqual(_spec.with_options("int8,block=64", "a=1"), "int8,block=64,a=1")


if __name__ == "__main__":
    unittest.main()
