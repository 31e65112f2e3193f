#!/usr/bin/python3
"""Tests the Python package without DDP: arrays, shards, requests, reducers and their states, and errors."""
from __future__ import annotations

import threading
import unittest
import unittest.mock
from typing import Any, List

import numpy as np
import torch

import gradwire
import gradwire.torch
from gradwire._buckets import Bucket, Layout
from thread_ranks import run_ranks


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


class GpuMemory(unittest.TestCase):
    """Tests what the hook does with PyTorch's cache of GPU memory. Stand-ins replace the GPU's functions."""

    def calls_of(self, is_cuda: bool, free: int) -> List[str]:
        """Returns the calls with which a hook makes a bucket's reducer."""
        calls: List[str] = []
        count = 1 << 20
        buffer = unittest.mock.Mock(is_cuda=is_cuda, dtype=torch.float32)
        buffer.numel.return_value = count
        entry = Bucket(0, [], Layout(("w",), ((count, 1),)), 4)

        def reducer(*arguments: Any, **options: Any) -> None:
            calls.append("Reducer")

        with unittest.mock.patch("torch.cuda.mem_get_info", lambda device: (free, 80 << 30)), \
                unittest.mock.patch("torch.cuda.empty_cache", lambda: calls.append("empty_cache")), \
                unittest.mock.patch("gradwire._hook_buckets.Reducer", reducer):
            with gradwire.Communicator() as comm:
                hook = gradwire.torch.Hook("int8", comm=comm)
                hook._new_reducer(entry, buffer, "int8")
                hook.close()
        return calls

    def test_the_cache_is_emptied_before_the_collective_call_if_memory_is_short(self) -> None:
        self.assertEqual(self.calls_of(True, free=100 << 20), ["empty_cache", "Reducer"])

    def test_the_cache_is_kept_if_memory_suffices(self) -> None:
        self.assertEqual(self.calls_of(True, free=40 << 30), ["Reducer"])

    def test_buckets_on_the_host_ask_no_gpu(self) -> None:
        self.assertEqual(self.calls_of(False, free=0), ["Reducer"])


class Shards(unittest.TestCase):
    """Tests reduce-scatter, all-gather, updates of replicas and broadcast."""

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

    def test_residuals_keep_rounding_errors(self) -> None:
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

    def test_replicas_follow_master_copies(self) -> None:
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

    def test_rejects_mismatched_sizes_and_types(self) -> None:
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
    def test_started_calls_run_in_the_background(self) -> None:
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

    def test_invalid_calls_raise_immediately(self) -> None:
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

    def test_rejects_unsupported_arrays(self) -> None:
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

    def test_errors_name_the_cause(self) -> None:
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


if __name__ == "__main__":
    unittest.main(verbosity=2)
