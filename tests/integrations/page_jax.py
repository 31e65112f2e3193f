"""The examples of docs/for-jax.md."""
from __future__ import annotations

import functools
import os
from typing import Any, Dict, List

from page_sessions import RANK, STEPS, WORLD, Session


def training(examples: List[str], _: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import multihost_utils
    # A launcher provides these arguments outside of a test.
    jax.distributed.initialize = functools.partial(
        jax.distributed.initialize, f"127.0.0.1:{os.environ['MASTER_PORT']}", WORLD, RANK)
    names: Dict[str, Any] = {"jax": jax, "optax": optax}
    exec(examples[0], names)
    optimizer = names["optimizer"]
    weights = jnp.zeros((300, 300))
    state = optimizer.init(weights)
    generator = np.random.default_rng(RANK)

    @jax.jit
    def update(weights: Any, state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(weights)
        updates, state = optimizer.update(gradient, state, weights)
        return loss, optax.apply_updates(weights, updates), state

    for number in range(10 * STEPS):
        loss, weights, state = update(weights, state, generator.standard_normal((64, 300), np.float32))
        first = float(loss) if number == 0 else first
    assert float(loss) < 0.7 * first, (first, float(loss))
    everyones = np.asarray(multihost_utils.process_allgather(np.asarray(weights)))
    assert (everyones[0] == everyones[1]).all()

    @jax.jit
    def averages(gradients: Any, losses: Any) -> Any:
        given = {**names, "gradients": gradients, "losses": losses}
        exec(examples[1], given)
        return given["mean"], given["total"]

    mean, total = averages({"w": jnp.full(70_000, float(RANK)), "b": jnp.full(3, RANK, jnp.bfloat16)},
                           jnp.float32(RANK + 1))
    assert float(total) == 3 and all(
        (np.asarray(leaf, np.float32) == 0.5).all() for leaf in jax.tree.leaves(mean))
    names["spec"] = "int4"
    exec(examples[2], names)
    names.update(jnp=jnp, state=names["transformation"].init(jnp.ones(70_000)),
                 gradients=jnp.full(70_000, 1.0), new_scale=1.0, old_scale=2.0)
    exec(examples[3], names)
    before = names["state"]
    for gradient in (jnp.full(70_000, jnp.inf if RANK else 1.0), jnp.linspace(0, 1, 70_000)):
        names["gradients"] = gradient
        exec(examples[4], names)
        assert bool(
            (names["state"].residual == before.residual
             ).all()) == bool(jnp.isinf(names["averaged"]).any()
                              | jnp.isnan(names["averaged"]).any())
    gradient = jnp.asarray(generator.standard_normal((64, 64), np.float32))
    sent, state = names["transformation"].update(gradient, names["transformation"].init(gradient))
    both = multihost_utils.process_allgather(jnp.stack([gradient, sent, state.residual]))
    np.testing.assert_allclose(both[:, 1].sum(0) + both[:, 2].sum(0), both[:, 0].sum(0), atol=1e-5)
    names["labels"] = {"a": "train", "b": "freeze"}
    exec(examples[5], names)
    tree = {"a": gradient, "b": gradient}
    changed = names["optimizer"].update(tree, names["optimizer"].init(tree))[0]
    assert changed["a"].any() and not changed["b"].any()
    names["gradwire"].jax.shutdown()


def without_jax_distributed(examples: List[str], address: str) -> None:
    import jax.numpy as jnp

    import gradwire.jax
    exec(examples[0].replace("node0:29500", address),
         {"gradwire": gradwire, "rank": RANK, "world": WORLD, "secret": "of this run"})
    assert gradwire.jax.world_size() == WORLD and float(gradwire.jax.pmean(jnp.float32(RANK))) == 0.5
    gradwire.jax.shutdown()


def a_global_mesh(examples: List[str], _: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", WORLD, RANK)
    import gradwire.jax
    gradwire.jax.init()
    names: Dict[str, Any] = {
        "jax": jax, "optax": optax, "gradwire": gradwire, "parameters": jnp.zeros((60, 60)),
        "optimizer": optax.chain(gradwire.jax.compress("int8"), optax.adam(0.05)),
        "loss": lambda w, x: jnp.mean((x @ w - x) ** 2)}
    exec(examples[0], names)
    generator = np.random.default_rng(RANK)
    losses = []
    weights, state = names["parameters"], names["state"]
    for _ in range(10 * STEPS):
        x = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(names["mesh"], names["split"]),
                                                   generator.standard_normal((64, 60), np.float32))
        weights, state = names["step"](weights, state, x)
        losses.append(
            float(np.mean((np.asarray(x.addressable_data(0)) @ np.asarray(weights.addressable_data(0)) -
                           np.asarray(x.addressable_data(0)))**2)))
    assert losses[-1] < 0.7 * losses[0], losses
    assert state[0].residual.shape == (60 * WORLD, 60)
    gradwire.jax.shutdown()


SESSIONS = {
    "a global mesh": Session(2, a_global_mesh, ["mesh = jax.make_mesh"]),
    "training": Session(2, training, [
        "import gradwire.jax", "mean = gradwire.jax.pmean", "transformation = ",
        "state = gradwire.jax.rescale", "averaged, after", "optimizer = optax.partition"
    ]),
    "without jax.distributed": Session(2, without_jax_distributed, ['gradwire.jax.init("tcp:']),
}
NOT_RUN: List[Any] = []
