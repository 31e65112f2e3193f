"""Scenarios of gradwire.jax: programs that were traced in another world, and several devices in a process."""
from __future__ import annotations

import os
from typing import Any, Tuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import gradwire.jax
from jax_ranks import connect, everyones, meet, refused
from rank import RANK, WORLD
from scenarios import scenario


@scenario(2, 4, ends=True)
def programs_outlive_the_world_that_traced_them() -> None:
    """Traces programs in a world of 1, and runs them in a world of WORLD and again in a world of 1."""
    # Matrices of rank 1, whose mean has rank 1.
    given = np.stack([np.outer(np.arange(40) + 1, np.ones(60)) * (rank + 1) for rank in range(WORLD)])
    own, mean = jnp.asarray(given[RANK], jnp.float32), given.mean(0)
    powersgd, int8, coarse = (gradwire.jax.compress(spec, dense=False) for spec in (
        "powersgd:rank=1", "int8", "powersgd:rank=1,wire=int4"))
    averages = {"pmean": jax.jit(lambda x: gradwire.jax.pmean(x)),
                "int8": jax.jit(lambda x: int8.update(x, int8.init(x))[0]),
                "powersgd": jax.jit(lambda x: powersgd.update(x, powersgd.init(x))[0])}
    scanned = jax.jit(lambda x: jax.lax.scan(lambda carry, _:
                                             (gradwire.jax.pmean(carry), None), x, None, length=2)[0])
    total = jax.jit(lambda x: gradwire.jax.psum(x))

    def check(expected: np.ndarray, world: int) -> None:
        for name, function in [*averages.items(), ("scan", scanned)]:
            np.testing.assert_allclose(function(own), expected, atol=0.02 * np.abs(expected).max(),
                                       err_msg=name)
        np.testing.assert_allclose(total(own), expected * world, rtol=1e-6)

    gradwire.jax.init()
    assert gradwire.jax.world_size() == 1
    check(given[RANK], 1)
    for function in averages.values():
        np.testing.assert_array_equal(function(own), given[RANK])  # a world of 1 does not round
    compiled = [function.lower(own).compile() for function in averages.values()]
    gradwire.jax.shutdown()
    refused(jax.errors.JaxRuntimeError, "no communicator for device", lambda: averages["pmean"](own))
    meet(1)
    check(mean, WORLD)
    for function in compiled:
        np.testing.assert_allclose(function(own), mean, atol=0.02 * np.abs(mean).max())
    lossy = jax.jit(lambda x: coarse.update(x, coarse.init(x))[0])
    lossy(own)
    gradwire.jax.shutdown()
    gradwire.jax.init()
    check(given[RANK], 1)
    np.testing.assert_array_equal(lossy(own), given[RANK])


@scenario(2, 4, ends=True)
def an_error_ends_with_its_group() -> None:
    """Trees that differ are named. A new group's call does not wait for a failed call of the previous."""
    meet(1)
    tree = {"kernel": jnp.ones((8, 4))} if RANK == 0 else {"kernel": jnp.ones((4, 8))}
    for words in ("pmean at jax_world.py", ", tree "):
        refused(jax.errors.JaxRuntimeError, words, lambda: jax.jit(lambda t: gradwire.jax.pmean(t))(tree))
        gradwire.jax.shutdown()
        meet(2 if words == ", tree " else 3)
    refused(jax.errors.JaxRuntimeError, ", tree ", lambda: gradwire.jax.pmean(tree))
    refused(jax.errors.JaxRuntimeError, "", lambda: gradwire.jax.pmean(jnp.ones(3)))  # every later call fails
    gradwire.jax.shutdown()
    meet(4)
    assert float(gradwire.jax.pmean(jnp.float32(RANK))) == (WORLD - 1) / 2
    assert float(jax.jit(gradwire.jax.pmean)(jnp.float32(RANK))) == (WORLD - 1) / 2


# ---- Several devices in each process -----------------------------------------------------------------------

DEVICES = 2 * WORLD if WORLD > 1 else 4
DATA, WHOLE = PartitionSpec("data"), PartitionSpec()


def distributed(mesh: Any, values: np.ndarray, spec: PartitionSpec = DATA) -> Any:
    """Returns an array with the values, of which each device has its part."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def local(array: Any) -> np.ndarray:
    """Returns this process's shards, in order."""
    shards = sorted(array.addressable_shards, key=lambda shard: [part.start or 0 for part in shard.index])
    return np.stack([np.asarray(shard.data) for shard in shards])


def all_shards(array: Any) -> np.ndarray:
    """Returns the shards of all processes, in order."""
    return np.concatenate(everyones(local(array)))


def mapped(function: Any, mesh: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


@scenario(1, 2, ends=True)
def several_devices_in_each_process() -> None:
    """Checks averages and conservation inside of shard_map and pmap. Not all devices: refused."""
    connect(DEVICES // WORLD)
    assert gradwire.jax.world_size() == DEVICES == jax.device_count(), jax.devices()
    mesh, transformation = jax.make_mesh((DEVICES,), ("data",)), gradwire.jax.compress("int4", dense=False)
    given = np.random.default_rng(0).standard_normal((DEVICES, 300), np.float32)

    def update(g: Any) -> Tuple[Any, Any, Any]:
        averaged, state = transformation.update(g, transformation.init(g))
        return gradwire.jax.pmean(gradwire.jax.pmean(g)), averaged, state.residual

    mine = np.split(given, WORLD)[RANK]
    for results in (mapped(update, mesh, DATA, DATA)(distributed(mesh, given)), jax.pmap(update)(mine)):
        exact, averaged, residual = (all_shards(a).reshape(DEVICES, -1) for a in results)
        np.testing.assert_allclose(exact, np.repeat(given.mean(0, keepdims=True), DEVICES, 0), atol=1e-6)
        assert (averaged == averaged[0]).all() and np.abs(averaged - given.mean(0)).max() > 1e-3
        np.testing.assert_allclose(DEVICES * averaged[0] + residual.sum(0), given.sum(0), atol=1e-5)
    refused(RuntimeError, "jax.shard_map or jax.pmap", lambda: gradwire.jax.pmean(jnp.ones(3)))


@scenario(2, ends=True)
def a_program_that_jax_shards_is_refused() -> None:
    connect(2)
    transformation = gradwire.jax.compress("int8")

    def update(g: Any) -> Any:
        return transformation.update(g, transformation.init(g))[0]

    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
        x = distributed(mesh, np.ones((DEVICES, 300), np.float32))
        for function in (update, gradwire.jax.pmean):
            with jax.set_mesh(mesh):
                refused(RuntimeError, "jax.shard_map", lambda: jax.jit(function)(x))
            refused(RuntimeError, "jax.shard_map", lambda: jax.jit(function)(x))
            refused(RuntimeError, "jax.shard_map", lambda: function(x))
        half = jax.make_mesh((WORLD, 2), ("data", "model"), axis_types=(kind, kind))
        y = distributed(half, np.ones((WORLD, 2, 300), np.float32), PartitionSpec("data", "model"))
        partly = mapped(gradwire.jax.pmean, half, DATA, DATA, axis_names={"data"})
        refused(RuntimeError, "jax.shard_map over the whole mesh", lambda: partly(y))


def training(spec: str, mesh: Any, check_vma: bool) -> Tuple[Any, Any, Any]:
    """Returns (first weights and state, step, specs) for a matrix and a scalar, mapped over all devices."""
    optimizer = optax.chain(gradwire.jax.compress(spec, dense=False), optax.trace(0.5), optax.scale(-0.1))
    weights = {"matrix": jnp.zeros((40, 60)), "scalar": jnp.float32(0)}
    specs = gradwire.jax.partition_specs(jax.eval_shape(optimizer.init, weights), "data")

    def step(weights: Any, state: Any, target: Any) -> Any:
        def loss(w: Any) -> Any:
            return 0.5 * ((w["matrix"] - target[0]) ** 2).sum() + 0.5 * (w["scalar"] - target[0, 0, 0]) ** 2

        varying = jax.lax.pcast(weights, "data", to="varying") if check_vma else weights
        updates, state = optimizer.update(jax.grad(loss)(varying), state)
        return optax.apply_updates(weights, updates), state

    start = mapped(lambda w: (w, optimizer.init(w)), mesh, WHOLE, (WHOLE, specs), check_vma=check_vma)
    trains = mapped(step, mesh, (WHOLE, specs, DATA), (WHOLE, specs), check_vma=check_vma)
    return start(weights), trains, specs


@scenario(2, ends=True)
def a_global_mesh_trains_with_residuals_of_each_device() -> None:
    """Training also continues bit for bit after saving and restoring with the sharding that JAX reports."""
    from jax.experimental import multihost_utils
    connect(2)
    mesh, rng = jax.make_mesh((DEVICES,), ("data",)), np.random.default_rng(3)
    target = rng.standard_normal((DEVICES, 40, 1)) @ rng.standard_normal((DEVICES, 1, 60))
    target = target.astype(np.float32)
    expected, momentum = np.zeros((40, 60)), np.zeros((40, 60))
    for _ in range(40):
        momentum = 0.5 * momentum + (expected - target.mean(0, dtype=np.float64))
        expected -= 0.1 * momentum
    for spec in ("int4", "powersgd:rank=2,wire=int8", "powersgd:rank=1,start=2,wire=bf16", "randk:ratio=0.3"):
        for check_vma in (True, False):
            (weights, state), step, specs = training(spec, mesh, check_vma)
            for i in range(40):
                weights, state = step(weights, state, distributed(mesh, target))
                if i % 8 == 0:  # JAX on CPU can hang with 32 steps of a device in flight (docs/for-jax.md)
                    jax.block_until_ready(weights)
            residual = state[0].residual
            assert residual["matrix"].shape == (DEVICES * 40, 60), spec
            assert residual["scalar"].shape[0] == DEVICES, spec
            kept, values = all_shards(residual["matrix"]), all_shards(weights["matrix"])
            assert all(np.abs(kept[0] - kept[device]).max() > 0 for device in range(1, DEVICES)), spec
            assert (values == values[0]).all(), spec
            error = np.linalg.norm(values[0] - expected) / np.linalg.norm(expected)
            assert error < (0.1 if spec == "int4" else 0.5), (spec, error)
            saved = jax.tree.map(lambda a: np.asarray(multihost_utils.process_allgather(a, tiled=True)),
                                 (weights, state))
            restored = jax.tree.map(lambda a, s: distributed(mesh, a, s), saved,
                                    ({"matrix": WHOLE, "scalar": WHOLE}, specs))
            after = [jax.tree.leaves(step(*both, distributed(mesh, target)))
                     for both in (restored, (weights, state))]
            assert all((local(a) == local(b)).all() for a, b in zip(*after)), spec


@scenario(2, ends=True)
def a_wrong_map_is_refused() -> None:
    connect(2)
    mesh, transformation = jax.make_mesh((DEVICES,), ("data",)), gradwire.jax.compress("int8", dense=False)
    x = distributed(mesh, np.ones((DEVICES, 300), np.float32))

    def update(g: Any) -> Any:
        averaged, state = transformation.update(g, transformation.init(g))
        return averaged, state.residual

    def summed_by_jax(w: Any, g: Any) -> Any:
        return update(jax.grad(lambda v: (v * g).sum())(w))[0]

    # Averages are replicated over devices, but JAX must reject residuals as replicated.
    refused(ValueError, "out_specs", lambda: mapped(update, mesh, DATA, WHOLE)(x))
    averaged, residual = mapped(update, mesh, DATA, (WHOLE, DATA))(x)
    assert averaged.shape == (1, 300) and residual.shape == (DEVICES, 300)
    refused(ValueError, "jax.lax.pcast",
            lambda: mapped(summed_by_jax, mesh, (WHOLE, DATA), WHOLE)(jnp.ones(300), x))
    # A state from outside of jax.shard_map, for another shape, is rejected.
    outside = transformation.init(jnp.ones((DEVICES * 3, 300)))
    refused(ValueError, "init() inside of it", lambda: mapped(
        lambda g, state: transformation.update(g, state)[0], mesh, (DATA, WHOLE), WHOLE)(x, outside))
    some = jax.sharding.Mesh(np.array(jax.devices()[RANK * 2:RANK * 2 + 2]), ("data",))
    y = jax.device_put(np.full((2, 3), RANK, np.float32), NamedSharding(some, DATA))
    # Each process maps over its local devices.
    assert (np.asarray(mapped(gradwire.jax.pmean, some, DATA, WHOLE)(y)) == (WORLD - 1) / 2).all()
    # A program of a larger world would average over this process's devices only.
    mean = mapped(gradwire.jax.pmean, mesh, DATA, WHOLE)
    x = distributed(mesh, np.arange(DEVICES, dtype=np.float32)[:, None] * np.ones(3, np.float32))
    assert (local(mean(x)) == (DEVICES - 1) / 2).all()
    gradwire.jax.shutdown()
    gradwire.jax.init(f"local://a smaller world {os.getpid()}", 0, 1, timeout_s=30)
    assert gradwire.jax.world_size() == 2
    refused(jax.errors.JaxRuntimeError, f"over {DEVICES} of 2 devices", lambda: mean(x))
    gradwire.jax.shutdown()
    gradwire.jax.init(timeout_s=60)
    assert (local(mean(x)) == (DEVICES - 1) / 2).all()
