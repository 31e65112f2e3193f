#!/usr/bin/env python3
"""Runs the scenarios on the command line in one process of jax_test.py.

Needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""
from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import gradwire.jax
import jax_settings
import jax_types
import jax_world
from jax_world import refused
from rank import RANK, WORLD

SCENARIOS: Dict[str, Callable[[], None]] = {**jax_settings.SCENARIOS, **jax_types.SCENARIOS,
                                               **jax_world.SCENARIOS}
SPECS = ("fp32", "bf16", "bf16:round=stochastic", "fp8", "int8", "int8:schedule=ring", "int4:rotate=hadamard",
         "int2", "mxfp8", "nvfp4", "natural", "sign", "topk")
CODECS = ("powersgd:rank=2", "powersgd:rank=2,wire=bf16,warm=off",
          "powersgd:rank=2,alternate=on,wire=int8,schedule=ring", "powersgd:rank=4,start=2,wire=bf16",
          "randk:ratio=0.05,wire=bf16")


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def everyones(values: Any) -> np.ndarray:
    """Gathers the processes' values with JAX's collectives. Returns an array (WORLD, ...)."""
    from jax.experimental import multihost_utils
    return np.asarray(multihost_utils.process_allgather(np.asarray(values))).reshape(WORLD, *np.shape(values))


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)])


# ---- A small transformer
# ---------------------------------------------------------------------------------------

WORDS, WIDTH, LENGTH, BATCH = 61, 32, 16, 4


def parameters(seed: int = 0) -> Dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[0] ** -0.5

    def block() -> Dict[str, Any]:
        return {"qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH), "up": normal(WIDTH, 4 * WIDTH),
                "down": normal(4 * WIDTH, WIDTH), "scale": jnp.ones((2, WIDTH))}

    return {"words": normal(WORDS, WIDTH), "places": normal(LENGTH, WIDTH), "blocks": [block(), block()],
            "head": normal(WIDTH, WORDS), "bias": jnp.zeros(WORDS)}


def loss_of(p: Any, text: Any) -> Any:
    x = p["words"][text[:, :-1]] + p["places"][:text.shape[1] - 1]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for b in p["blocks"]:
        y = b["scale"][0] * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.split(y @ b["qkv"], 3, -1)
        weights = jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2) * WIDTH ** -0.5, -1e9))
        x = x + weights @ v @ b["out"]
        y = b["scale"][1] * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(y @ b["up"]) @ b["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"] + p["bias"], text[:, 1:]).mean()


def text(step: int, rank: int) -> Any:
    start = jax.random.randint(jax.random.key(step * 1000 + rank), (BATCH, 1), 0, WORDS)
    return (start + jnp.arange(LENGTH + 1) * 7) % WORDS


def pmean_of_processes() -> Callable[[Any], Any]:
    """Returns a function that averages the processes' trees with jax.lax.pmean."""
    mesh = jax.make_mesh((WORLD,), ("ranks",))
    sharding = NamedSharding(mesh, PartitionSpec("ranks"))
    mean = jax.jit(
        jax.shard_map(lambda t: jax.lax.pmean(t, "ranks"), mesh=mesh, in_specs=PartitionSpec("ranks"),
                      out_specs=PartitionSpec()))

    def call(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(mean(jax.make_array_from_single_device_arrays(
            (WORLD, *leaf.shape), sharding, [leaf[None]])).addressable_data(0))[0], tree)

    return call


@scenario
def training_in_fp32_is_that_of_jaxs_own_psum() -> None:
    optimizer = optax.adam(1e-3)
    gradient = jax.jit(jax.grad(loss_of))
    theirs_mean = pmean_of_processes()

    @jax.jit
    def step(p: Any, state: Any, batch: Any) -> Any:
        gradients = gradwire.jax.pmean(jax.grad(loss_of)(p, batch), "fp32:schedule=ring")
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(p, updates), state

    apply = jax.jit(lambda g, s, p: (lambda u, t: (optax.apply_updates(p, u), t))(*optimizer.update(g, s)))
    ours = theirs = parameters()
    our_state = their_state = optimizer.init(ours)
    for i in range(50):
        batch = text(i, RANK)
        ours, our_state = step(ours, our_state, batch)
        theirs, their_state = apply(theirs_mean(gradient(theirs, batch)), their_state, theirs)
    worst = float(np.abs(flat(ours) - flat(theirs)).max())
    print(f"rank {RANK}: after 50 steps {worst:.2g} from jax.lax.pmean's", flush=True)
    assert worst <= 1e-6, worst
    assert float(loss_of(ours, text(0, 0))) < 0.7 * float(loss_of(parameters(), text(0, 0)))


@scenario
def every_spec_gives_all_ranks_the_same_weights_and_loses_nothing() -> None:
    same_weights_and_nothing_lost(SPECS)


@scenario
def every_codec_gives_all_ranks_the_same_weights_and_loses_nothing() -> None:
    same_weights_and_nothing_lost(CODECS)


def same_weights_and_nothing_lost(specs: Sequence[str]) -> None:
    for spec in specs:
        transformation = gradwire.jax.compress(spec, dense=spec != "int8")

        @jax.jit
        def step(p: Any, state: Any, batch: Any) -> Any:
            gradients = jax.grad(loss_of)(p, batch)
            averaged, state = transformation.update(gradients, state, p)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, averaged), state, gradients, averaged

        p = parameters()
        state = transformation.init(p)
        put_in, came_out = np.zeros(flat(p).shape, np.float64), np.zeros(flat(p).shape, np.float64)
        for i in range(4):
            p, state, gradients, averaged = step(p, state, text(i, RANK))
            put_in += flat(gradients)
            came_out += flat(averaged)
        weights = everyones(flat(p))
        assert (weights.view(np.uint32) == weights[0].view(np.uint32)).all(), spec
        # Weights that are not rounded have an empty residual.
        kept = np.concatenate([np.asarray(r).ravel() if r.size else np.zeros(w.size, np.float32)
                               for r, w in zip(jax.tree.leaves(state.residual), jax.tree.leaves(p))])
        error = everyones(put_in - kept).sum(0) - came_out * WORLD
        size = np.linalg.norm(everyones(np.abs(put_in)).sum(0))
        assert np.linalg.norm(error) <= 1e-6 * size, (spec, np.linalg.norm(error) / size)
        if spec not in ("fp32",):
            assert np.abs(kept).max() > 0, spec


@scenario
def the_state_is_a_pytree_like_any_other() -> None:
    """Checks that the state can be donated, copied through numpy like a checkpoint, and chained."""
    for spec in ("int4", "powersgd:rank=2,wire=bf16"):
        a_pytree_like_any_other(spec)


def a_pytree_like_any_other(spec: str) -> None:
    optimizer = optax.chain(gradwire.jax.compress(spec), optax.adam(1e-3))

    def step(p: Any, state: Any, batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss_of)(p, batch), state, p)
        return optax.apply_updates(p, updates), state

    plain, donated = jax.jit(step), jax.jit(step, donate_argnums=(0, 1))
    results = []
    for how in (plain, donated):
        p = jax.tree.map(jnp.array, parameters())
        state = optimizer.init(p)
        for i in range(6):
            p, state = how(p, state, text(i, RANK))
            if i == 2 and how is plain:
                leaves, structure = jax.tree.flatten(state)
                state = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
        results.append(flat(p))
    assert (results[0] == results[1]).all()


@scenario
def powersgd_learns_what_is_of_low_rank() -> None:
    """Checks that the mean of constant matrices of low rank is exact, also after steps of zeros.

    A NaN of one rank affects only its matrix, and only in its step.
    """
    rng = np.random.default_rng(7)
    left, right = rng.standard_normal((WORLD, 50, 2)), rng.standard_normal((2, 70))
    own = {"low": jnp.asarray(left[RANK] @ right, jnp.float32), "bias": jnp.full((5,), float(RANK)),
           "half": jnp.full((64, 64), RANK, jnp.bfloat16)}
    mean = (left @ right).mean(0)
    for spec in ("powersgd:rank=2", "powersgd:rank=2,alternate=on"):
        transformation = gradwire.jax.compress(spec, error_feedback=False)
        update = jax.jit(transformation.update)
        state = transformation.init(own)
        for i in range(3):  # gradients of zeros
            out, state = update(jax.tree.map(jnp.zeros_like, own), state)
            assert float(jnp.abs(out["low"]).max()) == 0
        for i in range(12):
            out, state = update(own, state)
        assert np.abs(np.asarray(out["low"]) - mean).max() <= 1e-4 * np.abs(mean).max(), spec
        assert out["half"].dtype == jnp.bfloat16 and np.allclose(np.asarray(out["half"], np.float32),
                                                                 (WORLD - 1) / 2, 1e-2)
        assert (np.asarray(out["bias"]) == (WORLD - 1) / 2).all()
        spoilt = dict(own, low=own["low"].at[3, 3].set(jnp.nan) if RANK == 0 else own["low"])
        out, state = update(spoilt, state)
        assert np.isnan(np.asarray(out["low"])).all() and np.isfinite(np.asarray(out["half"],
                                                                                 np.float32)).all()
        out, state = update(own, state)
        assert np.abs(np.asarray(out["low"]) - mean).max() <= 1e-4 * np.abs(mean).max(), spec
        assert int(state.step) == 17


@scenario
def calls_keep_the_order_of_the_program() -> None:
    """Makes twenty independent calls, between computations that take very different times."""
    @jax.jit
    def many(x: Any, big: Any) -> List[Any]:
        out = []
        for i in range(20):
            y = x * (i + 1)
            if (i + RANK) % 2:  # a slow computation, in other calls on other ranks
                y = y + 0 * jnp.sum(big @ big)
            out.append(gradwire.jax.pmean(y))
        return out

    for i, y in enumerate(many(jnp.full((100,), float(RANK)), jnp.ones((300, 300)))):
        assert float(y[0]) == (i + 1) * (WORLD - 1) / 2, (i, y[0])

    def body(carry: Any, x: Any) -> Tuple[Any, Any]:
        return gradwire.jax.pmean(carry + x), gradwire.jax.psum(x, "bf16")

    carry, sums = jax.jit(lambda x: jax.lax.scan(body, x[0], x))(jnp.full((3, 5), float(RANK)))
    assert float(sums[2][0]) == sum(range(WORLD)) and float(carry[0]) == 4 * (WORLD - 1) / 2


@scenario
def types_and_shapes() -> None:
    tree = {
        "half": jnp.full((70_000, ), RANK, jnp.bfloat16), "none": jnp.zeros((0, 3)), "one": jnp.float32(RANK),
        "list": [jnp.full((2, 3, 4), RANK, jnp.float32),
                 jnp.full((5, ), RANK, jnp.bfloat16)]
    }
    for how in (gradwire.jax.pmean, jax.jit(gradwire.jax.pmean)):
        mean = how(tree)
        for given, got in zip(jax.tree.leaves(tree), jax.tree.leaves(mean)):
            assert (got.shape, got.dtype) == (given.shape, given.dtype)
            assert (np.asarray(got, np.float32) == (WORLD - 1) / 2).all()
    total = gradwire.jax.psum(tree, "int8")
    assert float(total["one"]) == sum(range(WORLD))


@scenario
def what_cannot_work_is_refused() -> None:
    x = jnp.ones((3, 4))
    refused(TypeError, "['a'] is int32", lambda: gradwire.jax.pmean({"a": jnp.arange(3)}))
    refused(TypeError, "after jax.grad", lambda: jax.grad(lambda y: gradwire.jax.pmean(y).sum())(x))
    refused(TypeError, "outside of jax.vmap", lambda: jax.vmap(gradwire.jax.pmean)(x))
    refused(ValueError, "use gradwire.jax.compress()", lambda: gradwire.jax.pmean(x, "powersgd:rank=2"))
    refused(ValueError, "compress()'s own", lambda: gradwire.jax.compress("powersgd:rank=2,ef=off"))
    refused(ValueError, "rank", lambda: gradwire.jax.compress("powersgd:rank=0"))
    refused(ValueError, "ratio", lambda: gradwire.jax.compress("randk:ratio=2"))
    refused(ValueError, "compress()'s own", lambda: gradwire.jax.compress("int8:ef=off"))
    refused(RuntimeError, "was called before", gradwire.jax.init)
    refused(Exception, "'int3'", lambda: jax.block_until_ready(gradwire.jax.pmean(x, "int3")))
    state = gradwire.jax.compress("int8").init({"a": x})
    refused(ValueError, "another structure", lambda: gradwire.jax.compress("int8").update({"b": x}, state))
    gradwire.jax.shutdown()
    refused(RuntimeError, "gradwire.jax.init()", lambda: gradwire.jax.pmean(x))


@scenario
def several_devices_in_each_process() -> None:
    per_process = jax.local_device_count()
    assert per_process == 2 and gradwire.jax.world_size() == 2 * WORLD == jax.device_count(), jax.devices()
    mesh = jax.make_mesh((2 * WORLD,), ("data",))
    given = np.random.default_rng(0).standard_normal((2 * WORLD, 300), np.float32)
    mine = slice(RANK * per_process, (RANK + 1) * per_process)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), given[mine],
                                               given.shape)
    transformation = gradwire.jax.compress("int4:schedule=ring", dense=False)

    def update(g: Any) -> Tuple[Any, Any, Any]:
        averaged, state = transformation.update(g, transformation.init(g))
        return gradwire.jax.pmean(gradwire.jax.pmean(g)), averaged, state.residual

    mapped = jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))
    local = [
        np.concatenate([shard.data for shard in sorted(a.addressable_shards, key=lambda s: s.index[0].start)])
        for a in mapped(x)
    ]
    pmapped = [np.asarray(a) for a in jax.pmap(update)(given[mine])]
    for exact, averaged, residual in (local, pmapped):
        np.testing.assert_allclose(exact, np.repeat(given.mean(0, keepdims=True), per_process, 0), atol=1e-6)
        everybodys = everyones(averaged).reshape(2 * WORLD, -1)
        assert (everybodys == everybodys[0]).all() and np.abs(everybodys - given.mean(0)).max() > 1e-3
        kept = everyones(residual).reshape(2 * WORLD, -1)
        np.testing.assert_allclose(2 * WORLD * everybodys[0] + kept.sum(0), given.sum(0), atol=1e-5)


@scenario
def trees_that_differ_are_named() -> None:
    tree = {"kernel": jnp.ones((8, 4))} if RANK == 0 else {"kernel": jnp.ones((4, 8))}
    try:
        jax.block_until_ready(jax.jit(lambda t: gradwire.jax.pmean(t))(tree))
    except jax.errors.JaxRuntimeError as error:
        assert "pmean at jax_ranks.py" in str(error) and ", tree " in str(error), error
    else:
        raise AssertionError("no error")


@scenario
def a_dead_peer_raises() -> None:
    step = jax.jit(lambda x: gradwire.jax.pmean(x))
    x = jnp.ones(1000)
    for i in range(3):
        x = step(x)
    jax.block_until_ready(x)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for i in range(1000):
            jax.block_until_ready(step(x))
            time.sleep(0.01)
    except jax.errors.JaxRuntimeError as error:
        assert "rank 1" in str(error), error
        assert time.monotonic() - begin < 20
        print(f"rank {RANK}: {str(error)[:200]}", flush=True)
        os._exit(0)  # jax.distributed would wait for the dead rank
    raise AssertionError("no error")


def main() -> None:
    names = sys.argv[1:]
    if names[0] in ("programs_outlive_the_world_that_traced_them", "an_error_ends_with_its_group"):
        pass  # these scenarios call init()
    elif "a_dead_peer_raises" in names or "trees_that_differ_are_named" in names:
        # Does not use jax.distributed, which ends every process when one process dies.
        gradwire.jax.init(os.environ["MEETING"], RANK, WORLD, timeout_s=30)
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", WORLD, RANK)
        gradwire.jax.init(timeout_s=60)
    for name in names:
        begin = time.monotonic()
        SCENARIOS[name]()
        if RANK == 0:
            print(f"{name}: ok ({time.monotonic() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
