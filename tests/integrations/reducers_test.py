#!/usr/bin/python3
"""Tests the Python package's communicators and reducers: tags, groups that change, shards, and states."""
from __future__ import annotations

import contextlib
import math
import threading
import unittest
from typing import Any, Dict, List

import numpy as np
import torch

import gradwire
from gradwire import _reducer, _spec
from gradwire._port import reserve_port
from thread_ranks import run_ranks


class Reducers(unittest.TestCase):
    TENSORS = [("a", 40, 30), ("b", 7, 1), ("c", 20, 50)]

    def gradients(self, rank: int, step: int) -> List[np.ndarray]:
        rng = np.random.default_rng(step * 100 + rank)
        return [rng.standard_normal((rows, cols)).astype(np.float32) for _, rows, cols in self.TENSORS]

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

    def test_choose_gives_all_ranks_the_same_spec_within_the_error(self) -> None:
        chosen: List[Any] = [None] * 2
        specs = ["fp32", "bf16", "int8", "powersgd:rank=1"]

        def body(comm: gradwire.Communicator) -> None:
            gradients = {name: g for (name, _, _), g in zip(self.TENSORS, self.gradients(comm.rank, 0))}
            before = {name: g.copy() for name, g in gradients.items()}
            chosen[comm.rank] = gradwire.choose(comm, specs, gradients, error=0.02)
            for name, g in gradients.items():
                np.testing.assert_array_equal(g, before[name])
            # All steps tie, so that the errors decide.
            hidden = gradwire.choose(comm, specs[:0:-1], gradients, error=1, compute_ms=1e9, backward_ms=1e9)
            self.assertEqual(hidden.spec, "bf16")
            zeros = {name: torch.zeros(3) for name in gradients}
            self.assertRaisesRegex(gradwire.BadArgument, "is zero", gradwire.choose, comm, specs, zeros)
            self.assertRaisesRegex(gradwire.BadArgument, "n_specs is 0", gradwire.choose, comm, [], gradients)
            self.assertRaisesRegex(gradwire.BadArgument, "n_tensors is 0", gradwire.choose, comm, specs, {})

        run_ranks(2, body)
        self.assertEqual(*chosen)
        self.assertEqual(list(chosen[0].trials), specs)
        self.assertIn(chosen[0].spec, specs[:3])
        self.assertLess(chosen[0].trials["bf16"].error, chosen[0].trials["int8"].error)
        self.assertGreater(chosen[0].trials["powersgd:rank=1"].error, 0.02)

    def test_tags_distinguish_calls_of_equal_size(self) -> None:
        said: List[str] = [""] * 2

        def body(comm: gradwire.Communicator) -> None:
            tensors = {name: torch.full((64,), float(i)) for i, name in enumerate(("weight", "bias"))}
            for name in sorted(tensors, reverse=comm.rank == 1):
                try:
                    gradwire.allreduce_(tensors[name], comm=comm, tag=name)
                except gradwire.CommFailed as error:
                    said[comm.rank] = str(error)
                    return

        run_ranks(2, body)
        for text in said:
            self.assertRegex(
                text, "gw_allreduce 'weight'.*gw_allreduce 'bias'|gw_allreduce 'bias'.*gw_allreduce 'weight'")

    def test_rejects_different_tensors_by_name(self) -> None:
        said: List[str] = [""] * 2

        def body(comm: gradwire.Communicator) -> None:
            names = ("a", "b") if comm.rank == 0 else ("b", "a")
            try:
                gradwire.Reducer(comm, "fp32", [(name, 4, 4) for name in names], tag="head")
            except gradwire.CommFailed as error:
                said[comm.rank] = str(error)

        run_ranks(2, body)
        for text in said:
            self.assertIn("tensor 0: 'a' (4 x 4)", text)
            self.assertIn("tensor 0: 'b' (4 x 4)", text)

    def test_a_communicator_is_split_by_color_and_key(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            part = comm.split(color=comm.rank % 2, key=-comm.rank)
            assert part is not None
            mine = np.full(10, float(comm.rank), np.float32)
            part.allreduce_(mine, op="sum")
            found = (part.world, part.rank, mine[9], part.bytes_sent > 0)
            part.close()
            self.assertIsNone(comm.split(color=-1))
            return found

        self.assertEqual(run_ranks(3, body), [(2, 1, 2.0, True), (1, 0, 1.0, False), (2, 0, 2.0, True)])

    def test_survivors_continue_after_a_rank_leaves(self) -> None:
        with contextlib.ExitStack() as stack:
            name = f"tcp://127.0.0.1:{reserve_port(stack)}"

            def body(comm: gradwire.Communicator) -> Any:
                ones = np.ones(1000, np.float32)
                self.assertEqual(comm.allreduce_(ones, op="sum")[-1], 3)
                if comm.rank == 0:
                    return None  # closes the communicator and its store
                with self.assertRaises(gradwire.CommFailed):
                    comm.allreduce_(ones)
                rest, ranks = comm.shrink()
                with rest:
                    mine = np.full(1000, float(comm.rank), np.float32)
                    return ranks, rest.rank, rest.world, rest.allreduce_(mine, op="sum")[-1]

            self.assertEqual(run_ranks(3, body, name, shrinkable=True),
                             [None, ([1, 2], 0, 2, 3.0), ([1, 2], 1, 2, 3.0)])
        with gradwire.Communicator() as alone:
            with self.assertRaisesRegex(ValueError, "timeout_s is 0 s: expected at least 0.001 s"):
                alone.shrink(timeout_s=0)
            with self.assertRaisesRegex(gradwire.BadArgument, "cannot continue when ranks die"):
                alone.shrink()

    def test_rejects_invalid_interfaces_and_ports(self) -> None:
        with self.assertRaisesRegex(gradwire.BadArgument, "ports 9 to 8"):
            gradwire.Communicator(ports=(9, 8))
        with self.assertRaisesRegex(gradwire.BadArgument, "nosuch"):
            gradwire.Communicator(interface="nosuch")
        gradwire.Communicator(interface="lo", ports=(9000, 9010)).close()

    def test_a_rank_joins_between_two_calls(self) -> None:
        with contextlib.ExitStack() as stack:
            name = f"tcp://127.0.0.1:{reserve_port(stack)}"
            late: List[Any] = []

            def joins(invitation: str) -> None:
                with gradwire.Communicator.join(invitation, timeout_s=60) as comm:
                    late.append((comm.rank, comm.world, comm.allreduce_(np.ones(1000, np.float32),
                                                                        op="sum")[-1]))

            def body(comm: gradwire.Communicator) -> Any:
                comm.admit(3)
                comm.allreduce_(np.ones(1, np.float32))  # all ranks have called admit()
                joiner = threading.Thread(target=joins, args=(comm.invitation(),))
                if comm.rank == 1:
                    joiner.start()
                grown, calls = None, 0
                while grown is None:
                    calls += 1
                    self.assertLess(calls, 100_000)
                    if comm.broadcast_(np.array([comm.waiting], np.float32))[0] > 0:
                        grown = comm.grow()
                with grown:
                    result = grown.rank, grown.world, grown.allreduce_(np.ones(1000, np.float32),
                                                                       op="sum")[-1]
                if comm.rank == 1:
                    joiner.join()
                return result

            self.assertEqual(run_ranks(2, body, name, shrinkable=True), [(0, 3, 3.0), (1, 3, 3.0)])
            self.assertEqual(late, [(2, 3, 3.0)])
        with gradwire.Communicator() as alone:
            self.assertEqual(alone.waiting, 0)
            with self.assertRaisesRegex(gradwire.BadArgument, "shrinkable=True"):
                alone.invitation()

    def test_rejects_unknown_types(self) -> None:
        with self.assertRaisesRegex(ValueError, "not 'float64'"):
            gradwire.Reducer(gradwire.Communicator(), "fp32", self.TENSORS, dtype="float64")

    def test_each_element_of_a_sharded_reducer_has_one_owner(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            whole, part = self.gradients(comm.rank, 0), self.gradients(comm.rank, 0)
            gradwire.Reducer(comm, "fp32:schedule=two_shot", self.TENSORS).allreduce(whole)
            reducer = gradwire.Reducer(comm, "fp32:schedule=two_shot", self.TENSORS, shard=True)
            reducer.allreduce(part)
            owned = [np.zeros(rows * cols, int) for _, rows, cols in self.TENSORS]
            for tensor, begin, end in reducer.shards():
                owned[tensor][begin:end] += 1
                np.testing.assert_array_equal(part[tensor].ravel()[begin:end],
                                              whole[tensor].ravel()[begin:end])
            return owned

        for tensors in zip(*run_ranks(3, body)):
            self.assertEqual(set(sum(tensors)), {1})

    def test_states_keep_the_sum_of_residuals_in_another_world(self) -> None:
        for spec, shard in (("int8:dense=off", False), ("int4:dense=off,schedule=two_shot", True),
                            ("powersgd:rank=1,min_ratio=1", False)):
            def train(comm: gradwire.Communicator) -> bytes:
                reducer = gradwire.Reducer(comm, spec, self.TENSORS, shard=shard)
                for step in range(3):
                    reducer.allreduce(self.gradients(comm.rank, step))
                return reducer.save_state()

            def carry_on(comm: gradwire.Communicator) -> Any:
                reducer = gradwire.Reducer(comm, spec, self.TENSORS, shard=shard)
                reducer.load_states(saved[::-1])
                loaded = reducer.save_state()
                reducer.allreduce(self.gradients(comm.rank, 3))
                return loaded, reducer.stats()["steps"]

            def sums(states: List[bytes]) -> Dict[str, Any]:
                total: Dict[str, Any] = {}
                for state in states:
                    for name, tensor in _reducer.unpack(state).tensors.items():
                        if "residual" in tensor.entries:
                            values = np.frombuffer(tensor.entries["residual"].data,
                                                   np.float32).astype(np.float64)
                            total[name] = total.get(name, 0) + values
                return total

            saved = run_ranks(3, train)
            before = sums(saved)
            self.assertGreater(sum(np.abs(values).sum() for values in before.values()), 0, spec)
            for world in (2, 3, 5):
                loaded, steps = zip(*run_ranks(world, carry_on))
                self.assertEqual(set(steps), {4})
                for name, values in sums(list(loaded)).items():
                    np.testing.assert_allclose(values, before[name], rtol=0,
                                               atol=1e-6 * np.abs(before[name]).max() + 1e-12)
                if world == 3:
                    self.assertEqual(list(loaded), saved)

            def refuse(comm: gradwire.Communicator) -> None:
                reducer = gradwire.Reducer(comm, spec, self.TENSORS, shard=shard)
                fresh = reducer.save_state()
                needs = f"rank {comm.rank} of 2 needs the state that rank {comm.rank} of 3 saved"
                for states, why in ((saved[1 - comm.rank:2 - comm.rank],
                                     needs), (saved[:1] * 2, "two states are of rank 0"), ([], "no states"),
                                    ([saved[0], fresh], "3 and 2 ranks"), ([b"x"], "truncated")):
                    with self.assertRaisesRegex(gradwire.BadArgument, why):
                        reducer.load_states(states)
                self.assertEqual(reducer.save_state(), fresh)

            run_ranks(2, refuse)
            alone, steps = zip(*run_ranks(1, carry_on))
            self.assertEqual(steps, (4,))
            for name, values in sums(list(alone)).items():
                np.testing.assert_allclose(values, before[name], rtol=0,
                                           atol=1e-6 * np.abs(before[name]).max() + 1e-12)
            saved = run_ranks(1, train)  # a single rank has no residuals
            loaded, steps = zip(*run_ranks(2, carry_on))
            self.assertEqual(set(steps), {4})
            for values in sums(list(loaded)).values():
                self.assertFalse(values.any())

    def test_states_continue_bit_for_bit(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            straight = gradwire.Reducer(comm, "powersgd:rank=2", self.TENSORS)
            resumed = gradwire.Reducer(comm, "powersgd:rank=2", self.TENSORS)
            for step in range(3):
                straight.allreduce(self.gradients(comm.rank, step))
            blob = straight.save_state()
            state = _reducer.unpack(blob)
            self.assertEqual(state.steps, 3)
            self.assertEqual(set(state.tensors), {"a", "b", "c"})
            self.assertEqual(_reducer.pack(state), bytes(blob))
            backwards = state._replace(tensors=dict(reversed(list(state.tensors.items()))))
            resumed.load_state(_reducer.pack(backwards))
            for step in range(3, 6):
                a, b = self.gradients(comm.rank, step), self.gradients(comm.rank, step)
                straight.allreduce(a)
                resumed.allreduce(b)
                for x, y in zip(a, b):
                    np.testing.assert_array_equal(x, y)
            stats = straight.stats()
            self.assertEqual(stats["steps"], 6)
            self.assertGreater(stats["dense_bytes"], stats["wire_bytes"])
            self.assertIn("powersgd", stats["description"])
            with self.assertRaisesRegex(gradwire.BadArgument, "damaged"):
                resumed.load_state(bytes(blob[:-1]) + b"?")
            with self.assertRaises(ValueError):
                _reducer.unpack(blob[:-1])
            with self.assertRaises(ValueError):
                straight.allreduce(self.gradients(0, 0)[:2])
            with self.assertRaisesRegex(ValueError, "gradient 1"):
                straight.allreduce([self.gradients(0, 0)[i] for i in (0, 0, 2)])
            return a

        results = run_ranks(2, body)
        for x, y in zip(*results):
            np.testing.assert_array_equal(x, y)


if __name__ == "__main__":
    unittest.main(verbosity=2)
