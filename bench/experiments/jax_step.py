#!/usr/bin/env python3
"""Time of a training step in JAX with each compression and with jax.lax.pmean (Gloo), on the CPU.

    jax_step.py [--ranks N] [--steps N] [--json FILE]     processes on this machine
    bench/harness/shaped_link.sh --hosts 4 --rate 1gbit -- PYTHON bench/experiments/jax_step.py
                                                          one per host of a slow network (root)

jax_loss.py's transformer and AdamW step, 512 wide and 4 blocks deep, with a small batch: a model whose
gradients take longer to exchange than to compute.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import jax_loss
from jax_allreduce import connect, smoke, start

MODES = (jax_loss.GLOO, "fp32", "bf16", "int8", "int4", "powersgd:rank=4,start=2")
WARM_UP_STEPS = 4  # the first compiles; PowerSGD starts at the third


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="measured, of each mode and repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    parser.set_defaults(modes=MODES, width=512, depth=4)
    smoke.add(parser, ranks=2, steps=1, repetitions=1, modes=jax_loss.SMOKE_MODES, width=64, depth=1)
    arguments = parser.parse_args()
    smoke.need(arguments, "jax", "optax", specs=[mode for mode in MODES if mode != jax_loss.GLOO])
    if "RANK" not in os.environ:
        return start(arguments)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax_loss.WIDTH, jax_loss.DEPTH, jax_loss.BATCH = arguments.width, arguments.depth, 2

    import jax

    import gradwire.jax
    connect(rank, world)
    gradwire.jax.init(timeout_s=120)
    ms = {mode: [] for mode in arguments.modes}
    trainers = {mode: jax_loss.trainer(mode, "adamw", world) for mode in arguments.modes}
    elements = 0
    for repetition in range(arguments.repetitions):
        for mode, (first_state, step) in trainers.items():
            weights = jax_loss.fresh_weights(0)
            elements = sum(leaf.size for leaf in jax.tree.leaves(weights))
            state = first_state(weights)
            times = []
            for number in range(WARM_UP_STEPS + arguments.steps):
                tokens = jax_loss.batch(0, number, rank)
                begin = time.perf_counter()
                _, weights, state = step(weights, state, tokens)
                jax.block_until_ready((weights, state))
                times.append((time.perf_counter() - begin) * 1e3)
            ms[mode].append(times[WARM_UP_STEPS:])
            if rank == 0:
                print(f"{repetition + 1} {mode:28} {statistics.median(ms[mode][-1]):.0f} ms", flush=True)
    gradwire.jax.shutdown()
    if rank == 0:
        medians = {
            mode: statistics.median(statistics.median(times) for times in ms[mode])
            for mode in arguments.modes
        }
        print(f"\n{elements:,} parameters, {world} ranks, load {os.getloadavg()[0]:.1f}\n")
        print("| | ms/step | x Gloo |\n|---|---:|---:|")
        for mode in arguments.modes:
            print(f"| {mode} | {medians[mode]:.0f} | {medians[jax_loss.GLOO] / medians[mode]:.2f} |")
        if arguments.json:
            commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True,
                                    text=True, cwd=pathlib.Path(__file__).parent).stdout.strip()
            about = {
                "commit": commit, "command": "bench/experiments/jax_step.py", "system": platform.platform(),
                "cores": os.cpu_count(), "jax": jax.__version__, "ranks": world, "parameters": elements,
                "load": os.getloadavg()[0]
            }
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({"schema": 1, "settings": about, "ms": ms}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
