#!/usr/bin/python3
"""Tests wire formats registered from Python: errors, ranks that are threads, and docs/for-researchers.md.

ddp.py and ddp_formats.py have ranks that are processes.
"""
from __future__ import annotations

import gc
import os
import pathlib
import re
import tempfile
import threading
import unittest
from typing import Any, Dict, List

import numpy as np

import gradwire
import gradwire.torch
import launch
from gradwire import _native
from four_bits import BLOCK, BYTES, decode, encode
from thread_ranks import run_ranks

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "for-researchers.md"

# Checks the page's claims after its program.
CHECKS = """
stats = hook.stats()
assert 7.0 < stats["dense_bytes"] / stats["wire_bytes"] < 7.2, stats
import laws
laws.ranks_agree("gradients", *(p.grad.numpy() for p in model.parameters()))
assert all(p.grad.abs().sum() > 0 for p in model.parameters())
"""


def register(name: str, **changes: Any) -> None:
    gradwire.register_format(name,
                             **{**dict(block=BLOCK, bytes=BYTES, encode=encode, decode=decode), **changes})


class Registration(unittest.TestCase):
    def test_what_a_function_returns_wrong_is_named_with_what_was_expected(self) -> None:
        cases: Dict[str, Dict[str, Any]] = {
            r"encode: returned uint8 of shape \(4, 36\), expected uint8 of shape \(4, 35\)": dict(
                bytes=BYTES - 1),
            r"encode: returned float32 of shape \(4, 64\), expected uint8 of shape \(4, 36\)": dict(
                encode=lambda v: v),
            r"encode: returned NoneType, expected uint8 of shape \(4, 36\)": dict(encode=lambda v: None),
            r"encode: returned uint8 of shape \(36,\), expected": dict(encode=lambda v: encode(v)[0]),
            r"encode: returned torch.uint8 of shape \(4, 36\) \(Tensor\), expected": dict(
                encode=lambda v: gradwire.torch.torch.from_numpy(encode(v))),
            r"decode: returned float64 of shape \(4, 64\), expected float32 of shape \(4, 64\)": dict(
                decode=lambda d: decode(d).astype(np.float64)),
            r"encode: raised ZeroDivisionError: division by zero": dict(encode=lambda v: 1 / 0),
            r"block is 0, must be 1 to 65536": dict(block=0)}
        for text, changes in cases.items():
            with self.assertRaisesRegex(gradwire.BadArgument, "wire format 'wrong': " + text) as caught:
                register("wrong", **changes)
            if "ZeroDivisionError" in text:
                self.assertIsInstance(caught.exception.__cause__, ZeroDivisionError)
            else:
                self.assertIsNone(caught.exception.__cause__)
        for name, text in (("bf16", "one of Gradwire's own"), ("powersgd", "a codec"), ("a-b",
                                                                                        "letters, digits")):
            with self.assertRaisesRegex(gradwire.BadArgument, text):
                register(name)
        with self.assertRaisesRegex(gradwire.BadArgument, "unknown method 'wrong'"):
            gradwire.torch.Hook("wrong")

    def test_registering_again_is_legal_with_the_same_sizes(self) -> None:
        register("again")
        register("again", encode=lambda v: encode(np.zeros_like(v)))
        with self.assertRaisesRegex(gradwire.BadArgument,
                                    "64 values in 36 bytes, which cannot become blocks of 32"):
            register("again", block=32)

        def body(comm: gradwire.Communicator) -> float:
            return float(gradwire.allreduce_(np.ones(100, np.float32), "again", comm=comm).sum())

        self.assertEqual(run_ranks(2, body), [0.0, 0.0])


class Threads(unittest.TestCase):
    def test_a_call_covers_many_blocks_and_the_arrays_are_ones_own(self) -> None:
        seen = []

        def greedy(values: Any) -> Any:
            seen.append(values)
            result = encode(values)
            values[:] = np.nan
            return result

        register("greedy", encode=greedy)
        seen.clear()

        def body(comm: gradwire.Communicator) -> Any:
            array = np.random.default_rng(comm.rank).standard_normal(1_000_000).astype(np.float32)
            exact = gradwire.allreduce_(array.copy(), comm=comm)
            gradwire.allreduce_(array, "greedy:schedule=two_shot", comm=comm)
            return array, np.linalg.norm(array - exact) / np.linalg.norm(exact)

        results = run_ranks(4, body)
        for array, error in results:
            np.testing.assert_array_equal(array, results[0][0])
            self.assertTrue(0.05 < error < 0.25, error)
        # Each rank encodes four chunks, one of which holds a sum, in at most 16 slices each.
        self.assertGreaterEqual(sum(len(values) for values in seen), 4 * 1_000_000 // BLOCK)
        self.assertLessEqual(len(seen), 4 * 4 * 16)
        self.assertTrue(all(np.isnan(values).all() for values in seen), "what was kept has been overwritten")

    def test_an_error_during_training_reaches_every_rank_with_its_cause(self) -> None:
        def moody(values: Any) -> Any:
            if values.max() > 100:
                raise KeyError("lunch")
            return encode(values)

        register("moody", encode=moody)

        def body(comm: gradwire.Communicator) -> Any:
            reducer = gradwire.Reducer(comm, "moody:schedule=ring,dense=off", [("w", 1000, 1)])
            reducer.allreduce([np.ones(1000, np.float32)])
            ready.wait()
            caught = []
            for _ in range(2):
                with self.assertRaises(gradwire.CommFailed) as failed:
                    reducer.allreduce([np.full(1000, 1000 * comm.rank, np.float32)])
                caught.append(failed.exception)
            with self.assertRaises(gradwire.CommFailed):
                comm.check()
            return caught

        ready = threading.Barrier(3)
        for errors in run_ranks(3, body):
            for error in errors:
                self.assertIn("wire format 'moody': encode: raised KeyError: 'lunch'", str(error))
                self.assertIsInstance(error.__cause__, KeyError)

    def test_garbage_that_is_collected_in_a_callback_is_destroyed_after_it(self) -> None:
        garbage: List[Any] = []
        handles: List[Any] = []

        def collecting(values: Any) -> Any:
            if garbage:
                garbage.clear()
                gc.collect()
            return encode(values)

        register("collecting", encode=collecting)

        def body(comm: gradwire.Communicator) -> None:
            reducer = gradwire.Reducer(comm, "fp32", [("w", 8, 1)])
            handles.append(reducer._handle)
            if comm.rank == 0:
                cycle: Any = [reducer]
                cycle.append(cycle)
                garbage.append(cycle)
                del cycle
            del reducer
            gradwire.allreduce_(np.ones(1000, np.float32), "collecting", comm=comm)

        run_ranks(2, body)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        for handle in handles:
            with self.assertRaisesRegex(gradwire.BadHandle, "was destroyed"):
                _native.call("gw_reducer_state_save", handle, None, 0, None)

    def test_a_busy_interpreter_only_delays_it(self) -> None:
        register("beside")
        done = threading.Event()

        def spin() -> None:
            while not done.is_set():
                sum(range(1000))

        spinner = threading.Thread(target=spin)
        spinner.start()

        def body(comm: gradwire.Communicator) -> bool:
            array = np.ones(100_000, np.float32)
            for _ in range(3):
                gradwire.allreduce_(array, "beside", comm=comm)
            return bool(np.isclose(array, 1).all())

        try:
            self.assertEqual(run_ranks(2, body), [True, True])
        finally:
            done.set()
            spinner.join()


class Page(unittest.TestCase):
    def test_the_researchers_page_runs_as_printed(self) -> None:
        blocks = [
            b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "register_format" in b]
        self.assertEqual(len(blocks), 1)
        lines = [line for line in blocks[0].splitlines() if line.strip()]
        self.assertLessEqual(len(lines), 20, "the page promises 20 lines")
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "mine.py")
            script.write_text(f"{blocks[0]}\nimport sys\nsys.path.append({os.path.dirname(os.path.abspath(__file__))!r})\n{CHECKS}")
            self.assertEqual(launch.run_ranks(script, 2, [], timeout_s=150), [0, 0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
