#!/usr/bin/python3
"""Tests that numbers and arrays that the library cannot take are refused by name, where they are passed."""
from __future__ import annotations

import array
import ctypes
import datetime
import importlib.util
import inspect
import math
import re
import tempfile
import unittest
import unittest.mock
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import torch
import torch.distributed as dist

import gradwire
import gradwire.fsdp
import gradwire.torch
from gradwire import _hook_state

TODAY = hasattr(dist, "device_mesh")  # PyTorch 2.9 or later, not 1.13
NO_INT = [math.nan, math.inf, 1.5, "3", None]
BAD: Dict[str, List[Any]] = {
    "int32": [2**31, 2**32, 2**32 + 1, 2**64, -2**31 - 1, -2**63 - 1, *NO_INT],
    "int64": [2**63, 2**64, 2**64 + 4, -2**63 - 1, *NO_INT],
    "uint64": [-1, 2**64, 2**64 + 1, -2**63 - 1, *NO_INT],
    "seconds": [math.nan, -math.inf, 0, -1, -2**63 - 1, -10**400, "3", b"3", None, datetime.timedelta(0)],
    "real": [math.nan, math.inf, -1, -2**63 - 1, 10**400, "3", None],
}
GOOD_SECONDS = [1e-3, 20, np.float32(20), np.int64(20), 1e16, 1e17, 2**64, 10**400, math.inf,
                datetime.timedelta(seconds=20), datetime.timedelta.max]

comm = gradwire.Communicator()


def setUpModule() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def tearDownModule() -> None:
    dist.destroy_process_group()


def zeros(count: int = 4) -> np.ndarray:
    return np.zeros(count, np.float32)


def wait(seconds: Any) -> None:
    comm.start(comm.allreduce_, zeros()).wait(seconds)


def ddp() -> Any:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def registered(**sizes: Any) -> None:
    gradwire.register_format("sized", **{"block": 1, "bytes": 4, **sizes}, encode=lambda a: a.view(np.uint8),
                             decode=lambda a: a.view(np.float32))


def dion(**options: Any) -> Any:
    return gradwire.torch.Dion([torch.nn.Parameter(torch.zeros(4, 4))], comm=comm, **options)


def numbers() -> Dict[str, Tuple[str, Callable[[Any], Any]]]:
    """Returns the kind of every number of the public functions, and a call that passes it."""
    C, four = gradwire.Communicator, zeros()
    gradients = {"w": zeros() + 1}

    def choose(**options: Any) -> Any:
        return gradwire.choose(comm, ["fp32"], gradients, **options)

    def reducer(tensor: Any = ("w", 4, 1), **options: Any) -> Any:
        return gradwire.Reducer(comm, "fp32", [tensor], **options)

    table: Dict[str, Tuple[str, Callable[[Any], Any]]] = {
        "Communicator.rank": ("int32", lambda v: C(None, v, 1)),
        "Communicator.world": ("int32", lambda v: C("local://a", 0, v)),
        "Communicator.device": ("int32", lambda v: C(device=v)),
        "Communicator.timeout_s": ("seconds", lambda v: C(timeout_s=v)),
        "Communicator.ranks_per_node": ("int32", lambda v: C(ranks_per_node=v)),
        "Communicator.ports": ("int32", lambda v: C(ports=(20000, v))),
        "Communicator.split.color": ("int32", lambda v: comm.split(v)),
        "Communicator.split.key": ("int32", lambda v: comm.split(0, v)),
        "Communicator.admit.most": ("int32", lambda v: comm.admit(v)),
        "Communicator.broadcast_.root": ("int32", lambda v: comm.broadcast_(four, v)),
        "Communicator.reduce_scatter.counts": ("int64", lambda v: comm.reduce_scatter(four, zeros(), counts=[v])),
        "Communicator.all_gather.counts": ("int64", lambda v: comm.all_gather(four, zeros(), counts=[v])),
        "Communicator.all_gather_update.counts": ("int64", lambda v: comm.all_gather_update(
            four, zeros(), counts=[v])),
        "Reducer.tensors": ("int64", lambda v: reducer(("w", v, 4))),
        "Reducer.tensors, cols": ("int64", lambda v: reducer(("w", 4, v))),
        "Reducer.bucket_bytes": ("int64", lambda v: reducer(bucket_bytes=v)),
        "Reducer.seed": ("uint64", lambda v: reducer(seed=v)),
        "Reducer.allreduce.stream": ("uint64", lambda v: reducer().allreduce([four], v)),
        "Reducer.allreduce_at.stream": ("uint64", lambda v: reducer().allreduce_at(
            gradwire.Reducer.addresses_of([four.ctypes.data]), v)),
        "choose.error": ("real", lambda v: choose(error=v)),
        "choose.compute_ms": ("real", lambda v: choose(compute_ms=v, backward_ms=1)),
        "choose.backward_ms": ("real", lambda v: choose(backward_ms=v, compute_ms=1)),
        "choose.bucket_bytes": ("int64", lambda v: choose(bucket_bytes=v)),
        "choose.seed": ("uint64", lambda v: choose(seed=v)),
        "choose.stream": ("uint64", lambda v: choose(stream=v)),
        "register_format.block": ("int64", lambda v: registered(block=v)),
        "register_format.bytes": ("int64", lambda v: registered(bytes=v)),
        "torch.Hook.timeout_s": ("seconds", lambda v: gradwire.torch.Hook(timeout_s=v).close()),
        "torch.Hook.seed": ("uint64", lambda v: gradwire.torch.Hook(seed=v)),
        "torch.Hook.min_ranks": ("int32", lambda v: gradwire.torch.Hook(min_ranks=v)),
        "torch.compress.timeout_s": ("seconds", lambda v: gradwire.torch.compress(ddp(), timeout_s=v).close()),
        "torch.compress.seed": ("uint64", lambda v: gradwire.torch.compress(ddp(), seed=v)),
        "torch.compress.min_ranks": ("int32", lambda v: gradwire.torch.compress(ddp(), min_ranks=v)),
        "torch.communicator.device": ("int32", lambda v: gradwire.torch.communicator(device=v)),
        "torch.communicator.timeout_s": ("seconds", lambda v: gradwire.torch.communicator(timeout_s=v)),
        "torch.Dion.rank": ("int32", lambda v: dion(rank=v) if v != "3" else dion(rank="x")),
        "torch.Dion.seed": ("uint64", lambda v: dion(seed=v) if v != "3" else dion(seed="x")),
        "torch.Dion.mu": ("real", lambda v: dion(mu=v) if v != "3" else dion(mu="x")),
    }
    for name in ("allreduce_", "broadcast_"):
        call = getattr(comm, name)
        table[f"Communicator.{name}.stream"] = "uint64", lambda v, call=call: call(four, stream=v)
    for name in ("reduce_scatter", "all_gather", "all_gather_update"):
        call = getattr(comm, name)
        table[f"Communicator.{name}.stream"] = "uint64", lambda v, call=call: call(four, zeros(), stream=v)
    if TODAY:
        table["torch.register_backend.min_bytes"] = "int64", lambda v: gradwire.torch.register_backend(min_bytes=v)
        table["fsdp.compress.seed"] = "uint64", lambda v: gradwire.fsdp.compress(torch.nn.Linear(2, 2), seed=v)
    return table


class Numbers(unittest.TestCase):
    # Waits with a limit of their own, which a communicator of one rank, or a model without shards, cannot test.
    BLOCKING = {"Communicator.shrink.timeout_s": lambda v: comm.shrink(v),
                "Communicator.join.timeout_s": lambda v: gradwire.Communicator.join("nowhere", timeout_s=v),
                "Request.wait.timeout_s": wait}
    if TODAY:
        BLOCKING["fsdp.compress.timeout_s"] = lambda v: gradwire.fsdp.compress(torch.nn.Linear(2, 2), timeout_s=v)

    def refused(self, name: str, call: Callable[[Any], Any], value: Any) -> None:
        argument = {"tensors": "rows", "tensors, cols": "cols"}.get(name.split(".")[-1], name.split(".")[-1])
        with self.subTest(f"{name}={value!r}"):
            with self.assertRaises((gradwire.BadArgument, TypeError, ValueError)) as raised:
                call(value)
            self.assertRegex(str(raised.exception), rf"\b{argument}\b")
            self.assertNotIsInstance(raised.exception, ctypes.ArgumentError)

    def test_numbers_that_do_not_fit_are_refused_by_name(self) -> None:
        for name, (kind, call) in numbers().items():
            for value in BAD[kind]:
                self.refused(name, call, value)

    def test_time_limits_are_numbers_or_timedeltas_or_infinite(self) -> None:
        for name, (kind, call) in numbers().items():
            for value in GOOD_SECONDS if kind == "seconds" else []:
                with self.subTest(f"{name}={value!r}"):
                    call(value)
        for value in GOOD_SECONDS:
            with self.subTest(f"wait({value!r})"):
                wait(value) if value != 1e-3 else None
        for name, call in self.BLOCKING.items():
            for value in BAD["seconds"]:
                if name != "Request.wait.timeout_s" or value not in (0, None, datetime.timedelta(0)):
                    self.refused(name, call, value)

    def test_every_public_number_is_swept(self) -> None:
        functions: Dict[str, Any] = {}
        for module, prefix in ((gradwire, ""), (gradwire.torch, "torch."), (gradwire.fsdp, "fsdp.")):
            for name in module.__all__:
                thing = getattr(module, name)
                if not inspect.isclass(thing):
                    functions[prefix + name] = thing
                elif name not in ("Backend", "Choice") and not issubclass(thing, Exception):
                    functions.update({f"{prefix}{name}.{method}": function for method, function in
                                      inspect.getmembers(thing, inspect.isroutine) if method in vars(thing)
                                      and (method[0] != "_" or method == "__init__")})
        found = {f"{name}.{parameter.name}".replace(".__init__", "") for name, function in functions.items()
                 for parameter in inspect.signature(function).parameters.values()
                 if re.search(r"\b(int|float|Seconds)\b", str(parameter.annotation))}
        # Those of an optimizer, addresses, and objects that the package makes itself.
        found -= {f"torch.Dion.{name}" for name in ("lr", "weight_decay", "adamw_lr", "betas", "eps")}
        found -= {"Reducer.addresses_of.addresses"}
        if not TODAY:
            found -= {"torch.register_backend.min_bytes", "fsdp.compress.seed", "fsdp.compress.timeout_s"}
        self.assertEqual(found - set(numbers()) - set(self.BLOCKING), set())

    def test_numpy_integers_are_integers(self) -> None:
        with gradwire.Communicator(None, np.int64(0), np.uint8(1), ports=np.array([0, 0])) as one:
            one.broadcast_(zeros(), np.int16(0), stream=np.int64(0))
            one.all_gather(zeros(), zeros(), counts=np.array([4]))
            gradwire.Reducer(one, "fp32", [("w", np.int32(4), np.int64(1))], seed=np.uint64(2**63)).close()

    @unittest.skipUnless(importlib.util.find_spec("lightning") and importlib.util.find_spec("transformers"),
                         "needs Lightning and transformers")
    def test_callbacks_check_their_options_before_training(self) -> None:
        import gradwire.lightning
        import gradwire.transformers
        for compress in (gradwire.lightning.Compress, gradwire.transformers.Compress):
            for options in ({"timeout_s": math.nan}, {"seed": -1}, {"min_ranks": 2**32}, {"spec": "int3"}):
                self.refused(f"{compress.__module__}.{next(iter(options)) if 'spec' not in options else 'spec'}",
                             lambda _: compress(**options), options)
            compress(timeout_s=datetime.timedelta(minutes=1))


class Foreign:
    """Has a NumPy array's interface, and is none."""

    def __init__(self) -> None:
        self.__array_interface__ = zeros().__array_interface__


class Dispatched(torch.Tensor):
    """A wrapper without memory."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function}")


class Named(torch.Tensor):
    """A subclass with memory."""


def read_only() -> np.ndarray:
    values = zeros()
    values.flags.writeable = False
    return values


def released() -> torch.Tensor:
    values = torch.zeros(8, dtype=torch.float32)[4:]
    getattr(values, "untyped_storage", values.storage)().resize_(0)
    return values


def look_alikes() -> Dict[str, Tuple[Any, Any]]:
    """Returns objects that are not an array of 4 numbers that can be written, and the error."""
    four, f32 = zeros(), torch.zeros(4, dtype=torch.float32)
    found: Dict[str, Tuple[Any, Any]] = {
        "scalar": (np.float32(1), TypeError), "element": (four[1], TypeError),
        "0-d element": (np.full((), 1, np.float32)[()], TypeError), "half scalar": (np.float16(1), TypeError),
        "masked": (np.ma.array(four, mask=[1, 0, 0, 0]), TypeError), "foreign": (Foreign(), TypeError),
        "read-only": (read_only(), ValueError), "big-endian": (four.astype(">f4"), TypeError),
        "broadcast": (np.broadcast_to(np.float32(1), 4), ValueError), "reversed": (zeros()[::-1], ValueError),
        "strided": (zeros(8)[::2], ValueError), "float64": (np.zeros(4), TypeError),
        "unaligned": (np.frombuffer(bytearray(17), np.float32, 4, 1), ValueError),
        "record": (np.zeros(4, [("x", "<f4")]).view(np.recarray), TypeError),
        "list": ([0.0] * 4, TypeError), "bytes": (bytes(16), TypeError), "text": ("four", TypeError),
        "array.array": (array.array("f", four), TypeError), "ctypes": ((ctypes.c_float * 4)(), TypeError),
        "memoryview": (memoryview(four), TypeError), "sparse": (f32.to_sparse(), TypeError),
        "csr": (torch.zeros(2, 2, dtype=torch.float32).to_sparse_csr(), TypeError),
        "negative": (torch._neg_view(f32), ValueError), "complex": (torch.zeros(4).to(torch.complex64), TypeError),
        "meta": (torch.empty(4, dtype=torch.float32, device="meta"), TypeError),
        "quantized": (torch.quantize_per_tensor(f32, 1.0, 0, torch.qint8), TypeError),
        "double": (f32.double(), TypeError), "wrapper": (Dispatched(), TypeError),
        "expanded": (f32[:1].expand(4), ValueError), "released": (released(), ValueError),
        "uninitialized": (torch.nn.parameter.UninitializedParameter(), TypeError),
    }
    if TODAY:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate
        with FakeTensorMode():
            found["fake"] = torch.empty(4, dtype=torch.float32), TypeError
        mesh = init_device_mesh("cpu", (1,))
        found["DTensor"] = DTensor.from_local(torch.zeros(4, dtype=torch.float32), mesh, [Replicate()]), TypeError
        found["parameter of a DTensor"] = torch.nn.Parameter(found["DTensor"][0]), TypeError
    return found


def accepted() -> Iterator[Tuple[str, Any]]:
    f32 = torch.zeros(4, dtype=torch.float32)
    yield "0-d", np.zeros((), np.float32)
    yield "empty", zeros(0)
    yield "matrix", zeros().view(np.matrix)
    with tempfile.NamedTemporaryFile() as file:
        yield "memmap", np.memmap(file.name, np.float32, "w+", shape=4)
    yield "half", np.zeros(4, np.float16)
    yield "0-d tensor", torch.zeros((), dtype=torch.float32)
    yield "empty tensor", torch.zeros(0, dtype=torch.float32)
    yield "parameter", torch.nn.Parameter(f32.clone())
    yield "leaf", f32.clone().requires_grad_()
    yield "subclass", f32.clone().as_subclass(Named)
    yield "view", torch.zeros(8, dtype=torch.float32)[4:]
    with torch.inference_mode():
        yield "inference tensor", f32.clone()
    if hasattr(torch.nn, "Buffer"):
        yield "buffer", torch.nn.Buffer(f32.clone())


class Arrays(unittest.TestCase):
    def calls(self) -> Dict[str, Callable[[Any], Any]]:
        """Returns every public call that takes memory, for each of its arrays."""
        reducer, a, b = gradwire.Reducer(comm, "fp32", [("w", 4, 1)]), zeros(), zeros()
        self.addCleanup(reducer.close)
        return {
            "gradwire.allreduce_": lambda x: gradwire.allreduce_(x),
            "gradwire.allreduce_(comm)": lambda x: gradwire.allreduce_(x, comm=comm),
            "gradwire.torch.allreduce_": lambda x: gradwire.torch.allreduce_(x),
            "allreduce_": lambda x: comm.allreduce_(x),
            "allreduce_'s residual": lambda x: comm.allreduce_(a, "int8", residual=x),
            "broadcast_": lambda x: comm.broadcast_(x),
            "reduce_scatter's output": lambda x: comm.reduce_scatter(x, a),
            "reduce_scatter's input": lambda x: comm.reduce_scatter(a, x),
            "reduce_scatter's residual": lambda x: comm.reduce_scatter(a, b, residual=x),
            "all_gather's output": lambda x: comm.all_gather(x, a),
            "all_gather's input": lambda x: comm.all_gather(a, x),
            "all_gather's residual": lambda x: comm.all_gather(a, b, residual=x),
            "all_gather_update's replica": lambda x: comm.all_gather_update(x, a),
            "all_gather_update's master": lambda x: comm.all_gather_update(a, x),
            "start": lambda x: comm.start(comm.allreduce_, x),
            "start of a reducer": lambda x: comm.start(reducer.allreduce, [x]),
            "Reducer.allreduce": lambda x: reducer.allreduce([x]),
            "choose": lambda x: gradwire.choose(comm, ["fp32"], {"w": x}),
        }

    def test_what_only_looks_like_an_array_is_refused_before_any_call(self) -> None:
        call = gradwire._native.call

        def library(name: str, *arguments: Any) -> None:
            assert name == "gw_request_destroy", f"{name} was called"
            call(name, *arguments)

        calls, things = self.calls(), look_alikes()
        with unittest.mock.patch("gradwire._native.call", library):
            for name, (thing, error) in things.items():
                for where, take in calls.items():
                    with self.subTest(f"{name}: {where}"), self.assertRaises(error):
                        take(thing)

    def test_arrays_and_tensors_with_memory_are_taken(self) -> None:
        for name, thing in accepted():
            with self.subTest(name):
                self.assertIs(comm.allreduce_(thing), thing)
                self.assertIs(comm.broadcast_(thing), thing)
                self.assertIs(gradwire.allreduce_(thing, "int8", comm=comm), thing)

    def test_a_state_of_tensors_without_memory_is_refused(self) -> None:
        for name, (thing, error) in look_alikes().items():
            if name in ("wrapper", "fake", "DTensor", "released"):
                state = {"identity": "", "steps": 1, "tensors": {"w": {"rows": 4, "cols": 1, "state": {
                    "residual": thing}}}}
                with self.subTest(name), self.assertRaises((error, NotImplementedError)):
                    _hook_state.from_dict(state)

    @unittest.skipUnless(TODAY, "torch.func")
    def test_a_function_that_pytorch_transforms_has_no_memory(self) -> None:
        values = torch.zeros(2, 4, dtype=torch.float32)
        for transform in (torch.vmap, torch.func.grad):
            with self.assertRaises(TypeError):
                transform(comm.allreduce_)(values)


if __name__ == "__main__":
    unittest.main(verbosity=2)
