"""Loss of a small transformer after training in JAX: each compression and jax.lax.pmean (Gloo), on the CPU.

The experiment uses the model, the data and the held-out batches of ddp_loss.
"""
import os
import statistics

from harness import report
from harness.jax_training import GLOO, SMOKE_MODES

SPECS = ("fp32", "bf16", "int8", "int4", "int4:rotate=hadamard", "powersgd:rank=4,start=20")
MODULES = ("jax", "optax")
OPTIONS = {"ranks": 2, "seeds": 3, "steps": 300, "modes": (GLOO, *SPECS)}
SMOKE = {"ranks": 2, "seeds": 1, "steps": 1, "modes": SMOKE_MODES, "rate": ""}


def measure(options):
    import jax

    import gradwire.jax
    from harness.jax_training import Transformer, connect
    connect()
    gradwire.jax.init(timeout_s=120)
    model = Transformer(64, 2)
    held_out_loss = jax.jit(model.loss)
    for optimizer in ("sgd", "adamw"):
        for mode in options.modes:
            first_state, step = model.trainer(mode, optimizer)
            for seed in range(options.seeds):
                weights = model.fresh_weights(seed)
                state = first_state(weights)
                for number in range(options.steps):
                    tokens = model.batch(seed, number, int(os.environ["RANK"]))
                    loss, weights, state = step(weights, state, tokens)
                    jax.block_until_ready(weights)
                held_out = statistics.fmean(
                    float(held_out_loss(weights, model.batch(seed, 1_000_000 + k, 0))) for k in range(16))
                yield {"mode": mode, "optimizer": optimizer, "seed": seed, "steps": options.steps,
                       "final_loss": held_out, "training_loss": float(loss)}
    gradwire.jax.shutdown()


def line(item):
    return f"{item['optimizer']:6} {item['mode']:28} seed {item['seed']}: {item['final_loss']:.4f}"


def tables(document):
    return report.markdown(report.loss_table(document["items"], GLOO))
