"""gradwire.jax.pmean and jax.lax.pmean (Gloo), inside jit, on the CPU."""
import os
import time

from harness import report
from harness.jax_training import GLOO

SPECS = ("fp32", "bf16", "int8", "int4", "int4:rotate=hadamard")
MODULES = ("jax",)
OPTIONS = {"ranks": 2, "mib": 16.0, "repetitions": 7}
SMOKE = {"ranks": 2, "mib": 0.01, "repetitions": 1, "rate": ""}


def measure(options):
    import jax

    import gradwire.jax
    from harness.jax_training import connect, mean_over_gloo, on_all_ranks
    connect()
    gradwire.jax.init()
    mine = jax.random.normal(jax.random.key(int(os.environ["RANK"])), (int(options.mib * (1 << 18)),))
    # The averages run in place with donated operands, as in training.
    calls = {GLOO: mean_over_gloo(donate_argnums=0),
             **{spec: jax.jit(lambda x, spec=spec: gradwire.jax.pmean(x, spec), donate_argnums=0)
                for spec in SPECS}}
    values = {mode: on_all_ranks(mine) if mode == GLOO else mine + 0 for mode in calls}
    times = []
    for repetition in range(options.repetitions + 1):  # the calls alternate; the first call compiles
        for mode, call in calls.items():
            begin = time.perf_counter()
            values[mode] = jax.block_until_ready(call(values[mode]))
            if repetition:
                times.append({"mode": mode, "step_ms": [(time.perf_counter() - begin) * 1e3]})
    yield from times


def tables(document):
    return report.markdown(report.speed_table(document["items"], GLOO))
