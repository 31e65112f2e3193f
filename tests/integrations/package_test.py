#!/usr/bin/python3
"""The Python package without DDP: imports, arrays, reducers, states, errors, and `pip install .`."""
from __future__ import annotations

import contextlib
import ctypes
import inspect
import math
import os
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
from typing import Any, Callable, Dict, List

import numpy as np
import torch

import gradwire
import gradwire.torch
from gradwire import _buckets, _native, _process_group, _spec, _state
from gradwire._port import reserve_port

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"
_next_name = iter(range(1 << 30))


def run_ranks(world: int, body: Callable[[gradwire.Communicator], Any], name: str = "",
              **options: Any) -> List[Any]:
    """Runs body on every rank, in a thread each. Returns the results; raises the first rank's exception.
    name: where they meet, by default in this process."""
    name = name or f"local://package{next(_next_name)}"
    results: List[Any] = [None] * world
    errors: List[BaseException] = []

    def run(rank: int) -> None:
        try:
            with gradwire.Communicator(name, rank, world, timeout_s=60, **options) as comm:
                results[rank] = body(comm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


class Hooks(unittest.TestCase):
    def test_state_names_are_the_models_own(self) -> None:
        for wrapped in ("module.layer.weight", "_orig_mod.layer.weight", "module._orig_mod.layer.weight",
                        "_orig_mod.module.layer.weight", "layer._orig_mod.weight"):
            self.assertEqual(_buckets.plain_name(wrapped), "layer.weight")

    def test_a_pickled_hook_keeps_its_options(self) -> None:
        with_model = gradwire.torch.Hook("bf16,schedule=ring", model=torch.nn.Linear(2, 3), timeout_s=7,
                                         seed=5)
        copy = pickle.loads(pickle.dumps(with_model))
        self.assertEqual((copy.spec, copy._timeout_s, copy._seed), ("bf16,schedule=ring", 7, 5))
        model = torch.nn.Linear(2, 3)
        copy.name_parameters(model)
        self.assertEqual(copy._names.of(list(model.parameters())), ("weight", "bias"))
        with_model.close()
        copy.close()

    def test_nobody_takes_the_port_before_the_rendezvous_listens_there(self) -> None:
        with contextlib.ExitStack() as stack:
            port = reserve_port(stack)
            with socket.socket() as other, self.assertRaises(OSError):
                other.bind(("", port))
            self.assertEqual(run_ranks(2, lambda comm: comm.rank, f"tcp://127.0.0.1:{port}"), [0, 1])

    def test_the_port_is_one_that_the_environment_allows(self) -> None:
        with contextlib.ExitStack() as stack:
            first = reserve_port(stack)
            last = min(65535, first + 30)
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=f"{first}-{last}"):
                ports = [reserve_port(stack) for _ in range(3)]
            self.assertEqual(len({first, *ports}), 4)
            for port in ports:
                self.assertTrue(first < port <= last, ports)
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=str(port)):
                # taken, but no other is allowed: the rendezvous tells
                self.assertEqual(reserve_port(stack), port)
        for text in ("many", "5-4", "0", "1-70000", "-3"):
            with unittest.mock.patch.dict(os.environ, GRADWIRE_PORTS=text), contextlib.ExitStack() as stack:
                with self.assertRaisesRegex(gradwire.BadArgument, f"GRADWIRE_PORTS must be .*, not '{text}'"):
                    reserve_port(stack)

    def test_another_network_namespace_is_another_host_though_its_name_is_the_same(self) -> None:
        code = "from gradwire._process_group import _network; print(_network())"

        def network(*prefix: str) -> str:
            return subprocess.run([*prefix, sys.executable, "-c", code], check=True, capture_output=True,
                                  text=True).stdout.strip()

        self.assertEqual(network(), _process_group._network())
        unshare = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--net", "--map-root-user"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            self.skipTest("this machine does not permit network namespaces (unshare --net)")
        there = network(*unshare)
        self.assertEqual(there.split()[0], socket.gethostname())
        self.assertNotEqual(there, _process_group._network())

    def test_a_silent_peer_is_waited_for_as_long_as_pytorch_waits(self) -> None:
        hook = gradwire.torch.Hook("fp32")
        self.assertEqual(hook._timeout_s, 1800)  # 60 s killed jobs whose rank 0 wrote a long checkpoint
        hook.close()
        for waits in (gradwire.Communicator, _process_group.communicator,
                      _process_group.communicator_of_store):
            self.assertEqual(inspect.signature(waits).parameters["timeout_s"].default, 1800, waits)

    def test_a_comma_after_the_name_is_as_good_as_a_colon(self) -> None:
        for spec in ("bf16,schedule=ring", "bf16:schedule=ring", "powersgd,rank=2"):
            gradwire.torch.Hook(spec).close()

    def test_uncompressed_bfloat16_travels_as_bfloat16(self) -> None:
        spec = _buckets.spec_for
        self.assertEqual(spec("fp32", torch.bfloat16), "bf16:ef=off")
        self.assertEqual(spec("fp32:schedule=ring,ef=on", torch.bfloat16), "bf16:ef=off,schedule=ring")
        self.assertEqual(spec("fp32:schedule=ring", torch.float32), "fp32:schedule=ring")
        self.assertEqual(spec("fp8", torch.bfloat16), "fp8")
        self.assertEqual(spec("powersgd", torch.bfloat16), "powersgd:wire=bf16")
        self.assertEqual(spec("powersgd:rank=4,ef=off", torch.bfloat16), "powersgd:rank=4,ef=off,wire=bf16")
        self.assertEqual(spec("randk:ratio=0.1,wire=int8", torch.bfloat16), "randk:ratio=0.1,wire=int8")
        self.assertEqual(spec("powersgd:rank=4", torch.float32), "powersgd:rank=4")


class Failures(unittest.TestCase):
    def test_check_raises_once_the_communicator_has_failed(self) -> None:
        both_are_well = threading.Barrier(2)

        def body(comm: gradwire.Communicator) -> None:
            comm.check()
            both_are_well.wait(timeout=60)
            if comm.rank == 0:
                comm.abort("because the test wants it")
            else:
                with self.assertRaises(gradwire.CommFailed):
                    gradwire.allreduce_(np.zeros(4, np.float32), comm=comm)
            with self.assertRaisesRegex(gradwire.CommFailed, "because the test wants it"):
                comm.check()

        run_ranks(2, body)

    def test_after_a_failure_no_cuda_bucket_is_enqueued_and_check_raises(self) -> None:
        # On CUDA backward() of the step that failed has raised nothing. No GPU is touched here: the refusal
        # comes first.
        comm = gradwire.Communicator()
        hook = gradwire.torch.Hook("fp32", comm=comm)
        comm.abort("because a peer is gone")
        bucket = unittest.mock.Mock()
        bucket.index.return_value, bucket.parameters.return_value = 0, [torch.zeros(4)]
        bucket.buffer.return_value = unittest.mock.Mock(is_cuda=True, layout=torch.strided,
                                                        dtype=torch.float32)
        for call in (lambda: hook(bucket), hook.check):
            with self.assertRaisesRegex(gradwire.CommFailed, "because a peer is gone"):
                call()
        hook.close()


class Shards(unittest.TestCase):
    """Reduce-scatter, all-gather, updates of replicas and broadcast."""

    def test_a_reduce_scatter_and_an_all_gather_are_an_allreduce(self) -> None:
        counts = [5, 0, 11]

        def body(comm: gradwire.Communicator) -> Any:
            given = torch.arange(16, dtype=torch.float32) * (comm.rank + 1)
            whole = comm.allreduce_(given.clone(), "fp32:schedule=two_shot")
            shard = torch.empty(counts[comm.rank])
            self.assertIs(comm.reduce_scatter(shard, given, counts=counts), shard)
            gathered = np.zeros(16, np.float32)
            self.assertIs(comm.all_gather(gathered, shard.numpy(), counts=counts), gathered)
            equal = torch.empty(2)
            comm.reduce_scatter(equal, torch.ones(6), op="sum")
            return whole, torch.from_numpy(gathered), equal

        for whole, gathered, equal in run_ranks(3, body):
            self.assertTrue(torch.equal(whole, gathered))
            self.assertEqual(equal.tolist(), [3, 3])

    def test_residuals_keep_what_rounding_loses(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            generator = torch.Generator().manual_seed(comm.rank)
            given = torch.randn(128, generator=generator)
            residual, kept, allreduced = torch.zeros(128), torch.zeros(64), torch.zeros(128)
            shard, gathered = torch.empty(64), torch.empty(128)
            comm.reduce_scatter(shard, given, "int4", "sum", residual=residual, tag="gradients")
            comm.all_gather(gathered, shard, "int8", residual=kept)
            reduced = comm.allreduce_(given.clone(), "int4", "sum", residual=allreduced)
            return given, residual, shard, kept, gathered, reduced, allreduced

        ranks = run_ranks(2, body)
        given = sum(rank[0] for rank in ranks)
        scattered = torch.cat([rank[2] for rank in ranks])
        torch.testing.assert_close(scattered + sum(rank[1] for rank in ranks), given)
        for rank in ranks:
            torch.testing.assert_close(rank[4] + torch.cat([r[3] for r in ranks]), scattered)
            torch.testing.assert_close(rank[5] + sum(r[6] for r in ranks), given)
        self.assertGreater(float(ranks[0][1].abs().max()), 0)

    def test_replicas_follow_their_masters(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            replica = comm.broadcast_(torch.full((100,), float(comm.rank)), root=1)
            self.assertEqual(replica.unique().tolist(), [1])
            master = replica[comm.rank * 50:][:50] + torch.linspace(0, 1, 50)
            for _ in range(20):
                self.assertIs(comm.all_gather_update(replica, master, "int4"), replica)
            return replica, master

        (first, low), (second, high) = run_ranks(2, body)
        self.assertTrue(torch.equal(first, second))
        torch.testing.assert_close(first, torch.cat([low, high]), rtol=0, atol=1e-6)

    def test_sizes_and_types_that_do_not_fit_are_refused(self) -> None:
        comm = gradwire.Communicator()
        four, three = torch.zeros(4), torch.zeros(3)
        for call in (lambda: comm.reduce_scatter(three, four), lambda: comm.all_gather(four, three),
                     lambda: comm.all_gather(four, four, counts=[3]),
                     lambda: comm.all_gather(four, four, counts=[2, 2]),
                     lambda: comm.all_gather(four, four.clone(), residual=three),
                     lambda: comm.allreduce_(four, residual=three)):
            with self.assertRaises(ValueError):
                call()
        for call in (lambda: comm.reduce_scatter(four, four.bfloat16()),
                     lambda: comm.all_gather(four.bfloat16(), four),
                     lambda: comm.all_gather_update(four, four.bfloat16())):
            with self.assertRaises(TypeError):
                call()
        with self.assertRaises(gradwire.Unsupported):
            comm.all_gather_update(four.bfloat16(), four)
        with self.assertRaisesRegex(gradwire.BadArgument, "root is 1 in a world of 1"):
            comm.broadcast_(four, root=1)
        with self.assertRaisesRegex(gradwire.BadArgument, "use a reducer"):
            comm.reduce_scatter(four, four.clone(), "powersgd:rank=2")


class Requests(unittest.TestCase):
    def test_calls_that_were_started_go_on_beside_their_caller(self) -> None:
        started = threading.Barrier(2)

        def body(comm: gradwire.Communicator) -> Any:
            whole, part = np.full(100, comm.rank, np.float32), np.zeros(50, np.float32)
            gradient = np.full((8, 8), comm.rank, np.float16)
            reducer = gradwire.Reducer(comm, "bf16", [("weight", 8, 8)], dtype="float16")
            if comm.rank == 1:
                started.wait(60)
            requests = [comm.start(comm.allreduce_, whole, op="sum")]
            if comm.rank == 0:
                self.assertFalse(requests[0].done())
                with self.assertRaisesRegex(gradwire.NotDone, "still running"):
                    requests[0].wait(0.001)
                started.wait(60)
            requests += [
                comm.start(comm.reduce_scatter, part, whole),
                comm.start(reducer.allreduce, [gradient])
            ]
            for request in reversed(requests):
                request.wait()
                self.assertTrue(request.done())
                request.close()
            return whole, part, gradient

        for whole, part, gradient in run_ranks(2, body):
            self.assertTrue((whole == 1).all() and (part == 1).all() and (gradient == 0.5).all())

    def test_what_is_refused_raises_at_once(self) -> None:
        with gradwire.Communicator() as comm:
            with self.assertRaises(gradwire.BadArgument):
                comm.start(comm.allreduce_, np.zeros(3, np.float32), "int3")
            with self.assertRaisesRegex(gradwire.BadArgument, "makes no collective call"):
                comm.start(comm.check)
            with gradwire.Communicator() as other:
                with self.assertRaisesRegex(gradwire.BadArgument,
                                            "makes no collective call of this communicator"):
                    comm.start(other.allreduce_, np.zeros(3, np.float32))
            comm.start(comm.allreduce_, np.zeros(3, np.float32)).wait(60)


class Arrays(unittest.TestCase):
    def test_numpy_and_torch_are_averaged_in_place(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            a = np.full((3, 5), comm.rank, np.float32)
            t = torch.full((7,), float(comm.rank), dtype=torch.bfloat16)
            self.assertIs(gradwire.allreduce_(a, "bf16", comm=comm), a)
            gradwire.allreduce_(t, op="sum", comm=comm)
            return a.copy(), t

        for a, t in run_ranks(3, body):
            self.assertTrue((a == 1).all())
            self.assertTrue((t == 3).all())

    def test_what_cannot_be_reduced_is_refused(self) -> None:
        comm = gradwire.Communicator()
        read_only = np.zeros(4, np.float32)
        read_only.flags.writeable = False
        for array, error in ((np.zeros(4), TypeError), (np.zeros(
            (4, 4), np.float32)[:, 1], ValueError), (read_only, ValueError), ([1.0], TypeError),
                             (torch.zeros(4, dtype=torch.int32), TypeError), (torch.zeros(4,
                                                                                          4)[:,
                                                                                             1], ValueError)):
            with self.assertRaises(error):
                gradwire.allreduce_(array, comm=comm)
        ok = np.zeros(4, np.float32)
        with self.assertRaises(ValueError):
            gradwire.allreduce_(ok)
        with self.assertRaises(ValueError):
            gradwire.allreduce_(ok, op="max", comm=comm)
        with self.assertRaisesRegex(gradwire.BadArgument, "use a reducer"):
            gradwire.allreduce_(ok, "powersgd:rank=2", comm=comm)
        with self.assertRaisesRegex(ValueError, "init_process_group"):
            gradwire.allreduce_(torch.zeros(4))
        comm.close()
        comm.close()
        with self.assertRaises(gradwire.BadHandle):
            gradwire.allreduce_(ok, comm=comm)

    def test_errors_are_exceptions_that_say_what_was_wrong(self) -> None:
        with self.assertRaisesRegex(gradwire.BadArgument, "none of tcp://"):
            gradwire.Communicator("nowhere", 0, 2)
        with self.assertRaisesRegex(gradwire.CommFailed, "for rank 1"):
            gradwire.Communicator("local://alone", 0, 2, timeout_s=0.1)
        with self.assertRaises(ValueError):
            gradwire.Communicator(device="tpu")
        with self.assertRaises(gradwire.DeviceFailed):
            gradwire.Communicator(device=1000)
        self.assertTrue(
            issubclass(gradwire.BadArgument, ValueError) and issubclass(gradwire.CommFailed, gradwire.Error))


class Reducers(unittest.TestCase):
    TENSORS = [("a", 40, 30), ("b", 7, 1), ("c", 20, 50)]

    def gradients(self, rank: int, step: int) -> List[np.ndarray]:
        rng = np.random.default_rng(step * 100 + rank)
        return [rng.standard_normal((rows, cols)).astype(np.float32) for _, rows, cols in self.TENSORS]

    def test_small_tensors_are_those_that_the_library_keeps_dense(self) -> None:
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
                self.assertEqual(_spec.is_small(shape), sent[0] != sent[1], (shape, sent))

        run_ranks(2, body)

    def test_a_tag_tells_calls_of_equal_size_apart(self) -> None:
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

    def test_reducers_of_other_tensors_are_refused_by_name(self) -> None:
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

    def test_ranks_that_are_left_go_on_without_the_one_that_went(self) -> None:
        with contextlib.ExitStack() as stack:
            name = f"tcp://127.0.0.1:{reserve_port(stack)}"

            def body(comm: gradwire.Communicator) -> Any:
                ones = np.ones(1000, np.float32)
                self.assertEqual(comm.allreduce_(ones, op="sum")[-1], 3)
                if comm.rank == 0:
                    return None  # closes it, and with it the store
                with self.assertRaises(gradwire.CommFailed):
                    comm.allreduce_(ones)
                rest, ranks = comm.shrink()
                with rest:
                    mine = np.full(1000, float(comm.rank), np.float32)
                    return ranks, rest.rank, rest.world, rest.allreduce_(mine, op="sum")[-1]

            self.assertEqual(run_ranks(3, body, name, shrinkable=True),
                             [None, ([1, 2], 0, 2, 3.0), ([1, 2], 1, 2, 3.0)])
        with gradwire.Communicator() as alone:
            with self.assertRaisesRegex(ValueError, "timeout_s must be greater than 0, not 0"):
                alone.shrink(timeout_s=0)
            with self.assertRaisesRegex(gradwire.BadArgument, "cannot continue when ranks die"):
                alone.shrink()

    def test_where_to_listen_is_checked(self) -> None:
        with self.assertRaisesRegex(gradwire.BadArgument, "ports 9 to 8"):
            gradwire.Communicator(ports=(9, 8))
        with self.assertRaisesRegex(gradwire.BadArgument, "nosuch"):
            gradwire.Communicator(interface="nosuch")
        gradwire.Communicator(interface="lo", ports=(9000, 9010)).close()

    def test_a_new_rank_joins_between_two_calls(self) -> None:
        with contextlib.ExitStack() as stack:
            name = f"tcp://127.0.0.1:{reserve_port(stack)}"
            late: List[Any] = []

            def joins(invitation: str) -> None:
                with gradwire.Communicator.join(invitation, timeout_s=60) as comm:
                    late.append((comm.rank, comm.world, comm.allreduce_(np.ones(1000, np.float32),
                                                                        op="sum")[-1]))

            def body(comm: gradwire.Communicator) -> Any:
                comm.admit(3)
                comm.allreduce_(np.ones(1, np.float32))  # all have
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

    def test_a_reducer_of_an_unknown_type_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "not 'float64'"):
            gradwire.Reducer(gradwire.Communicator(), "fp32", self.TENSORS, dtype="float64")

    def test_a_sharded_reducer_leaves_each_element_to_one_rank(self) -> None:
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

    def test_states_of_another_number_of_ranks_keep_the_sum_of_the_residuals(self) -> None:
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
                    for name, tensor in _state.unpack(state).tensors.items():
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
            saved = run_ranks(1, train)  # a rank alone keeps nothing
            loaded, steps = zip(*run_ranks(2, carry_on))
            self.assertEqual(set(steps), {4})
            for values in sums(list(loaded)).values():
                self.assertFalse(values.any())

    def test_a_state_continues_bit_for_bit_also_by_tensor(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            straight = gradwire.Reducer(comm, "powersgd:rank=2", self.TENSORS)
            resumed = gradwire.Reducer(comm, "powersgd:rank=2", self.TENSORS)
            for step in range(3):
                straight.allreduce(self.gradients(comm.rank, step))
            blob = straight.save_state()
            state = _state.unpack(blob)
            self.assertEqual(state.steps, 3)
            self.assertEqual(set(state.tensors), {"a", "b", "c"})
            self.assertEqual(_state.pack(state), bytes(blob))
            backwards = state._replace(tensors=dict(reversed(list(state.tensors.items()))))
            resumed.load_state(_state.pack(backwards))
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
                _state.unpack(blob[:-1])
            with self.assertRaises(ValueError):
                straight.allreduce(self.gradients(0, 0)[:2])
            with self.assertRaisesRegex(ValueError, "gradient 1"):
                straight.allreduce([self.gradients(0, 0)[i] for i in (0, 0, 2)])
            return a

        results = run_ranks(2, body)
        for x, y in zip(*results):
            np.testing.assert_array_equal(x, y)


class Package(unittest.TestCase):
    def test_structs_are_those_of_the_header(self) -> None:
        # The library would refuse a wrong size; this test names the struct.
        structs = {
            "gw_comm_options": _native.CommOptions, "gw_comm_info": _native.CommInfo,
            "gw_call_options": _native.CallOptions, "gw_tensor": _native.Tensor,
            "gw_reducer_options": _native.ReducerOptions, "gw_range": _native.Range,
            "gw_stats": _native.Stats, "gw_format": _native.Format
        }
        members = [(name, field[0]) for name, struct in structs.items() for field in struct._fields_]
        prints = [f'printf("%zu\\n", sizeof({name}));' for name in structs]
        prints += [f'printf("%zu\\n", offsetof({name}, {field}));' for name, field in members]
        program = f'#include <gradwire/gradwire.h>\n#include <stdio.h>\nint main(void){{{"".join(prints)} return 0;}}'
        with tempfile.TemporaryDirectory() as folder:
            source, binary = pathlib.Path(folder, "sizes.c"), pathlib.Path(folder, "sizes")
            source.write_text(program)
            subprocess.run(
                [os.environ.get("CC", "cc"), "-I", PACKAGE.parents[1] / "include", source, "-o", binary],
                check=True)
            sizes = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
        ours = [ctypes.sizeof(struct) for struct in structs.values()]
        ours += [getattr(structs[name], field).offset for name, field in members]
        self.assertEqual([int(s) for s in sizes], ours)

    def test_importing_it_needs_neither_torch_nor_numpy(self) -> None:
        code = (
            "import sys; import gradwire; gradwire.Communicator().close(); print(sorted({'torch', 'numpy'} &"
            " set(sys.modules)))"
        )
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                                text=True).stdout
        self.assertEqual(output.strip(), "[]")

    def test_a_missing_library_is_explained(self) -> None:
        environment = {**os.environ, "GRADWIRE_LIBRARY": "/nowhere/libgradwire.so"}
        done = subprocess.run([sys.executable, "-c", "import gradwire; gradwire.Communicator()"],
                              env=environment, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("/nowhere/libgradwire.so", done.stderr)
        self.assertIn("GRADWIRE_LIBRARY", done.stderr)

    def test_the_doctor_says_what_is_here_and_what_is_broken(self) -> None:
        doctor = [sys.executable, "-m", "gradwire.doctor"]
        found = subprocess.run(doctor, capture_output=True, text=True, timeout=100)
        self.assertEqual((found.returncode, found.stderr), (0, ""), found.stdout)
        self.assertIn(f"library {gradwire.__version__}: {_native.library_path}", found.stdout)
        self.assertIn(f"torch {torch.__version__}: ", found.stdout)
        self.assertIn("the mean is right", found.stdout)
        self.assertRegex(
            found.stdout,
            "CUDA: the library has (no CUDA side; .*nvcc|a CUDA side; .*(device 0 works|no NVIDIA"
            " driver).*NCCL)",
        )
        broken = subprocess.run(doctor, capture_output=True, text=True, timeout=100,
                                env={**os.environ, "GRADWIRE_LIBRARY": "/nowhere/libgradwire.so"})
        self.assertEqual((broken.returncode, broken.stderr), (1, ""), broken.stdout)
        self.assertIn("/nowhere/libgradwire.so", broken.stdout)
        self.assertIn("GRADWIRE_LIBRARY", broken.stdout)

    def test_the_nccl_that_pip_has_installed_is_found_unless_another_is_loaded(self) -> None:
        # A stand-in of version 2.77.7 where the wheel nvidia-nccl-cu13 has its library, and another of
        # 2.66.6.
        source = "int ncclGetVersion(int* version) { *version = %d; return 0; }"
        ask = (
            "import ctypes; from gradwire import _native; first = _native.load_nccl(); number ="
            " ctypes.c_int(); ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(number)); print(first,"
            " number.value)"
        )
        with tempfile.TemporaryDirectory() as folder:
            installed, other = pathlib.Path(folder, "nvidia", "nccl", "lib"), pathlib.Path(folder, "other")
            for place, number in ((installed, 27707), (other, 26606)):
                place.mkdir(parents=True)
                (place / "nccl.c").write_text(source % number)
                subprocess.run([
                    os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2",
                    place / "nccl.c", "-o", place / "libnccl.so.2"
                ], check=True)
            for before, more, expected in (("", {}, "2.77.7 27707"),
                                           (f"import ctypes; ctypes.CDLL('{other}/libnccl.so.2'); ", {},
                                            "2.66.6 26606"),
                                           ("", {"GRADWIRE_NCCL_LIBRARY": str(other / "libnccl.so.2")},
                                            "2.66.6 26606")):
                environment = {**os.environ, "PYTHONPATH": ":".join([folder, *sys.path]), **more}
                done = subprocess.run([sys.executable, "-c", before + ask], env=environment, check=True,
                                      capture_output=True, text=True)
                self.assertEqual(done.stdout.strip(), expected)

    def test_the_version_is_the_headers(self) -> None:
        header = (PACKAGE.parents[1] / "include" / "gradwire" / "gradwire.h").read_text()
        for part, number in zip(("MAJOR", "MINOR", "PATCH"), gradwire.__version__.split(".")):
            self.assertIn(f"#define GW_VERSION_{part} {number}\n", header)

    def test_pip_install_brings_the_library_along(self) -> None:
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            self.fail(
                "pip is missing; Debian has it as python3-pip (with python3-setuptools and python3-wheel)")
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "source"), pathlib.Path(folder, "installed")
            shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build",
                                                                           "*.egg-info"))
            subprocess.run([
                sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation",
                "--no-deps", "--disable-pip-version-check", "--target", target, source
            ], check=True)
            environment = {k: v for k, v in os.environ.items() if k not in ("GRADWIRE_LIBRARY", "PYTHONPATH")}
            code = (
                "import gradwire; gradwire.Communicator().close(); print(gradwire.__version__,"
                " gradwire.__file__)"
            )
            output = subprocess.run([sys.executable, "-c", code],
                                    env={**environment, "PYTHONPATH": str(target)}, cwd=folder, check=True,
                                    capture_output=True, text=True).stdout
            version, file = output.split()
            self.assertEqual(version, gradwire.__version__)
            self.assertEqual(pathlib.Path(file).parent, target / "gradwire")
            self.assertTrue((target / "gradwire" / "py.typed").exists())
            self.assertTrue((target / "gradwire" / "libgradwire.so.0").exists())
            metadata = next(target.glob("gradwire-*.dist-info/METADATA")).read_text()
            self.assertRegex(metadata, r"Requires-Dist: nvidia-nccl-cu13.*extra == .cuda.")


if __name__ == "__main__":
    unittest.main(verbosity=2)
