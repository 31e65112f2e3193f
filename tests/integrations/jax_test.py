#!/usr/bin/env python3
"""gradwire.jax, with ranks that are processes, and devices of one process.

    jax_test.py WORLD SCENARIO...     scenarios of jax_ranks.py
    jax_test.py devices               several devices in this process
    jax_test.py cuda                  what XLA would compile for a GPU and call there; without a GPU
"""
from __future__ import annotations

import os
import pathlib
import signal
import sys
import tempfile

from launch import run_ranks

HERE = pathlib.Path(__file__).resolve().parent


def processes(world: int, names: list) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = {"MEETING": f"file://{folder}/meeting"}
        if names[0] in ("several_devices_in_each_process", "a_program_that_jax_shards_is_refused", "a_wrong_map_is_refused"):
            environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        codes = run_ranks(HERE / "jax_ranks.py", world, names, 500, environment)
    expected = [-signal.SIGKILL if names == ["a_dead_peer_raises"] and rank == 1 else 0 for rank in range(world)]
    print(f"{world} ranks, {', '.join(names)}: exit codes {codes}")
    return 0 if codes == expected else 1


def devices() -> int:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gradwire.jax

    gradwire.jax.init(timeout_s=60)
    assert gradwire.jax.world_size() == 4
    mesh = jax.make_mesh((4,), ("data",))
    given = np.arange(4 * 300, dtype=np.float32).reshape(4, 300)
    x = jax.device_put(given, NamedSharding(mesh, PartitionSpec("data")))
    mean = given.mean(0, keepdims=True)
    mapped = jax.jit(jax.shard_map(lambda t: gradwire.jax.pmean(gradwire.jax.pmean(t)), mesh=mesh,
                                   in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))
    np.testing.assert_array_equal(mapped(x), np.repeat(mean, 4, 0))
    np.testing.assert_array_equal(jax.pmap(gradwire.jax.pmean)(given), np.repeat(mean, 4, 0))
    transformation = gradwire.jax.compress("int4", dense=False)

    def update(g: jax.Array) -> tuple:
        averaged, state = transformation.update(g, transformation.init(g))
        return averaged, state.residual

    averaged, residual = jax.pmap(update)(given)
    np.testing.assert_allclose(np.asarray(averaged).sum(0) + np.asarray(residual).sum(0), given.sum(0), rtol=1e-5)
    assert (np.asarray(averaged) == np.asarray(averaged)[0]).all() and np.abs(residual).max() > 0
    try:
        gradwire.jax.pmean(jnp.ones(3))
    except RuntimeError as error:
        assert "jax.shard_map or jax.pmap" in str(error), error
    else:
        raise AssertionError("one device would wait for the others")
    gradwire.jax.shutdown()
    return 0


def cuda() -> int:
    """Lowers a training step for CUDA, and calls the handler as XLA does there, with a library that notes its calls."""
    import ctypes

    import jax
    import jax.numpy as jnp

    import gradwire.jax
    from gradwire import _jax_call, _jax_ffi, _native

    gradwire.jax.init()
    _jax_call.ranks.world = 2
    transformation = gradwire.jax.compress("powersgd:rank=2,wire=bf16,start=3")
    state = transformation.init({"w": jnp.ones((40, 60))})
    lowered = jax.jit(lambda g, s: transformation.update(g, s)).trace({"w": jnp.ones((40, 60))}, state).lower(
        lowering_platforms=("cuda",)).as_text()
    assert "gradwire_average" in lowered and "output_operand_aliases" in lowered, lowered

    failed: list = []
    stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_jax_ffi._StreamArguments))(
        lambda arguments: setattr(arguments.contents, "stream", 0x5eed))
    ordinal = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_jax_ffi._OrdinalArguments))(
        lambda arguments: setattr(arguments.contents, "ordinal", 0))
    error = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_jax_ffi._ErrorArguments))(
        lambda arguments: failed.append(arguments.contents.message) or 77)
    api = _jax_ffi._Api(struct_size=ctypes.sizeof(_jax_ffi._Api), error_create=error, stream_get=stream, ordinal_get=ordinal)

    def buffers(addresses: list, dims: list) -> object:
        made = [_jax_ffi._Buffer(data=a, rank=len(d), dims=(ctypes.c_int64 * len(d))(*d)) for a, d in zip(addresses, dims)]
        return _jax_ffi._Buffers(size=len(made), buffers=(ctypes.POINTER(_jax_ffi._Buffer) * len(made))(
            *[ctypes.pointer(b) for b in made]))

    def span(text: bytes) -> object:
        return _jax_ffi._Span(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), len(text))

    plan = b'[{"spec": "int8", "keeps": true, "tag": "here", "op": "avg", "dtype": 2, "devices": 0}]'
    name, value = span(b"plan"), span(plan)
    attributes = _jax_ffi._Attributes(
        size=1, types=(ctypes.c_int * 1)(_jax_ffi._STRING), names=(ctypes.POINTER(_jax_ffi._Span) * 1)(ctypes.pointer(name)),
        values=(ctypes.c_void_p * 1)(ctypes.addressof(value)))
    addresses, dims = [8, 0x1000, 0x2000], [[], [3, 5], [3, 5]]
    frame = _jax_ffi._CallFrame(api=ctypes.pointer(api), stage=_jax_ffi._EXECUTE, operands=buffers(addresses, dims),
                                results=buffers(addresses, dims), attributes=attributes)
    calls: list = []
    real, _native.call = _native.call, lambda *arguments: calls.append(arguments)
    try:
        handler = _jax_ffi.handler_of(_jax_call._run, "CUDA")
        assert handler(ctypes.pointer(frame)) is None, failed
        names = [c[0] for c in calls]
        assert names == ["gw_comm_check", "gw_call_tag", "gw_allreduce_residual"], calls
        assert calls[-1][2:] == (0x1000, 15, _native.FLOAT16, _native.AVG, b"int8", 0x2000, 0x5eed), calls[-1]

        def lost(*arguments: object) -> None:
            raise gradwire.CommFailed("rank 1 is gone")

        _native.call = lost
        assert handler(ctypes.pointer(frame)) == 77 and b"rank 1 is gone" in failed[0], failed
    finally:
        _native.call = real
    gradwire.jax.shutdown()
    return 0


if __name__ == "__main__":
    alone = {"devices": devices, "cuda": cuda}.get(sys.argv[1])
    sys.exit(alone() if alone else processes(int(sys.argv[1]), sys.argv[2:]))
