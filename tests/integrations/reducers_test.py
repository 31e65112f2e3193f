#!/usr/bin/python3
"""Tests gradwire.Reducer and choose(): which tensors are compressed, shards, and states."""
from __future__ import annotations

import math
import unittest
from typing import Any, Dict, List

import numpy as np

import gradwire
import laws
from gradwire import _reducer, _spec
from thread_ranks import run_ranks

BAD = gradwire.BadArgument
TENSORS = [("a", 40, 30), ("b", 7, 1), ("c", 20, 50)]


def gradients(rank: int, step: int) -> List[np.ndarray]:
    rng = np.random.default_rng(step * 100 + rank)
    return [rng.standard_normal((rows, cols)).astype(np.float32) for _, rows, cols in TENSORS]


def residuals(state: bytes) -> Dict[str, np.ndarray]:
    return {name: np.frombuffer(tensor.entries["residual"].data, np.float32).astype(np.float64)
            for name, tensor in _reducer.unpack(state).tensors.items() if "residual" in tensor.entries}


class WhichTensors(unittest.TestCase):
    def test_is_small_matches_the_library(self) -> None:
        shapes = [(1,), (1_024,), (65_536,), (65_537,), (2, 2), (31, 33), (32, 32), (33, 32), (256, 256)]

        def body(comm: gradwire.Communicator) -> Any:
            for shape in shapes:
                values = np.ones((shape[0], math.prod(shape[1:])), np.float32)
                sent = []
                for dense in ("auto", "off"):
                    reducer = gradwire.Reducer(comm, f"int8:dense={dense}", [("t", *values.shape)])
                    reducer.allreduce([values])
                    sent.append(reducer.stats()["wire_bytes"])
                    reducer.close()
                self.assertEqual(_spec.info_of("int8", shape).small, sent[0] != sent[1], (shape, sent))

        run_ranks(2, body)

    def test_choose_and_shards_are_the_librarys(self) -> None:
        """tests/capi/choose_test.cpp and sharded_reducer_test.cpp have the rules."""
        specs = ["fp32", "bf16", "int8", "powersgd:rank=1"]

        def body(comm: gradwire.Communicator) -> Any:
            given, values = dict(zip("abc", gradients(comm.rank, 0))), gradients(comm.rank, 0)
            chosen = gradwire.choose(comm, specs, given, error=0.02)
            self.assertTrue(laws.same_bits(list(given.values()), values))
            # All steps tie, so that the errors decide.
            hidden = gradwire.choose(comm, specs[:0:-1], given, error=1, compute_ms=1e9, backward_ms=1e9)
            self.assertEqual((list(chosen.trials), hidden.spec), (specs, "bf16"))
            errors = [trial.error for trial in chosen.trials.values()]
            self.assertTrue(errors[0] < errors[1] < errors[2] < 0.02 < errors[3], errors)
            reducer = gradwire.Reducer(comm, "fp32:schedule=two_shot", TENSORS, shard=True)
            owned = [np.zeros(rows * cols, int) for _, rows, cols in TENSORS]
            for tensor, begin, end in reducer.shards():
                owned[tensor][begin:end] += 1
            for each, text in ((lambda: gradwire.choose(comm, [], given), "n_specs is 0"),
                               (lambda: gradwire.choose(comm, specs, {}), "n_tensors is 0")):
                with self.assertRaisesRegex(BAD, text):
                    each()
            return chosen, owned

        ranks = run_ranks(3, body)
        self.assertTrue(all(chosen == ranks[0][0] for chosen, _ in ranks))
        for tensors in zip(*(owned for _, owned in ranks)):
            self.assertEqual(set(sum(tensors)), {1})


class States(unittest.TestCase):
    def test_states_keep_the_sum_of_residuals_in_another_world(self) -> None:
        """tests/capi/moved_state_test.cpp has other worlds and the refusals."""
        spec = "int8:dense=off"

        def train(comm: gradwire.Communicator) -> bytes:
            reducer = gradwire.Reducer(comm, spec, TENSORS)
            for step in range(3):
                reducer.allreduce(gradients(comm.rank, step))
            return reducer.save_state()

        def load(comm: gradwire.Communicator) -> bytes:
            reducer = gradwire.Reducer(comm, spec, TENSORS)
            with self.assertRaisesRegex(BAD, "two states are of rank 0"):
                reducer.load_states(saved[:1] * 2)
            reducer.load_states(saved[::-1])
            return reducer.save_state()

        def sums(states: List[bytes]) -> Any:
            each = [residuals(state) for state in states]
            return {name: sum(one[name] for one in each) for name in each[0]}

        saved = run_ranks(3, train)
        before = sums(saved)
        self.assertTrue(all(values.any() for values in before.values()))
        for name, values in sums(run_ranks(2, load)).items():
            laws.near(name, values, before[name], 1e-6)

    def test_states_are_unpacked_and_packed_and_continue_bit_for_bit(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            straight, resumed = (gradwire.Reducer(comm, "powersgd:rank=2", TENSORS) for _ in range(2))
            for step in range(3):
                straight.allreduce(gradients(comm.rank, step))
            blob = straight.save_state()
            state = _reducer.unpack(blob)
            self.assertEqual((state.steps, set(state.tensors)), (3, {"a", "b", "c"}))
            self.assertEqual(_reducer.pack(state), bytes(blob))
            backwards = state._replace(tensors=dict(reversed(list(state.tensors.items()))))
            resumed.load_state(_reducer.pack(backwards))
            a, b = gradients(comm.rank, 3), gradients(comm.rank, 3)
            straight.allreduce(a)
            resumed.allreduce(b)
            self.assertTrue(laws.same_bits(a, b))
            stats = straight.stats()
            self.assertTrue(stats["steps"] == 4 and stats["dense_bytes"] > stats["wire_bytes"], stats)
            self.assertIn("powersgd", stats["description"])
            for call, text in ((lambda: resumed.load_state(bytes(blob[:-1]) + b"?"), "damaged"),
                               (lambda: _reducer.unpack(blob[:-1]), ""),
                               (lambda: straight.allreduce(a[:2]), ""),
                               (lambda: straight.allreduce([a[i] for i in (0, 0, 2)]), "gradient 1"),
                               (lambda: gradwire.Reducer(comm, "fp32", TENSORS, dtype="float64"),
                                "not 'float64'")):
                with self.assertRaisesRegex(ValueError, text):
                    call()
            return a

        self.assertTrue(laws.same_bits(*run_ranks(2, body)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
