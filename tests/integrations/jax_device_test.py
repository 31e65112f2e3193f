#!/usr/bin/env python3
"""Tests JAX's arrays on a GPU: pmean() and compress() inside jax.jit, with processes that share one GPU.

usage: jax_device_test.py WORLD cuda|cpu     cpu: the same on the host, which tests this program

As device_test.py, it makes NCCL believe that the processes are on different hosts.
"""
from __future__ import annotations

import os
import pathlib
import sys

import launch

SPECS = ("fp32", "bf16", "fp8", "int8", "int4", "mxfp4", "sign", "eden", "topk", "powersgd:rank=2",
         "powersgd:rank=2,wire=int8", "randk:ratio=0.25")


def run_rank(world: int) -> int:
    rank = int(os.environ["RANK"])
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import gradwire.jax
    gradwire.jax.init(f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank, world, secret="jax", timeout_s=60)

    def normal(seed: int, *shape: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    everyones = [normal(i, 4099, 3) for i in range(world)]
    mean = np.asarray(jax.jit(lambda x: gradwire.jax.pmean(x, "fp32"))(jnp.asarray(everyones[rank])))
    np.testing.assert_allclose(mean, np.mean(everyones, axis=0), atol=1e-6)
    target = jnp.asarray(normal(100, 64, 8))
    inputs = jnp.asarray(normal(200 + rank, 128, 64))

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((inputs @ (w - target))**2)

    for spec in SPECS:
        optimizer = optax.chain(gradwire.jax.compress(spec, dense=False), optax.sgd(0.05, momentum=0.9))

        @jax.jit
        def step(w: jax.Array, state: optax.OptState) -> tuple[jax.Array, optax.OptState, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(w)
            updates, state = optimizer.update(gradient, state, w)
            return optax.apply_updates(w, updates), state, value

        w = jnp.zeros((64, 8))
        state, losses = optimizer.init(w), []
        for _ in range(12):
            w, state, value = step(w, state)
            losses.append(float(value))
        assert losses[-1] < losses[0], f"{spec}: the loss goes from {losses[0]} to {losses[-1]}"
        total = np.asarray(jax.jit(lambda x: gradwire.jax.psum(x, "fp32"))(w))
        np.testing.assert_allclose(total, world * np.asarray(w), rtol=1e-6, err_msg=f"{spec}: ranks differ")
        if rank == 0:
            print(f"  {spec}: loss {losses[0]:.4f} to {losses[-1]:.4f} on {jax.devices()[0]}", flush=True)
    gradwire.jax.shutdown()
    return 0


def main() -> int:
    world, kind = int(sys.argv[1]), sys.argv[2]
    if "RANK" in os.environ:
        return run_rank(world)
    same_gpu = {"JAX_PLATFORMS": kind, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
                "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    codes = launch.run_ranks(pathlib.Path(__file__), world, [str(world), kind], 150, same_gpu,
                             lambda rank: ["env", f"NCCL_HOSTID={os.getpid()}-{rank}"])
    print("PASSED" if not any(codes) else f"FAILED: ranks ended with {codes}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
