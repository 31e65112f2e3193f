#!/usr/bin/env python3
"""Tests the Python package on simulated GPUs: XLA's calls of gradwire.jax on platform CUDA, and CUDA arrays.

GRADWIRE_LIBRARY names build/standin/libgradwire.so. Needs GRADWIRE_STANDIN_GPUS of at least 4 and
CUDA_DEVICE_MAX_CONNECTIONS=32, but neither JAX nor PyTorch.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
import unittest
from typing import Any, Callable, Dict, List, Optional

import gradwire
import simulated
import xla
from simulated import Array, Pinned, Stream, cuda, encode, group, mean, numbers, together

COUNT = 1500
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
# The specs name a schedule, because on the host the planner may choose another schedule with another rounding
# order.
SPECS = ("bf16:schedule=two_shot", "int8:schedule=two_shot", "int4:rotate=hadamard,schedule=ring")


def part(spec: str = "fp32", dtype: str = "float32", keeps: bool = False, op: str = "avg") -> Dict[str, Any]:
    return {"spec": spec, "keeps": keeps, "tag": "here", "op": op, "dtype": DTYPES[dtype], "devices": 0}


# The plan has an exact FP32 mean, and a rounded mean with a residual.
HELD_PLAN = [part(), part(SPECS[1], keeps=True)]


def average(ordinal: int, stream: Optional[Stream], arrays: List[Array],
            plan: List[Dict[str, Any]]) -> Optional[xla.Failure]:
    """Calls the handler as XLA does: an unread token precedes the arrays."""
    token = (8, 1)
    return xla.call("CUDA" if stream is not None else "cpu", ordinal,
                    stream.handle if stream is not None else 0,
                    [token, *((array.data_ptr(), array.numel()) for array in arrays)], plan)


@contextlib.contextmanager
def jax_ranks(world: int, on: str = "cuda") -> Any:
    """Sets the ranks as gradwire.jax.init() does in a process with `world` devices."""
    with group(world, on) as communicators:
        xla.ranks.set(dict(enumerate(communicators)), world)
        try:
            yield communicators
        finally:
            xla.ranks.set({}, 0)


def residual_of(rank: int, device: Optional[int]) -> Array:
    return Array(device, [x / 64 for x in numbers(rank + 100, COUNT)])


class Bits(unittest.TestCase):
    def same(self, found: Any, right: Any, of: object = "") -> None:
        self.assertTrue(found == right, of)  # assertEqual() takes a minute to format differences


class CudaCalls(Bits):
    """Tests gradwire.jax's custom call on platform CUDA."""

    def each_world(self, body: Callable[[int, int], Any], worlds: Any = (1, 2, 4)) -> List[List[Any]]:
        results = []
        for world in worlds:
            with self.subTest(world=world), jax_ranks(world):
                results.append(together(world, lambda rank: body(world, rank)))
        return results

    def test_every_type_is_averaged_exactly(self) -> None:
        def rank_of(world: int, rank: int) -> None:
            with Stream(rank) as stream:
                arrays = [Array(rank, numbers(rank, COUNT), dtype) for dtype in DTYPES]
                for array in arrays:
                    array.write(stream)
                plan = [part(dtype=dtype, op="sum" if dtype == "float32" else "avg") for dtype in DTYPES]
                self.assertIsNone(average(rank, stream, arrays, plan))
                for array, dtype in zip(arrays, DTYPES):
                    scale = world if dtype == "float32" else 1
                    self.same(array.read(stream), encode([x * scale for x in mean(world, COUNT)], dtype),
                              dtype)
                    array.free()

        self.each_world(rank_of)

    def test_results_and_residuals_have_the_bits_of_the_host(self) -> None:
        def rank_of(rank: int, device: Optional[int]) -> List[bytes]:
            with contextlib.ExitStack() as stack:
                stream = None if device is None else stack.enter_context(Stream(device))
                bits = []
                for spec in SPECS:
                    arrays = [Array(device, numbers(rank, COUNT)),
                              Array(device, numbers(rank + 50, COUNT), "float16"), residual_of(rank, device)]
                    for array in arrays if stream is not None else []:
                        array.write(stream)
                    plan = [part(spec, keeps=True), part(spec, "float16")]
                    # The arrays are the means, followed by the residuals.
                    self.assertIsNone(average(rank, stream, arrays, plan))
                    bits += [array.read(stream) for array in arrays]
                    for array in arrays:
                        array.free()
                return bits

        for world in (2, 4):
            with jax_ranks(world):
                on_gpus = together(world, lambda rank: rank_of(rank, rank))
            with jax_ranks(world, on="host"):
                on_host = together(world, lambda rank: rank_of(rank, None))
            for rank in range(world):
                self.same(on_gpus[rank], on_host[rank], f"rank {rank} of {world}")
            means = [[bits[i] for i in range(len(bits)) if i % 3 != 2] for bits in on_gpus]
            self.same(means, [means[0]] * world, world)

    def held_call(self, rank: int, call_on: Callable[[Stream, Stream], Stream]) -> List[bytes]:
        """Returns the results of three calls. Each call's stream is stopped before the arrays are written,
        and the arrays are overwritten after the call.

        An earlier call on the same stream builds the programs of these arrays, because calls that build
        programs wait for each other.
        """
        results = []
        with Stream(rank) as stream, Stream(rank) as other:
            arrays = [Array(rank, numbers(rank, COUNT)), Array(rank, numbers(rank + 50, COUNT)),
                      residual_of(rank, rank)]
            copies = [Pinned(array.bytes) for array in arrays]
            self.assertIsNone(average(rank, call_on(stream, other), arrays, HELD_PLAN))
            for _ in range(3):
                with stream.held():
                    for array in arrays:
                        array.write(stream)
                    used = call_on(stream, other)
                    failure = average(rank, used, arrays, HELD_PLAN)
                    for copy, array in zip(copies, arrays):
                        copy.take(array, stream)
                        array.overwrite(stream)
                    done = stream.record()
                    if used is not stream:
                        used.synchronize()
                    self.assertFalse(done())
                stream.synchronize()
                self.assertIsNone(failure)
                results += [copy.read() for copy in copies]
            for owned in (*arrays, *copies):
                # Freeing waits for all streams, and streams of other ranks may still be stopped.
                self.addCleanup(owned.free)
        return results

    @staticmethod
    def host_calls(world: int) -> List[List[bytes]]:
        """Returns the expected result of held_call() on the right stream."""
        def rank_of(rank: int) -> List[bytes]:
            arrays = [Array(None, numbers(rank, COUNT)), Array(None, numbers(rank + 50, COUNT)),
                      residual_of(rank, None)]
            assert average(rank, None, arrays, HELD_PLAN) is None
            return [array.read() for array in arrays] * 3

        with jax_ranks(world, on="host"):
            return together(world, rank_of)

    def test_a_call_is_enqueued_on_its_stream_without_waiting(self) -> None:
        right = self.each_world(lambda world, rank: self.held_call(rank, lambda own, other: own))
        for world, results in zip((1, 2, 4), right):
            self.same(results, self.host_calls(world), world)
            self.same(results[0][0], encode(mean(world, COUNT), "float32"), world)

    def test_a_call_on_another_stream_gives_other_bits(self) -> None:
        wrong = self.each_world(lambda world, rank: self.held_call(rank, lambda own, other: other), (2, 4))
        for world, results in zip((2, 4), wrong):
            right = self.host_calls(world)
            for rank in range(world):
                for found, expected in zip(results[rank], right[rank]):
                    self.assertFalse(found == expected, f"rank {rank} of {world} has the right bits")

    def test_the_threads_device_stays_current(self) -> None:
        def rank_of(world: int, rank: int) -> None:
            with Stream(rank) as stream:
                array = Array(rank, numbers(rank, COUNT))
                array.write(stream)
                cuda("cudaSetDevice", 3 - rank)
                self.assertIsNone(average(rank, stream, [array], [part("int8")]))
                self.assertEqual(simulated.current_device(), 3 - rank)
                self.assertIsNotNone(average(rank, stream, [array], [part("nonsense")]))
                self.assertEqual(simulated.current_device(), 3 - rank)
                stream.synchronize()
                array.free()

        self.each_world(rank_of, (2, 4))

    def test_errors_have_their_code_and_message(self) -> None:
        def expect(failure: Optional[xla.Failure], code: int, message: str) -> None:
            assert failure is not None
            self.assertEqual(failure.code, code, failure)
            self.assertIn(message, failure.message)

        with jax_ranks(1), Stream(0) as stream:
            array = Array(0, numbers(0, COUNT))
            array.write(stream)
            here = [(8, 1), (array.data_ptr(), COUNT)]
            expect(average(3, stream, [array], [part()]), xla.ABORTED, "no communicator for device 3")
            expect(average(0, stream, [array], [part("int9")]), xla.INVALID_ARGUMENT, "int9")
            expect(xla.call("CUDA", 0, None, here, [part()]), xla.ABORTED, "this executor has no stream")
            expect(xla.call("CUDA", 0, stream.handle, here, [part()], results=[8, 16]), xla.ABORTED,
                   "did not alias operand 1")
            expect(average(0, stream, [array], [{**part(), "devices": 2}]), xla.ABORTED,
                   "over 2 of 1 devices")
            cuda("cudaStreamBeginCapture", stream.handle, 1)
            failure = average(0, stream, [array], [part()])
            graph = simulated.c_void_p()
            cuda("cudaStreamEndCapture", stream.handle, simulated.byref(graph))
            cuda("cudaGraphDestroy", graph)
            expect(failure, xla.UNIMPLEMENTED, "captured in a CUDA graph")
            # The failed calls must not end the group.
            self.assertIsNone(average(0, stream, [array], [part()]))
            self.same(array.read(stream), encode(numbers(0, COUNT), "float32"))
            array.free()
        with jax_ranks(2) as communicators:
            communicators[1].abort("rank 1 has had enough")

            def fails(rank: int) -> None:
                with Stream(rank) as stream:
                    array = Array(rank, numbers(rank, COUNT))
                    expect(average(rank, stream, [array], [part()]), xla.ABORTED, "rank 1 has had enough")
                    array.free()

            together(2, fails)

    def test_xla_may_not_capture_calls(self) -> None:
        for platform in ("CUDA", "cpu"):
            self.assertEqual(xla.metadata(platform), (0, 3, 0))  # traits: not COMMAND_BUFFER_COMPATIBLE

    def test_host_calls_work_with_the_same_library(self) -> None:
        for world in (1, 2, 4):
            with jax_ranks(world, on="host"):
                def rank_of(rank: int) -> bytes:
                    array = Array(None, numbers(rank, COUNT))
                    self.assertIsNone(average(rank, None, [array], [part()]))
                    return array.read()

                self.same(together(world, rank_of), [encode(mean(world, COUNT), "float32")] * world, world)


class CudaArrays(Bits):
    """Tests gradwire's communicators and reducers with arrays that look like PyTorch's CUDA tensors."""

    def test_collectives_give_means_and_shards(self) -> None:
        for world in (1, 2, 4):
            with group(world, "cuda") as communicators:
                def rank_of(rank: int) -> None:
                    comm, share = communicators[rank], COUNT // world
                    own = slice(4 * rank * share, 4 * (rank + 1) * share)
                    right = encode(mean(world, share * world), "float32")
                    with Stream(rank) as stream:
                        array, piece = Array(rank, numbers(rank, share * world)), Array(rank, [0.0] * share)
                        whole = Array(rank, [0.0] * share * world)
                        array.write(stream)
                        comm.reduce_scatter(piece, array, stream=stream.handle)
                        comm.all_gather(whole, piece, stream=stream.handle)
                        comm.allreduce_(array, stream=stream.handle)
                        self.same(piece.read(stream), right[own], "piece")
                        self.same(whole.read(stream), right, "whole")
                        self.same(array.read(stream), right, "array")
                        comm.check()
                        for owned in (array, piece, whole):
                            owned.free()

                together(world, rank_of)

    def test_reducers_have_the_bits_of_the_host(self) -> None:
        def step(rank: int, comm: gradwire.Communicator, device: Optional[int], spec: str) -> List[bytes]:
            arrays = [Array(device, numbers(rank, COUNT)), Array(device, numbers(rank + 50, 40))]
            reducer = gradwire.Reducer(comm, spec, [("w", 30, 50), ("b", 40, 1)])
            with contextlib.closing(reducer), contextlib.ExitStack() as stack:
                stream = None if device is None else stack.enter_context(Stream(device))
                addresses = reducer.addresses_of([array.data_ptr() for array in arrays])
                for raw in (False, True):  # the second step uses the first step's residual
                    for array in arrays if stream is not None else []:
                        array.write(stream)
                    handle = stream.handle if stream is not None else 0
                    reducer.allreduce_at(addresses, handle) if raw else reducer.allreduce(arrays, handle)
                bits = [array.read(stream) for array in arrays]
            for array in arrays:
                array.free()
            return bits

        for spec in ("fp32:schedule=two_shot", "int8:schedule=two_shot"):
            with group(2, "cuda") as gpus, group(2, "host") as hosts:
                on_gpus = together(2, lambda rank: step(rank, gpus[rank], rank, spec))
                on_host = together(2, lambda rank: step(rank, hosts[rank], None, spec))
            self.same(on_gpus[0], on_gpus[1], spec)
            self.same(on_gpus, on_host, spec)

    def test_arrays_of_another_device_are_refused(self) -> None:
        with gradwire.Communicator(device=0) as comm:
            for device in (1, None):
                array = Array(device, numbers(0, COUNT))
                with self.assertRaisesRegex(ValueError, "device"):
                    comm.allreduce_(array)
                array.free()


class Doctor(unittest.TestCase):
    def doctor(self, gpus: int) -> str:
        found = subprocess.run([sys.executable, "-m", "gradwire.doctor"], stdout=subprocess.PIPE,
                               universal_newlines=True,
                               env={**os.environ, "GRADWIRE_STANDIN_GPUS": str(gpus)})
        self.assertEqual(found.returncode, 0, found.stdout)
        self.assertIn("the mean is right", found.stdout)
        return next(line for line in found.stdout.splitlines() if line.startswith("CUDA:"))

    def test_it_finds_a_device(self) -> None:
        self.assertIn("device 0 works", self.doctor(1))

    def test_it_says_that_there_is_none(self) -> None:
        self.assertNotIn("device 0 works", self.doctor(0))


if __name__ == "__main__":
    # Ends the process if a call hangs because its stream is stopped.
    faulthandler.dump_traceback_later(500, exit=True)
    xla.register()
    unittest.main()
