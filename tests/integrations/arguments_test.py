#!/usr/bin/python3
"""Tests that numbers and arrays that the library cannot take are refused by name, where they are passed."""
from __future__ import annotations

import array
import ctypes
import datetime
import functools
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

TODAY = torch.__version__ >= (2, 9)  # with FSDP2 and backends, unlike those of Debian 12 and 13
NO_INT = [math.nan, math.inf, 1.5, "3", None]
NO_SECONDS = [math.nan, -math.inf, -1, -2**63 - 1, -10**400, "3", b"3"]
BAD: Dict[str, List[Any]] = {
    "int32": [2**31, 2**32, 2**32 + 1, 2**64, -2**31 - 1, -2**63 - 1, *NO_INT],
    "int64": [2**63, 2**64, 2**64 + 4, -2**63 - 1, *NO_INT],
    "uint64": [-1, 2**64, 2**64 + 1, -2**63 - 1, *NO_INT],
    "seconds": [*NO_SECONDS, None, 0, datetime.timedelta(0)],
    "wait": NO_SECONDS,  # takes 0, and None
    "limit": [*NO_SECONDS, None, 0, datetime.timedelta(0)],  # of a call that a test of one rank cannot make
    "real": [math.nan, math.inf, -1, -2**63 - 1, 10**400, "3", None],
    "in_a_spec": [2**64, -2**63 - 1, -1, *NO_INT[:3], "x", None],  # Dion writes its numbers into a spec
}
GOOD_SECONDS = [20, np.float32(20), np.int64(20), 1e16, 1e17, 2**64, 10**400, math.inf,
                datetime.timedelta(seconds=20), datetime.timedelta.max]

comm = gradwire.Communicator()


def setUpModule() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def tearDownModule() -> None:
    dist.destroy_process_group()


def zeros(count: int = 4) -> np.ndarray:
    return np.zeros(count, np.float32)


def numbers() -> Dict[str, Tuple[str, Callable[[Any], Any]]]:
    """Returns the kind of every number of the public functions, and a call that passes it."""
    one, four, six = gradwire.Communicator, zeros(), zeros()
    tensor, linear = [("w", 4, 1)], torch.nn.Linear(2, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(linear)
    reducer = gradwire.Reducer(comm, "fp32", tensor)
    gradients, format = {"w": zeros() + 1}, {"encode": lambda a: a.view(np.uint8),
                                             "decode": lambda a: a.view(np.float32)}
    functions: Dict[str, Tuple[str, Callable[..., Any]]] = {
        "Communicator": ("rank:int32 world:int32 device:int32 ranks_per_node:int32 timeout_s:seconds", one),
        "Communicator.split": ("color:int32 key:int32", lambda color=0, key=0: comm.split(color, key)),
        "Communicator.admit": ("most:int32", comm.admit),
        "Communicator.shrink": ("timeout_s:limit", comm.shrink),
        "Communicator.join": ("timeout_s:limit", lambda **o: one.join("nowhere", **o)),
        "Communicator.allreduce_": ("stream:uint64", lambda **o: comm.allreduce_(four, **o)),
        "Communicator.broadcast_": ("root:int32 stream:uint64", lambda **o: comm.broadcast_(four, **o)),
        "Request.wait": ("timeout_s:wait", lambda **o: comm.start(comm.allreduce_, four).wait(**o)),
        "Reducer": ("bucket_bytes:int64 seed:uint64",
                    lambda **o: gradwire.Reducer(comm, "fp32", tensor, **o)),
        "Reducer.allreduce": ("stream:uint64", lambda **o: reducer.allreduce([four], **o)),
        "Reducer.allreduce_at": ("stream:uint64", lambda **o: reducer.allreduce_at(
            reducer.addresses_of([four.ctypes.data]), **o)),
        "choose": ("error:real compute_ms:real backward_ms:real bucket_bytes:int64 seed:uint64 stream:uint64",
                   lambda **o: gradwire.choose(comm, ["fp32"], gradients, **{"compute_ms": 1, **o})),
        "register_format": ("block:int64 bytes:int64", lambda **o: gradwire.register_format(
            "sized", **{"block": 1, "bytes": 4, **format, **o})),
        "torch.Hook": ("timeout_s:seconds seed:uint64 min_ranks:int32", gradwire.torch.Hook),
        "torch.compress": ("timeout_s:limit seed:uint64 min_ranks:int32",
                           lambda **o: gradwire.torch.compress(ddp, **o)),
        "torch.communicator": ("device:int32 timeout_s:seconds", gradwire.torch.communicator),
        "torch.Dion": ("rank:in_a_spec seed:in_a_spec mu:in_a_spec", lambda **o: gradwire.torch.Dion(
            [torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float32))], comm=comm, **o))}
    if TODAY:
        functions["torch.register_backend"] = "min_bytes:int64", gradwire.torch.register_backend
        functions["fsdp.compress"] = ("timeout_s:limit seed:uint64",
                                      lambda **o: gradwire.fsdp.compress(linear, **o))
    table: Dict[str, Tuple[str, Callable[[Any], Any]]] = {
        "Communicator.ports": ("int32", lambda v: one(ports=(20000, v))),
        "Reducer.tensors": ("int64", lambda v: gradwire.Reducer(comm, "fp32", [("w", v, 4)])),
        "Reducer.cols": ("int64", lambda v: gradwire.Reducer(comm, "fp32", [("w", 4, v)]))}
    for name in ("reduce_scatter", "all_gather", "all_gather_update"):
        call = getattr(comm, name)
        functions[f"Communicator.{name}"] = "stream:uint64", functools.partial(call, four, six)
        table[f"Communicator.{name}.counts"] = "int64", lambda v, c=call: c(four, six, counts=[v])
    for name, (arguments, function) in functions.items():
        for argument, kind in (each.split(":") for each in arguments.split()):
            table[f"{name}.{argument}"] = kind, lambda v, f=function, a=argument: f(**{a: v})
    return table


class Numbers(unittest.TestCase):
    def refused(self, name: str, call: Callable[[Any], Any], value: Any) -> None:
        """Expects an error that names the argument, which is the last part of `name`."""
        with self.subTest(f"{name}={value!r}"):
            with self.assertRaises((gradwire.BadArgument, TypeError, ValueError)) as raised:
                call(value)
            argument = name.rpartition(".")[2].replace("tensors", "rows")
            self.assertRegex(str(raised.exception), rf"\b{argument}\b")

    def test_numbers_that_do_not_fit_are_refused_by_name(self) -> None:
        for name, (kind, call) in numbers().items():
            for value in BAD[kind]:
                self.refused(name, call, value)

    def test_time_limits_are_numbers_or_timedeltas_or_infinite(self) -> None:
        for name, (kind, call) in numbers().items():
            for value in GOOD_SECONDS if kind in ("seconds", "wait") else []:
                with self.subTest(f"{name}={value!r}"):
                    call(value)

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
        # An optimizer's numbers, which groups can change, and addresses.
        found -= {f"torch.Dion.{name}" for name in ("lr", "weight_decay", "adamw_lr", "betas", "eps",
                                              "consolidate_state_dict.to")}
        found -= {"Reducer.addresses_of.addresses"}
        if not TODAY:
            found -= {"torch.register_backend.min_bytes", "fsdp.compress.seed", "fsdp.compress.timeout_s"}
        self.assertGreater(len(found), 30)
        self.assertEqual(found - set(numbers()), set())

    def test_numpy_integers_are_integers(self) -> None:
        with gradwire.Communicator(None, np.int64(0), np.uint8(1), ports=np.array([0, 0])) as one:
            one.broadcast_(zeros(), np.int16(0), stream=np.int64(0))
            one.all_gather(zeros(), zeros(), counts=np.array([4]))
            gradwire.Reducer(one, "fp32", [("w", np.int32(4), np.int64(1))], seed=np.uint64(2**63)).close()

    def test_process_groups_without_this_rank_or_without_processes_are_refused(self) -> None:
        calls = {"communicator": lambda group: gradwire.torch.communicator(group),
                 "Hook": lambda group: gradwire.torch.Hook("int8", process_group=group)}
        outside = dist.GroupMember.NON_GROUP_MEMBER
        for name, call in calls.items():
            with self.subTest(name), self.assertRaisesRegex(gradwire.BadArgument, "rank 0 is not in"):
                call(outside)
            call(dist.group.WORLD).close()
        if not TODAY:
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.destroy_process_group()
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
            for name, call in calls.items():
                with self.subTest(name), self.assertRaisesRegex(gradwire.BadArgument, "3 ranks .* 'fake'"):
                    call(None)
        finally:
            dist.destroy_process_group()
            setUpModule()

    @unittest.skipUnless(importlib.util.find_spec("lightning") and importlib.util.find_spec("transformers"),
                         "needs Lightning and transformers")
    def test_callbacks_check_their_options_before_training(self) -> None:
        import gradwire.lightning
        import gradwire.transformers
        for compress in (gradwire.lightning.Compress, gradwire.transformers.Compress):
            for name, bad in {"timeout_s": math.nan, "seed": -1, "min_ranks": 2**32, "spec": "int3"}.items():
                self.refused(f"{compress.__module__}.{name}", lambda v: compress(**{name: v}), bad)
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
        "negative": (torch._neg_view(f32), ValueError), "complex": (f32.to(torch.complex64), TypeError),
        "meta": (torch.empty(4, dtype=torch.float32, device="meta"), TypeError),
        "quantized": (torch.quantize_per_tensor(f32, 1.0, 0, torch.qint8), TypeError),
        "double": (f32.double(), TypeError), "wrapper": (Dispatched(), TypeError),
        "expanded": (f32[:1].expand(4), ValueError), "released": (released(), ValueError),
        "uninitialized": (torch.nn.parameter.UninitializedParameter(), TypeError)}
    if TODAY:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate
        with FakeTensorMode():
            found["fake"] = torch.empty(4, dtype=torch.float32), TypeError
        mesh = init_device_mesh("cpu", (1,))
        found["DTensor"] = DTensor.from_local(f32.clone(), mesh, [Replicate()]), TypeError
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
        return {"gradwire.allreduce_": lambda x: gradwire.allreduce_(x),
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
                "choose": lambda x: gradwire.choose(comm, ["fp32"], {"w": x})}

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

    @unittest.skipUnless(hasattr(torch, "func"), "torch.func")
    def test_a_function_that_pytorch_transforms_has_no_memory(self) -> None:
        values = torch.zeros(2, 4, dtype=torch.float32)
        for transform in (torch.vmap, torch.func.grad):
            with self.assertRaises(TypeError):
                transform(comm.allreduce_)(values)


if __name__ == "__main__":
    unittest.main(verbosity=2)
