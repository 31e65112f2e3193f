#!/usr/bin/env python3
"""Tests gradwire.jax with ranks that are processes, and with several devices in one process.

    jax_test.py WORLD SCENARIO...     scenarios of jax_ranks.py
    jax_test.py devices               several devices in this process
    jax_test.py cuda                  lowers a step for a GPU; tests/standin/python_test.py runs this test
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
        if names[0] in ("several_devices_in_each_process", "a_program_that_jax_shards_is_refused",
                        "a_wrong_map_is_refused"):
            environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        codes = run_ranks(HERE / "jax_ranks.py", world, names, 500, environment)
    expected = [
        -signal.SIGKILL if names == ["a_dead_peer_raises"] and rank == 1 else 0 for rank in range(world)
    ]
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
    np.testing.assert_allclose(
        np.asarray(averaged).sum(0) + np.asarray(residual).sum(0), given.sum(0), rtol=1e-5)
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
    """Lowers a training step for CUDA. Returns the exit code."""
    import jax
    import jax.numpy as jnp

    import gradwire.jax
    from gradwire import _jax_ffi

    gradwire.jax.init()
    _jax_ffi.ranks.world = 2
    transformation = gradwire.jax.compress("powersgd:rank=2,wire=bf16,start=3")
    state = transformation.init({"w": jnp.ones((40, 60))})
    lowered = jax.jit(lambda g, s: transformation.update(g, s)).trace({"w": jnp.ones((40, 60))}, state).lower(
        lowering_platforms=("cuda",)).as_text()
    assert "gradwire_average" in lowered and "output_operand_aliases" in lowered, lowered
    gradwire.jax.shutdown()
    return 0


if __name__ == "__main__":
    alone = {"devices": devices, "cuda": cuda}.get(sys.argv[1])
    sys.exit(alone() if alone else processes(int(sys.argv[1]), sys.argv[2:]))
