"""A small transformer in JAX, and averages over Gloo, for the experiments jax_*."""
import functools
import os
import socket
import typing

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
except ImportError:
    jax = None  # run.py shows the options even without JAX

GLOO = "jax.lax.pmean, Gloo"
SMOKE_MODES = (GLOO, "int8")  # each mode takes ten seconds to compile


def connect():
    """Initializes jax.distributed with Gloo, on this machine or over a network."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if address != "127.0.0.1":  # Gloo would listen at the address of the host's name, which is 127.0.0.1
        from jax._src.lib import _jax
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))
            here = probe.getsockname()[0]
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=here)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{address}:{port}", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))


def _mesh():
    return jax.make_mesh((int(os.environ["WORLD_SIZE"]),), ("ranks",))


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
        import optax

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
        import optax
        from jax.flatten_util import ravel_pytree

        import gradwire.jax
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
