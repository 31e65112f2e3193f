#!/usr/bin/env python3
"""Loss of a small transformer after training in JAX: each compression and jax.lax.pmean (Gloo), on the CPU.

    jax_loss.py [--ranks N] [--seeds N] [--steps N] [--json FILE]     processes on this machine

The model, its data and the held-out batches are those of pytorch_host.py's losses: each word is a function of
the previous word, with some noise.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

from jax_allreduce import connect, smoke, start

WIDTH, DEPTH, WORDS, LENGTH, BATCH = 64, 2, 509, 32, 8
GLOO = "jax.lax.pmean, Gloo"
SMOKE_MODES = (GLOO, "int8")  # to compile one takes ten seconds
MODES = (GLOO, "fp32", "bf16", "int8", "int4", "int4:rotate=hadamard", "powersgd:rank=4,start=20")


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path)
    parser.set_defaults(modes=MODES)
    smoke.add(parser, ranks=2, seeds=1, steps=1, modes=SMOKE_MODES)
    return parser.parse_args()


def batch(seed, number, rank):
    """Returns (BATCH, LENGTH + 1) words."""
    import numpy as np
    generator = np.random.default_rng([seed, number, rank])
    tokens = [generator.integers(WORDS, size=BATCH)]
    while len(tokens) <= LENGTH:
        tokens.append((7 * tokens[-1] + generator.integers(3, size=BATCH)) % WORDS)
    return np.stack(tokens, axis=1)


def fresh_weights(seed):
    import jax
    import jax.numpy as jnp
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * DEPTH))

    def linear(rows, cols):
        bound = rows ** -0.5
        return {
            "w": jax.random.uniform(next(keys), (rows, cols), minval=-bound, maxval=bound),
            "b": jnp.zeros(cols)
        }

    def norm():
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    blocks = [{"norm1": norm(), "qkv": linear(WIDTH, 3 * WIDTH), "out": linear(WIDTH, WIDTH), "norm2": norm(),
               "up": linear(WIDTH, 4 * WIDTH), "down": linear(4 * WIDTH, WIDTH)} for _ in range(DEPTH)]
    return {
        "embedding": jax.random.normal(next(keys), (WORDS, WIDTH)), "position": jnp.zeros((LENGTH, WIDTH)),
        "blocks": blocks, "norm": norm(), "head": linear(WIDTH, WORDS)
    }


def loss_of(weights, tokens):
    import jax
    import jax.numpy as jnp
    import optax

    def apply(layer, x):
        return x @ layer["w"] + layer["b"]

    def normed(layer, x):
        return jax.nn.standardize(x, epsilon=1e-5) * layer["scale"] + layer["bias"]

    x = weights["embedding"][tokens[:, :-1]] + weights["position"]
    for block in weights["blocks"]:
        qkv = apply(block["qkv"], normed(block["norm1"], x)).reshape(BATCH, LENGTH, 3, 1, WIDTH)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + apply(block["out"], attended.reshape(BATCH, LENGTH, WIDTH))
        x = x + apply(block["down"],
                      jax.nn.gelu(apply(block["up"], normed(block["norm2"], x)), approximate=False))
    logits = apply(weights["head"], normed(weights["norm"], x))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def gloos_mean(world):
    """Returns a function that averages a tree of this process's gradients with JAX's collective."""
    import jax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import NamedSharding, PartitionSpec
    spec = PartitionSpec("ranks")
    mesh = jax.make_mesh((world,), ("ranks",))
    mean = jax.jit(
        jax.shard_map(lambda x: jax.lax.pmean(x, "ranks"), mesh=mesh, in_specs=spec, out_specs=spec,
                      check_vma=False))

    def average(tree):
        mine, back = ravel_pytree(tree)
        everyones = jax.make_array_from_single_device_arrays((world, mine.size), NamedSharding(mesh, spec),
                                                             [mine[None]])
        return back(mean(everyones).addressable_data(0)[0])

    return average


def trainer(mode, optimizer, world):
    """Returns (first state, step): step(weights, state, tokens) -> (loss, weights, state)."""
    import jax
    import optax

    import gradwire.jax
    inner = optax.sgd(0.05, momentum=0.9) if optimizer == "sgd" else optax.adamw(0.002)
    gradients = jax.jit(jax.value_and_grad(loss_of))
    if mode == GLOO:
        average = gloos_mean(world)
    else:
        inner = optax.chain(gradwire.jax.compress(mode), inner)

    @jax.jit
    def apply(gradient, state, weights):
        updates, state = inner.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    def step(weights, state, tokens):
        loss, gradient = gradients(weights, tokens)
        return (loss, *apply(average(gradient) if mode == GLOO else gradient, state, weights))

    return inner.init, step


def main():
    arguments = parse()
    smoke.need(arguments, "jax", "optax", specs=[mode for mode in MODES if mode != GLOO])
    if "RANK" not in os.environ:
        os.environ.update(OMP_NUM_THREADS="1", GRADWIRE_THREADS="1")
        return start(arguments, deadline_s=3600)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    import jax

    import gradwire.jax
    connect(rank, world)
    gradwire.jax.init(timeout_s=120)
    held_out_loss = jax.jit(loss_of)
    items = []
    for optimizer in ("sgd", "adamw"):
        for mode in arguments.modes:
            first_state, step = trainer(mode, optimizer, world)
            for seed in range(arguments.seeds):
                weights = fresh_weights(seed)
                state = first_state(weights)
                for number in range(arguments.steps):
                    loss, weights, state = step(weights, state, batch(seed, number, rank))
                    jax.block_until_ready(weights)
                held_out = statistics.fmean(
                    float(held_out_loss(weights, batch(seed, 1_000_000 + k, 0))) for k in range(16))
                items.append({
                    "mode": mode, "optimizer": optimizer, "seed": seed, "steps": arguments.steps,
                    "final_loss": held_out, "training_loss": float(loss)
                })
                if rank == 0:
                    print(f"{optimizer:6} {mode:28} seed {seed}: {held_out:.4f}", flush=True)
    if rank == 0:
        report(items, arguments, world)
    gradwire.jax.shutdown()
    return 0


def report(items, arguments, world):
    import jax
    losses = {(i["mode"], i["optimizer"], i["seed"]): i["final_loss"] for i in items}
    print("\n| | loss, SGD | loss, AdamW |\n|---|---:|---:|")
    for mode in arguments.modes:
        cells = []
        for optimizer in ("sgd", "adamw"):
            seeds = range(arguments.seeds)
            base = [0.0 if mode == GLOO else losses[GLOO, optimizer, s] for s in seeds]
            mean = statistics.fmean(losses[mode, optimizer, s] - b for s, b in zip(seeds, base))
            cells.append(f"{mean:.4f}" if mode == GLOO else f"{mean:+.4f}")
        print(f"| {mode} | {' | '.join(cells)} |")
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                                cwd=pathlib.Path(__file__).parent).stdout.strip()
        about = {
            "date": datetime.date.today().isoformat(), "commit": commit,
            "command": "bench/experiments/jax_loss.py", "system": platform.platform(),
            "cores": os.cpu_count(), "jax": jax.__version__, "ranks": world,
            "model": {"width": WIDTH, "depth": DEPTH, "words": WORDS,
                      "length": LENGTH}, "batch_size": BATCH, "load": os.getloadavg()[0]
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"schema": 1, "settings": about, "items": items}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
