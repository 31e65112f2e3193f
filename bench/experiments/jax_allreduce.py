#!/usr/bin/env python3
"""gradwire.jax.pmean and jax.lax.pmean (Gloo), inside jit, on the CPU.

    jax_allreduce.py [--ranks N] [--mib SIZE] [--json FILE]     processes on this machine
    bench/harness/shaped_link.sh --hosts 4 --rate 1gbit -- PYTHON bench/experiments/jax_allreduce.py
                                                                one per host of a slow network (root)
"""
import argparse
import functools
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # bench/
from harness import smoke  # noqa: E402

SPECS = ("fp32", "bf16", "int8", "int4", "int4:rotate=hadamard")


def start(arguments, deadline_s=500):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        **os.environ, "WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port
    }
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**shared, "RANK": str(r)})
        for r in range(arguments.ranks)
    ]
    try:
        return max(abs(r.wait(timeout=deadline_s)) for r in ranks)
    finally:
        for r in ranks:
            r.kill()


def connect(rank, world):
    """Initializes jax.distributed with Gloo, on this machine or over a network."""
    import jax
    # Gloo would listen where the host's name leads, which is 127.0.0.1
    if os.environ["MASTER_ADDR"] != "127.0.0.1":
        from jax._src.lib import _jax
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 1))
            here = probe.getsockname()[0]
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=here)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", world, rank)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=float, default=16, help="of FP32 per rank")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    smoke.add(parser, ranks=2, mib=0.01, repetitions=1)
    arguments = parser.parse_args()
    smoke.need(arguments, "jax", specs=SPECS)
    if "RANK" not in os.environ:
        return start(arguments)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import gradwire.jax

    connect(rank, world)
    gradwire.jax.init()
    elements = int(arguments.mib * (1 << 18))
    mine = jax.random.normal(jax.random.key(rank), (elements,))
    mesh = jax.make_mesh((world,), ("ranks",))
    spec = PartitionSpec("ranks")
    everyones = jax.make_array_from_single_device_arrays((world, elements), NamedSharding(mesh, spec),
                                                         [mine[None]])
    # In place, as in training, with donated operands.
    theirs = jax.jit(
        jax.shard_map(lambda x: jax.lax.pmean(x, "ranks"), mesh=mesh, in_specs=spec, out_specs=spec,
                      check_vma=False), donate_argnums=0)
    modes = {"jax.lax.pmean, Gloo": (theirs, everyones)}
    for name in SPECS:
        modes[name] = (jax.jit(lambda x, name=name: gradwire.jax.pmean(x, name), donate_argnums=0), mine + 0)
    times = {name: [] for name in modes}
    values = {name: value for name, (_, value) in modes.items()}
    for repetition in range(arguments.repetitions + 1):  # in turns; the first compiles
        for name, (call, _) in modes.items():
            begin = time.perf_counter()
            values[name] = jax.block_until_ready(call(values[name]))
            if repetition:
                times[name].append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        base = statistics.median(times["jax.lax.pmean, Gloo"])
        print(f"{arguments.mib:g} MiB of FP32 per rank, {world} ranks, load {os.getloadavg()[0]:.1f}\n")
        print("| | ms | x Gloo |\n|---|---:|---:|")
        for name, ms in times.items():
            print(f"| {name} | {statistics.median(ms):.1f} | {base / statistics.median(ms):.2f} |")
        if arguments.json:
            commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True,
                                    text=True, cwd=pathlib.Path(__file__).parent).stdout.strip()
            about = {
                "commit": commit, "system": platform.platform(), "cores": os.cpu_count(),
                "jax": jax.__version__, "ranks": world, "mib": arguments.mib, "load": os.getloadavg()[0]
            }
            arguments.json.write_text(
                json.dumps({"schema": 1, "settings": about, "ms": times}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
