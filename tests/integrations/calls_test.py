#!/usr/bin/python3
"""Tests the Python package without DDP: calls, shards, requests, groups that change, and errors.

Ranks are threads of this process.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
import threading
import unittest
import unittest.mock
from typing import Any, Callable, Dict, List

import numpy as np
import torch

import gradwire
import gradwire.fsdp
import gradwire.torch
import laws
from gradwire._buckets import Bucket, Layout
from gradwire._port import reserve_port
from thread_ranks import run_ranks

BAD = gradwire.BadArgument


def full(count: int, value: float) -> np.ndarray:
    return np.full(count, value, np.float32)


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
                    gradwire.allreduce_(full(4, 0), comm=comm)
            with self.assertRaisesRegex(gradwire.CommFailed, "because the test wants it"):
                comm.check()

        run_ranks(2, body)

    def test_no_cuda_bucket_is_enqueued_after_a_failure(self) -> None:
        # On CUDA backward() of the failed step does not raise. The hook fails before it uses a GPU, so this
        # test needs no GPU.
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

    def test_pytorchs_cache_is_emptied_before_the_collective_call_only_if_gpu_memory_is_short(self) -> None:
        for is_cuda, free, expected in ((True, 100 << 20, ["empty_cache", "Reducer"]),
                                        (True, 40 << 30, ["Reducer"]), (False, 0, ["Reducer"])):
            calls: List[str] = []
            buffer = unittest.mock.Mock(is_cuda=is_cuda, dtype=torch.float32)
            buffer.numel.return_value = 1 << 20
            with unittest.mock.patch("torch.cuda.mem_get_info", lambda device: (free, 80 << 30)), \
                    unittest.mock.patch("torch.cuda.empty_cache", lambda: calls.append("empty_cache")), \
                    unittest.mock.patch("gradwire._hook_buckets.Reducer",
                                        lambda *_, **options: calls.append("Reducer")), \
                    gradwire.Communicator() as comm:
                hook = gradwire.torch.Hook("int8", comm=comm)
                hook._make_reducer(Bucket(0, [], Layout(("w",), ((1 << 20, 1),)), 4), buffer)
                hook.close()
            self.assertEqual(calls, expected)

    def test_errors_name_the_cause(self) -> None:
        with gradwire.Communicator() as comm:
            pass
        comm.close()
        cases: List[Any] = [
            (lambda: gradwire.Communicator("nowhere", 0, 2), BAD, "none of tcp://"),
            (lambda: gradwire.Communicator("local://alone", 0, 2, timeout_s=0.1), gradwire.CommFailed,
             "for rank 1"),
            (lambda: gradwire.Communicator(device="tpu"), ValueError, "tpu"),
            (lambda: gradwire.Communicator(device=1000), gradwire.DeviceFailed, ""),
            (lambda: gradwire.Communicator(ports=(9, 8)), BAD, "ports 9 to 8"),
            (lambda: gradwire.Communicator(interface="nosuch"), BAD, "nosuch"),
            (lambda: gradwire.allreduce_(full(4, 0)), ValueError, ""),
            (lambda: gradwire.allreduce_(torch.zeros(4)), ValueError, "init_process_group"),
            (lambda: gradwire.allreduce_(full(4, 0), comm=comm), gradwire.BadHandle, "")]
        if torch.__version__ < (2, 9):
            old = rf"(?s)(?=.*2\.9).*{re.escape(torch.__version__)}"
            cases += [(gradwire.torch.register_backend, gradwire.Unsupported, old),
                      (lambda: gradwire.fsdp.compress(torch.nn.Linear(2, 2)), gradwire.Unsupported, old)]
        for call, error, text in cases:
            with self.assertRaisesRegex(error, text):
                call()
        gradwire.Communicator(interface="lo", ports=(9000, 9010)).close()
        self.assertTrue(issubclass(BAD, ValueError) and issubclass(gradwire.CommFailed, gradwire.Error))


class Calls(unittest.TestCase):
    def test_numpy_and_torch_are_averaged_in_place(self) -> None:
        def body(comm: gradwire.Communicator) -> None:
            a, t = full(15, comm.rank).reshape(3, 5), torch.full((7,), float(comm.rank), dtype=torch.bfloat16)
            self.assertIs(gradwire.allreduce_(a, "bf16", comm=comm), a)
            gradwire.allreduce_(t, op="sum", comm=comm)
            self.assertTrue((a == 1).all() and (t == 3).all())

        run_ranks(3, body)

    def test_a_reduce_scatter_and_an_all_gather_are_an_allreduce(self) -> None:
        counts = [5, 0, 11]

        def body(comm: gradwire.Communicator) -> None:
            given = torch.arange(16, dtype=torch.float32) * (comm.rank + 1)
            whole = comm.allreduce_(given.clone(), "fp32:schedule=two_shot")
            shard, gathered, equal = torch.empty(counts[comm.rank]), full(16, 0), torch.empty(2)
            self.assertIs(comm.reduce_scatter(shard, given, counts=counts), shard)
            self.assertIs(comm.all_gather(gathered, shard.numpy(), counts=counts), gathered)
            self.assertEqual(whole.tolist(), gathered.tolist())
            comm.reduce_scatter(equal, torch.ones(6), op="sum")
            self.assertEqual(equal.tolist(), [3, 3])

        run_ranks(3, body)

    def test_nothing_is_lost_with_residuals(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            given = torch.randn(128, generator=torch.Generator().manual_seed(comm.rank))
            residual, kept, allreduced = torch.zeros(128), torch.zeros(64), torch.zeros(128)
            shard, gathered = torch.empty(64), torch.empty(128)
            comm.reduce_scatter(shard, given, "int4", "sum", residual=residual, tag="gradients")
            comm.all_gather(gathered, shard, "int8", residual=kept)
            reduced = comm.allreduce_(given.clone(), "int4", "sum", residual=allreduced)
            self.assertGreater(float(residual.abs().max()), 0)
            return given, residual, shard, kept, gathered, reduced, allreduced

        ranks = run_ranks(2, body)
        given, scattered = sum(rank[0] for rank in ranks), torch.cat([rank[2] for rank in ranks])
        laws.near("reduce_scatter", scattered + sum(rank[1] for rank in ranks), given, 1e-6)
        for rank in ranks:
            laws.near("all_gather", rank[4] + torch.cat([r[3] for r in ranks]), scattered, 1e-6)
            laws.near("allreduce_", rank[5] + sum(r[6] for r in ranks), given, 1e-6)

    def test_replicas_follow_master_copies(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            replica = comm.broadcast_(torch.full((100,), float(comm.rank)), root=1)
            master = torch.full((50,), 1.0 + comm.rank) + torch.linspace(0, 1, 50)
            for _ in range(20):
                self.assertIs(comm.all_gather_update(replica, master, "int4"), replica)
            return replica, master

        (first, low), (second, high) = run_ranks(2, body)
        self.assertTrue(torch.equal(first, second))
        torch.testing.assert_close(first, torch.cat([low, high]), rtol=0, atol=1e-6)

    def test_rejects_mismatched_sizes_types_and_operations(self) -> None:
        comm = gradwire.Communicator()
        four, three, half = torch.zeros(4), torch.zeros(3), torch.zeros(4).bfloat16()
        cases: List[Any] = [
            (lambda: comm.reduce_scatter(three, four), ValueError, ""),
            (lambda: comm.all_gather(four, three), ValueError, ""),
            (lambda: comm.all_gather(four, four, counts=[3]), ValueError, ""),
            (lambda: comm.all_gather(four, four, counts=[2, 2]), ValueError, ""),
            (lambda: comm.all_gather(four, four.clone(), residual=three), ValueError, ""),
            (lambda: comm.allreduce_(four, residual=three), ValueError, ""),
            (lambda: comm.allreduce_(four, op="max"), ValueError, ""),
            (lambda: comm.reduce_scatter(four, half), TypeError, ""),
            (lambda: comm.all_gather(half, four), TypeError, ""),
            (lambda: comm.all_gather_update(four, half), TypeError, ""),
            (lambda: comm.allreduce_(torch.zeros(4, dtype=torch.int32)), TypeError, ""),
            (lambda: comm.all_gather_update(half, four), gradwire.Unsupported, ""),
            (lambda: comm.broadcast_(four, root=1), BAD, "root is 1 in a world of 1"),
            (lambda: comm.reduce_scatter(four, four.clone(), "powersgd:rank=2"), BAD, "use a reducer"),
            (lambda: comm.allreduce_(four, "powersgd:rank=2"), BAD, "use a reducer")]
        for call, error, text in cases:
            with self.assertRaisesRegex(error, text):
                call()
        comm.check()

    def test_started_calls_run_in_the_background(self) -> None:
        started = threading.Barrier(2)

        def body(comm: gradwire.Communicator) -> None:
            whole, part = full(100, comm.rank), full(50, 0)
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
            requests += [comm.start(comm.reduce_scatter, part, whole),
                         comm.start(reducer.allreduce, [gradient])]
            for request in reversed(requests):
                request.wait()
                self.assertTrue(request.done())
                request.close()
            self.assertTrue((whole == 1).all() and (part == 1).all() and (gradient == 0.5).all())

        run_ranks(2, body)

    def test_calls_that_cannot_start_raise_immediately(self) -> None:
        with gradwire.Communicator() as comm, gradwire.Communicator() as other:
            for call, text in ((lambda: comm.start(comm.allreduce_, full(3, 0), "int3"), "int3"),
                               (lambda: comm.start(comm.check), "makes no collective call"),
                               (lambda: comm.start(other.allreduce_, full(3, 0)),
                                "makes no collective call of this communicator")):
                with self.assertRaisesRegex(BAD, text):
                    call()
            comm.start(comm.allreduce_, full(3, 0)).wait(60)

    def failures(self, call: Callable[[gradwire.Communicator], Any]) -> List[str]:
        """Returns the text of the CommFailed of each of 2 ranks."""
        def body(comm: gradwire.Communicator) -> str:
            with self.assertRaises(gradwire.CommFailed) as caught:
                call(comm)
            return str(caught.exception)

        return run_ranks(2, body)

    def test_calls_of_different_tags_or_tensors_are_refused_by_name(self) -> None:
        def averages(comm: gradwire.Communicator) -> None:
            for name in ("weight", "bias") if comm.rank == 0 else ("bias", "weight"):
                gradwire.allreduce_(torch.ones(64), comm=comm, tag=name)

        for text in self.failures(averages):
            for name in ("weight", "bias"):
                self.assertIn(f"gw_allreduce '{name}'", text)
        for text in self.failures(lambda comm: gradwire.Reducer(
                comm, "fp32", [(name, 4, 4) for name in ("ab" if comm.rank == 0 else "ba")], tag="head")):
            for name in ("a", "b"):
                self.assertIn(f"tensor 0: '{name}' (4 x 4)", text)


class Groups(unittest.TestCase):
    """Tests groups that are split, shrink and grow."""

    def setUp(self) -> None:
        ports = contextlib.ExitStack()
        self.addCleanup(ports.close)
        self.name = f"tcp://127.0.0.1:{reserve_port(ports)}"

    def test_a_communicator_is_split_by_color_and_key(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            with comm.split(color=comm.rank % 2, key=-comm.rank) as part:
                mine = part.allreduce_(full(10, comm.rank), op="sum")
                self.assertIsNone(comm.split(color=-1))
                return part.world, part.rank, mine[9], part.bytes_sent > 0

        self.assertEqual(run_ranks(3, body), [(2, 1, 2.0, True), (1, 0, 1.0, False), (2, 0, 2.0, True)])

    def test_survivors_continue_after_a_rank_leaves(self) -> None:
        def body(comm: gradwire.Communicator) -> Any:
            ones = full(1000, 1)
            self.assertEqual(comm.allreduce_(ones, op="sum")[-1], 3)
            if comm.rank == 0:
                return None  # closes the communicator and its store
            with self.assertRaises(gradwire.CommFailed):
                comm.allreduce_(ones)
            rest, ranks = comm.shrink()
            with rest:
                return ranks, rest.rank, rest.world, rest.allreduce_(full(1000, comm.rank), op="sum")[-1]

        self.assertEqual(run_ranks(3, body, self.name, shrinkable=True),
                         [None, ([1, 2], 0, 2, 3.0), ([1, 2], 1, 2, 3.0)])
        with gradwire.Communicator() as alone:
            with self.assertRaisesRegex(ValueError, "timeout_s is 0 s: expected at least 0.001 s"):
                alone.shrink(timeout_s=0)
            with self.assertRaisesRegex(BAD, "cannot continue when ranks die"):
                alone.shrink()

    def test_a_rank_joins_between_two_calls(self) -> None:
        late: List[Any] = []

        def place(comm: gradwire.Communicator) -> Any:
            with comm:
                return comm.rank, comm.world, comm.allreduce_(full(1000, 1), op="sum")[-1]

        def body(comm: gradwire.Communicator) -> Any:
            comm.admit(3)
            comm.allreduce_(full(1, 1))  # all ranks have called admit()
            invitation = comm.invitation()
            joiner = threading.Thread(target=lambda: late.append(
                place(gradwire.Communicator.join(invitation, timeout_s=60))))
            if comm.rank == 1:
                joiner.start()
            for _ in range(100_000):
                if comm.broadcast_(full(1, comm.waiting))[0] > 0 and (grown := comm.grow()) is not None:
                    break
            result = place(grown)
            if comm.rank == 1:
                joiner.join()
            return result

        self.assertEqual(run_ranks(2, body, self.name, shrinkable=True), [(0, 3, 3.0), (1, 3, 3.0)])
        self.assertEqual(late, [(2, 3, 3.0)])
        with gradwire.Communicator() as alone:
            self.assertEqual(alone.waiting, 0)
            with self.assertRaisesRegex(BAD, "shrinkable=True"):
                alone.invitation()


class Strings(unittest.TestCase):
    def test_a_nul_byte_is_refused_in_every_string(self) -> None:
        comm = gradwire.Communicator()
        a, b = full(4, 1), full(4, 1)
        calls: Dict[str, List[Callable[[], Any]]] = {
            "the rendezvous": [lambda: gradwire.Communicator("local://a\0b", 0, 1)],
            "the secret": [lambda: gradwire.Communicator(secret="a\0b")],
            "the interface": [lambda: gradwire.Communicator(interface="lo\0b")],
            "the invitation": [lambda: gradwire.Communicator.join("tcp://127.0.0.1:9\0b", timeout_s=1)],
            "the tag": [lambda: comm.allreduce_(a, tag="a\0b")],
            "the reason": [lambda: comm.abort("a\0b")],
            "the tensor's name": [lambda: gradwire.Reducer(comm, "fp32", [("a\0b", 2, 2)])],
            "the format's name": [lambda: gradwire.register_format(
                "a\0b", block=4, bytes=16, encode=lambda v: v.view(np.uint8),
                decode=lambda v: v.view(np.float32))],
            "the spec": [
                lambda: comm.allreduce_(a, "int8\0junk"),
                lambda: comm.allreduce_(a, "int8\0junk", residual=b),
                lambda: comm.reduce_scatter(b, a, "int8\0junk"), lambda: comm.all_gather(b, a, "int8\0junk"),
                lambda: comm.all_gather_update(b, a, "int8\0junk"),
                lambda: comm.broadcast_(a, 0, "int8\0junk"),
                lambda: gradwire.Reducer(comm, "int8\0junk", [("a", 2, 2)])]}
        for what, each in calls.items():
            for call in each:
                with self.assertRaisesRegex(BAD, f"{what} .*NUL"):
                    call()
        for name in (os.fsdecode(b"layer caf\xe9"), "\ud800"):
            with self.assertRaisesRegex(BAD, "the tag .* not Unicode"):
                comm.allreduce_(a, tag=name)
        with self.assertRaisesRegex(TypeError, "the spec is NoneType, not str"):
            comm.allreduce_(a, None)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "the rendezvous is bytes"):
            gradwire.Communicator(b"tcp://localhost:1", 0, 1)  # type: ignore[arg-type]
        comm.check()  # the communicator has not failed

    def test_the_rendezvous_is_a_path_and_need_not_be_unicode(self) -> None:
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            name = os.fsdecode(os.fsencode(folder) + b"/caf\xe9")
            os.mkdir(name)
            for place in (pathlib.Path(folder, "meeting"), pathlib.Path("relative"), f"file://{name}/meeting",
                          pathlib.Path(name, "another meeting")):
                means = run_ranks(2, lambda comm: float(comm.allreduce_(full(3, comm.rank))[0]), place)
                self.assertEqual(means, [0.5, 0.5])
            os.chdir(before)


if __name__ == "__main__":
    unittest.main(verbosity=2)
