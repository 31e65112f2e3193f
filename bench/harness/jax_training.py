"""The experiments jax_*: a small transformer in JAX, and averages over Gloo."""
import functools
import os
import socket
import statistics
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

import gradwire.jax
from harness.report import GLOO

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WARM_UP_STEPS = 4  # the first step compiles; PowerSGD starts at the third step


def connect():
    """Initializes jax.distributed with Gloo, on this machine or over a network, and Gradwire."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if address != "127.0.0.1":  # Gloo would listen at the address of the host's name, which is 127.0.0.1
        from jax._src.lib import _jax
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))
            here = probe.getsockname()[0]
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=here)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{address}:{port}", WORLD, RANK)
    gradwire.jax.init(timeout_s=120)


def _mesh():
    return jax.make_mesh((WORLD,), ("ranks",))


def on_all_ranks(mine):
    """Returns a global array with one row per rank. `mine`: this rank's row."""
    sharding = NamedSharding(_mesh(), PartitionSpec("ranks"))
    return jax.make_array_from_single_device_arrays((sharding.mesh.size, mine.size), sharding, [mine[None]])


def mean_over_gloo(**options):
    """Returns the compiled average over the ranks of on_all_ranks()'s arrays. options: options of jax.jit."""
    spec = PartitionSpec("ranks")
    return jax.jit(jax.shard_map(lambda x: jax.lax.pmean(x, "ranks"), mesh=_mesh(), in_specs=spec,
                                 out_specs=spec, check_vma=False), **options)


class Transformer(typing.NamedTuple):
    """A decoder, and its language, in which a word is a function of the previous word, with noise."""
    width: int
    depth: int
    words: int = 509
    length: int = 32
    batch_size: int = 8

    def batch(self, seed, number, rank):
        """Returns a batch of words: (batch_size, length + 1)."""
        generator = np.random.default_rng([seed, number, rank])
        tokens = [generator.integers(self.words, size=self.batch_size)]
        while len(tokens) <= self.length:
            tokens.append((7 * tokens[-1] + generator.integers(3, size=self.batch_size)) % self.words)
        return np.stack(tokens, axis=1)

    def fresh_weights(self, seed):
        width = self.width
        keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * self.depth))

        def linear(rows, cols):
            bound = rows ** -0.5
            return {"w": jax.random.uniform(next(keys), (rows, cols), minval=-bound, maxval=bound),
                    "b": jnp.zeros(cols)}

        def norm():
            return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        blocks = [{"norm1": norm(), "qkv": linear(width, 3 * width), "out": linear(width, width),
                   "norm2": norm(), "up": linear(width, 4 * width), "down": linear(4 * width, width)}
                  for _ in range(self.depth)]
        return {"embedding": jax.random.normal(next(keys), (self.words, width)),
                "position": jnp.zeros((self.length, width)), "blocks": blocks, "norm": norm(),
                "head": linear(width, self.words)}

    def loss(self, weights, tokens):
        def apply(layer, x):
            return x @ layer["w"] + layer["b"]

        def normed(layer, x):
            return jax.nn.standardize(x, epsilon=1e-5) * layer["scale"] + layer["bias"]

        shape = (self.batch_size, self.length)
        x = weights["embedding"][tokens[:, :-1]] + weights["position"]
        for block in weights["blocks"]:
            qkv = apply(block["qkv"], normed(block["norm1"], x)).reshape(*shape, 3, 1, self.width)
            attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
            x = x + apply(block["out"], attended.reshape(*shape, self.width))
            up = apply(block["up"], normed(block["norm2"], x))
            x = x + apply(block["down"], jax.nn.gelu(up, approximate=False))
        logits = apply(weights["head"], normed(weights["norm"], x))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def trainer(self, mode, optimizer):
        """Returns (first state, step): step(weights, state, tokens) -> (loss, weights, state)."""
        inner = optax.sgd(0.05, momentum=0.9) if optimizer == "sgd" else optax.adamw(0.002)
        gradients = jax.jit(jax.value_and_grad(self.loss))
        mean = mean_over_gloo()
        if mode != GLOO:
            inner = optax.chain(gradwire.jax.compress(mode), inner)

        def averaged(tree):
            mine, back = ravel_pytree(tree)
            return back(mean(on_all_ranks(mine)).addressable_data(0)[0])

        @jax.jit
        def apply(gradient, state, weights):
            updates, state = inner.update(gradient, state, weights)
            return optax.apply_updates(weights, updates), state

        def step(weights, state, tokens):
            loss, gradient = gradients(weights, tokens)
            return (loss, *apply(averaged(gradient) if mode == GLOO else gradient, state, weights))

        return inner.init, step


def allreduces(options, specs):
    """Measures averages over the ranks, which run in place with donated operands, as in training."""
    connect()
    mine = jax.random.normal(jax.random.key(RANK), (int(options.mib * (1 << 18)),))
    calls = {GLOO: mean_over_gloo(donate_argnums=0),
             **{spec: jax.jit(lambda x, spec=spec: gradwire.jax.pmean(x, spec), donate_argnums=0)
                for spec in specs}}
    values = {mode: on_all_ranks(mine) if mode == GLOO else mine + 0 for mode in calls}
    for repetition in range(options.repetitions + 1):  # the calls alternate; the first call compiles
        times = []
        for mode, call in calls.items():
            begin = time.perf_counter()
            values[mode] = jax.block_until_ready(call(values[mode]))
            times.append({"mode": mode, "step_ms": [(time.perf_counter() - begin) * 1e3]})
        yield from times if repetition else ()


def losses(options):
    """Trains, and measures the loss on 16 held-out batches."""
    connect()
    model = Transformer(64, 2)
    held_out_loss = jax.jit(model.loss)
    for optimizer in ("sgd", "adamw"):
        for mode in options.modes:
            first_state, step = model.trainer(mode, optimizer)
            for seed in range(options.seeds):
                weights = model.fresh_weights(seed)
                state = first_state(weights)
                for number in range(options.steps):
                    loss, weights, state = step(weights, state, model.batch(seed, number, RANK))
                    jax.block_until_ready(weights)
                held_out = statistics.fmean(
                    float(held_out_loss(weights, model.batch(seed, 1_000_000 + k, 0))) for k in range(16))
                yield {"mode": mode, "optimizer": optimizer, "seed": seed, "steps": options.steps,
                       "final_loss": held_out, "training_loss": float(loss)}
    gradwire.jax.shutdown()


def steps(options):
    """Measures training steps, the modes in turns."""
    connect()
    model = Transformer(options.width, options.depth, batch_size=2)
    trainers = {mode: model.trainer(mode, "adamw") for mode in options.modes}
    for mode, (first_state, step) in [*trainers.items()] * options.repetitions:
        weights = model.fresh_weights(0)
        state, times = first_state(weights), []
        for number in range(WARM_UP_STEPS + options.steps):
            tokens = model.batch(0, number, RANK)
            begin = time.perf_counter()
            _, weights, state = step(weights, state, tokens)
            jax.block_until_ready((weights, state))
            times.append((time.perf_counter() - begin) * 1e3)
        yield {"mode": mode, "step_ms": times[WARM_UP_STEPS:],
               "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights))}
    gradwire.jax.shutdown()
