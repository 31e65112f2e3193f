"""Adds scenarios to jax_ranks.py: programs traced in another world, and programs over all devices."""
from __future__ import annotations

import os
from typing import Any, Callable, Dict, Tuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import gradwire
import gradwire.jax

import rank as this_rank
from rank import RANK, WORLD

SCENARIOS: Dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def refused(kind: type, words: str, call: Callable[[], Any]) -> None:
    this_rank.refused(lambda: jax.block_until_ready(call()), kind, words)


def meet(number: int) -> None:
    gradwire.jax.init(f"{os.environ['MEETING']}{number}", RANK, WORLD, timeout_s=30)


def low_rank(world: int) -> np.ndarray:
    """Returns one matrix of rank 1 per process. Their mean also has rank 1."""
    return np.stack([np.outer(np.arange(40) + 1, np.ones(60)) * (rank + 1)
                     for rank in range(world)]).astype(np.float32)


@scenario
def programs_outlive_the_world_that_traced_them() -> None:
    """Traces programs in a world of 1, and runs them in a world of WORLD and again in a world of 1."""
    given = low_rank(WORLD)
    own, mean = jnp.asarray(given[RANK]), given.mean(0)
    powersgd, int8 = gradwire.jax.compress("powersgd:rank=1"), gradwire.jax.compress("int8", dense=False)
    averages = {"pmean": jax.jit(lambda x: gradwire.jax.pmean(x)),
                "int8": jax.jit(lambda x: int8.update(x, int8.init(x))[0]),
                "powersgd": jax.jit(lambda x: powersgd.update(x, powersgd.init(x))[0])}
    total = jax.jit(lambda x: gradwire.jax.psum(x))
    scanned = jax.jit(lambda x: jax.lax.scan(lambda carry, _:
                                             (gradwire.jax.pmean(carry), None), x, None, length=2)[0])

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
    compiled = {name: function.lower(own).compile() for name, function in averages.items()}
    gradwire.jax.shutdown()
    refused(jax.errors.JaxRuntimeError, "no communicator for device", lambda: averages["pmean"](own))
    meet(1)
    check(mean, WORLD)
    for function in compiled.values():
        np.testing.assert_allclose(function(own), mean, atol=0.02 * np.abs(mean).max())
    coarse = gradwire.jax.compress("powersgd:rank=1,wire=int4")
    lossy = jax.jit(lambda x: coarse.update(x, coarse.init(x))[0])
    lossy(own)
    gradwire.jax.shutdown()
    gradwire.jax.init()
    check(given[RANK], 1)
    np.testing.assert_array_equal(lossy(own), given[RANK])
    gradwire.jax.shutdown()


@scenario
def an_error_ends_with_its_group() -> None:
    """Checks that a call of a new group does not wait for a failed call of the previous group."""
    meet(1)
    tree = {"kernel": jnp.ones((8, 4))} if RANK == 0 else {"kernel": jnp.ones((4, 8))}
    refused(jax.errors.JaxRuntimeError, ", tree ", lambda: gradwire.jax.pmean(tree))
    refused(jax.errors.JaxRuntimeError, "", lambda: gradwire.jax.pmean(jnp.ones(3)))  # every later call fails
    gradwire.jax.shutdown()
    meet(2)
    assert float(gradwire.jax.pmean(jnp.float32(RANK))) == (WORLD - 1) / 2
    assert float(jax.jit(gradwire.jax.pmean)(jnp.float32(RANK))) == (WORLD - 1) / 2
    gradwire.jax.shutdown()


@scenario
def no_trace_leaves_its_tracers_behind() -> None:
    optimizer = optax.chain(gradwire.jax.compress("powersgd:rank=2,start=1"), optax.sgd(0.1))
    matrix = jnp.full((40, 60), RANK, jnp.float32)

    def twice(x: Any) -> Any:
        return gradwire.jax.pmean(gradwire.jax.pmean(x) + x)

    with jax.checking_leaks():
        assert float(jax.jit(twice)(jnp.float32(RANK))) == WORLD - 1
        assert float(jax.jit(lambda x: twice(jax.jit(twice)(x)))(jnp.float32(RANK))) == 2 * (WORLD - 1)
        jax.jit(optimizer.update)(matrix, optimizer.init(matrix))
        jax.jit(lambda x: jax.lax.scan(lambda carry, y: (twice(carry + y), carry), x[0], x))(jnp.ones((3, 5)))
        jax.jit(lambda x: jax.lax.cond(True, twice, lambda y: y, x))(jnp.ones(3))
        jax.jit(lambda x: twice(jax.grad(lambda y: (y * y).sum())(x)))(jnp.ones(3))
        jax.eval_shape(twice, jnp.ones(3))
        twice(jnp.ones(3))


@scenario
def states_that_do_not_fit_are_refused() -> None:
    matrix, other = {"a": jnp.ones((40, 60))}, {"a": jnp.ones((60, 80))}
    for spec, words in (("int8", "residual of ['a'] is [40, 60], but its update is [60, 80]"),
                        ("randk", "residual of ['a']"), ("powersgd:rank=2", "residual of ['a']")):
        transformation = gradwire.jax.compress(spec)
        refused(ValueError, words, lambda: transformation.update(other, transformation.init(matrix)))
    transformation = gradwire.jax.compress("powersgd:rank=2")
    state = gradwire.jax.compress("powersgd:rank=3").init(matrix)
    refused(ValueError, "factor of ['a'] is [60, 3]", lambda: transformation.update(matrix, state))


# ---- Two devices in each process
# ----------------------------------------------------------------------------------

DEVICES = 2 * WORLD


def distributed(mesh: Any, values: np.ndarray) -> Any:
    """Returns an array with one row of `values` on each device."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def local(array: Any) -> np.ndarray:
    """Returns this process's shards, in order."""
    shards = sorted(array.addressable_shards, key=lambda shard: [part.start or 0 for part in shard.index])
    return np.stack([np.asarray(shard.data) for shard in shards])


@scenario
def a_program_that_jax_shards_is_refused() -> None:
    assert jax.local_device_count() == 2 and gradwire.jax.world_size() == DEVICES
    transformation = gradwire.jax.compress("int8")
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
        x = distributed(mesh, np.ones((DEVICES, 300), np.float32))

        def update(g: Any) -> Any:
            return transformation.update(g, transformation.init(g))[0]

        for function in (update, gradwire.jax.pmean):
            with jax.set_mesh(mesh):
                refused(RuntimeError, "jax.shard_map", lambda: jax.jit(function)(x))
            refused(RuntimeError, "jax.shard_map", lambda: jax.jit(function)(x))
            refused(RuntimeError, "jax.shard_map", lambda: function(x))
        half = jax.make_mesh((WORLD, 2), ("data", "model"), axis_types=(kind, kind))
        y = jax.make_array_from_callback((WORLD, 2, 300), NamedSharding(half, PartitionSpec("data", "model")),
                                         lambda index: np.ones((WORLD, 2, 300), np.float32)[index])
        partly = jax.jit(jax.shard_map(gradwire.jax.pmean, mesh=half, in_specs=PartitionSpec("data"),
                                       out_specs=PartitionSpec("data"), axis_names={"data"}))
        refused(RuntimeError, "jax.shard_map over the whole mesh", lambda: partly(y))


def training(spec: str, mesh: Any, check_vma: bool) -> Tuple[Any, Any, Any]:
    """Returns (first weights and state, step, specs) for a matrix and a scalar, mapped over all devices."""
    optimizer = optax.chain(gradwire.jax.compress(spec, dense=False), optax.trace(0.5), optax.scale(-0.1))
    weights = {"matrix": jnp.zeros((40, 60)), "scalar": jnp.float32(0)}
    whole = PartitionSpec()
    specs = gradwire.jax.partition_specs(jax.eval_shape(optimizer.init, weights), "data")

    def step(weights: Any, state: Any, target: Any) -> Any:
        def loss(w: Any) -> Any:
            return 0.5 * ((w["matrix"] - target[0]) ** 2).sum() + 0.5 * (w["scalar"] - target[0, 0, 0]) ** 2

        varying = jax.lax.pcast(weights, "data", to="varying") if check_vma else weights
        gradient = jax.grad(loss)(varying)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, specs, PartitionSpec("data")),
                                   out_specs=(whole, specs), check_vma=check_vma), donate_argnums=(0, 1))
    start = jax.jit(
        jax.shard_map(lambda w: (w, optimizer.init(w)), mesh=mesh, in_specs=whole, out_specs=(whole, specs),
                      check_vma=check_vma))
    return start(weights), mapped, specs


@scenario
def a_global_mesh_trains_with_residuals_of_each_device() -> None:
    from jax.experimental import multihost_utils
    mesh = jax.make_mesh((DEVICES,), ("data",))
    rng = np.random.default_rng(3)
    target = (rng.standard_normal((DEVICES, 40, 1)) @ rng.standard_normal(
        (DEVICES, 1, 60))).astype(np.float32)
    for spec in ("int4", "powersgd:rank=2,wire=int8", "powersgd:rank=1,start=2,wire=bf16", "randk:ratio=0.3"):
        for check_vma in (True, False):
            (weights, state), step, specs = training(spec, mesh, check_vma)
            expected, momentum = np.zeros((40, 60)), np.zeros((40, 60))
            for _ in range(40):
                weights, state = step(weights, state, distributed(mesh, target))
                momentum = 0.5 * momentum + (expected - target.mean(0, dtype=np.float64))
                expected -= 0.1 * momentum
            residual = state[0].residual
            assert residual["matrix"].shape == (DEVICES * 40,
                                                60) and residual["scalar"].shape[0] == DEVICES, spec
            kept = np.asarray(multihost_utils.process_allgather(residual["matrix"],
                                                                tiled=True)).reshape(DEVICES, 40, 60)
            assert all(np.abs(kept[0] - kept[device]).max() > 0 for device in range(1, DEVICES)), spec
            everyones = np.asarray(multihost_utils.process_allgather(local(weights["matrix"])))
            assert (everyones.reshape(DEVICES, -1) == everyones.reshape(DEVICES, -1)[0]).all(), spec
            error = np.linalg.norm(local(weights["matrix"])[0] - expected) / np.linalg.norm(expected)
            assert error < (0.1 if spec == "int4" else 0.5), (spec, error)
            # Training continues bit for bit after saving and restoring with the sharding that JAX reports.
            saved = jax.tree.map(lambda a: np.asarray(multihost_utils.process_allgather(a, tiled=True)),
                                 (weights, state))
            restored = jax.tree.map(lambda a, s: jax.make_array_from_callback(
                a.shape, NamedSharding(mesh, s), lambda index: a[index]), saved,
                ({"matrix": PartitionSpec(), "scalar": PartitionSpec()}, specs))
            after = [step(*both, distributed(mesh, target)) for both in (restored, (weights, state))]
            for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(after[1])):
                assert (local(a) == local(b)).all(), spec


@scenario
def a_wrong_map_is_refused() -> None:
    mesh = jax.make_mesh((DEVICES,), ("data",))
    data, whole = PartitionSpec("data"), PartitionSpec()
    transformation = gradwire.jax.compress("int8", dense=False)
    x = distributed(mesh, np.ones((DEVICES, 300), np.float32))

    def update(g: Any) -> Any:
        averaged, state = transformation.update(g, transformation.init(g))
        return averaged, state.residual

    # Averages are replicated over devices, but JAX must reject residuals as replicated.
    refused(ValueError, "out_specs",
            lambda: jax.jit(jax.shard_map(update, mesh=mesh, in_specs=data, out_specs=whole))(x))
    averaged, residual = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=data, out_specs=(whole, data)))(x)
    assert averaged.shape == (1, 300) and residual.shape == (DEVICES, 300)

    def summed_by_jax(w: Any, g: Any) -> Any:
        gradient = jax.grad(lambda v: (v * g).sum())(w)
        return transformation.update(gradient, transformation.init(gradient))[0]

    refused(ValueError, "jax.lax.pcast", lambda: jax.jit(jax.shard_map(
        summed_by_jax, mesh=mesh, in_specs=(whole, data), out_specs=whole))(jnp.ones(300), x))
    # A state from outside of jax.shard_map, for another shape, is rejected.
    outside = transformation.init(jnp.ones((DEVICES * 3, 300)))

    def from_outside(g: Any, state: Any) -> Any:
        return transformation.update(g, state)[0]

    refused(ValueError, "init() inside of it", lambda: jax.jit(jax.shard_map(
        from_outside, mesh=mesh, in_specs=(data, whole), out_specs=whole))(x, outside))
    if WORLD > 1:
        some = jax.sharding.Mesh(np.array(jax.devices()[RANK * 2:RANK * 2 + 2]), ("data",))
        y = jax.device_put(np.full((2, 3), RANK, np.float32), NamedSharding(some, data))
        mean = jax.jit(jax.shard_map(gradwire.jax.pmean, mesh=some, in_specs=data, out_specs=whole))(y)
        assert (np.asarray(mean) == (WORLD - 1) / 2).all()  # each process maps over its local devices


@scenario
def a_program_of_a_larger_world_is_refused_in_a_smaller_one() -> None:
    """Checks a program that would otherwise average over this process's devices only."""
    mesh = jax.make_mesh((DEVICES,), ("data",))
    mean = jax.jit(
        jax.shard_map(gradwire.jax.pmean, mesh=mesh, in_specs=PartitionSpec("data"),
                      out_specs=PartitionSpec()))
    x = distributed(mesh, np.arange(DEVICES, dtype=np.float32)[:, None] * np.ones(3, np.float32))
    assert (local(mean(x)) == (DEVICES - 1) / 2).all()
    gradwire.jax.shutdown()
    gradwire.jax.init(f"local://a smaller world {os.getpid()}", 0, 1, timeout_s=30)
    assert gradwire.jax.world_size() == 2
    refused(jax.errors.JaxRuntimeError, f"over {DEVICES} of 2 devices", lambda: mean(x))
    gradwire.jax.shutdown()
    gradwire.jax.init(timeout_s=60)
    assert (local(mean(x)) == (DEVICES - 1) / 2).all()
