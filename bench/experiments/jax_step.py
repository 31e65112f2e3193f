"""Time of a training step in JAX with each compression and with jax.lax.pmean (Gloo), on the CPU.

jax_loss's transformer and AdamW step, 512 wide and 4 blocks deep, with a small batch: a model whose gradients
take longer to exchange than to compute.
"""
import os
import time

from harness import report
from harness.jax_training import GLOO, SMOKE_MODES

SPECS = ("fp32", "bf16", "int8", "int4", "powersgd:rank=4,start=2")
MODULES = ("jax", "optax")
OPTIONS = {"ranks": 4, "steps": 5, "repetitions": 3, "modes": (GLOO, *SPECS), "width": 512, "depth": 4}
SMOKE = {"ranks": 2, "steps": 1, "repetitions": 1, "modes": SMOKE_MODES, "width": 64, "depth": 1, "rate": ""}
WARM_UP_STEPS = 4  # the first step compiles; PowerSGD starts at the third step


def measure(options):
    import jax

    import gradwire.jax
    from harness.jax_training import Transformer, connect
    connect()
    gradwire.jax.init(timeout_s=120)
    model = Transformer(options.width, options.depth, batch_size=2)
    trainers = {mode: model.trainer(mode, "adamw") for mode in options.modes}
    for _ in range(options.repetitions):
        for mode, (first_state, step) in trainers.items():
            weights = model.fresh_weights(0)
            state, times = first_state(weights), []
            for number in range(WARM_UP_STEPS + options.steps):
                tokens = model.batch(0, number, int(os.environ["RANK"]))
                begin = time.perf_counter()
                _, weights, state = step(weights, state, tokens)
                jax.block_until_ready((weights, state))
                times.append((time.perf_counter() - begin) * 1e3)
            yield {"mode": mode, "step_ms": times[WARM_UP_STEPS:],
                   "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights))}
    gradwire.jax.shutdown()


def line(item):
    return f"{item['mode']:28} {report.median(item['step_ms']):.0f} ms"


def tables(document):
    return report.markdown(report.speed_table(document["items"], GLOO))
