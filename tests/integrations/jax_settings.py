"""Adds scenarios to jax_ranks.py: unused arrays, JAX's x64 and strict promotion, and numbers as arguments."""
from __future__ import annotations

import contextlib
import datetime
import itertools
import math
from typing import Any, Callable, Dict

import jax
import jax.numpy as jnp
import numpy as np

import gradwire
import gradwire.jax
from gradwire import _reducer
from jax_world import RANK, WORLD, refused
from thread_ranks import run_ranks

SCENARIOS: Dict[str, Callable[[], None]] = {}
SPECS = ("fp32", "bf16", "fp8", "int8:schedule=ring", "int4:rotate=hadamard", "int2", "nvfp4",
         "natural:round=nearest", "sign", "topk:k=4,of=64", "powersgd:rank=2",
         "powersgd:rank=2,wire=int4,warm=off", "powersgd:rank=2,alternate=on,wire=int8",
         "powersgd:rank=2,start=2,wire=bf16", "randk:ratio=0.1", "randk:ratio=0.1,wire=int8")


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def gradients(step: int, rank: int) -> Dict[str, Any]:
    """Returns a step's gradients. Matrix a or b is zero on all ranks, c on all but one, d always."""
    rng = np.random.default_rng(step * 100 + rank)
    tree = {name: rng.standard_normal((48, 64)).astype(np.float32) for name in "abcd"}
    used = {"a": step in (0, 3, 4), "b": step in (1, 2, 5), "c": rank == step % WORLD, "d": False}
    return {name: jnp.asarray(tree[name] * used[name]) for name in tree}


def sums(tree: Any) -> Dict[str, np.ndarray]:
    """Returns the sum over ranks of each array; an empty array as zeros."""
    tree = {name: jnp.zeros((48, 64), jnp.float32) if a.size == 0 else a for name, a in tree.items()}
    return {name: np.asarray(a, np.float64) for name, a in gradwire.jax.psum(tree).items()}


@scenario
def zero_gradients_lose_nothing() -> None:
    """Checks each array's conservation in each step, and that a zero gradient's mean sends what waits."""
    for spec in SPECS:
        transformation = gradwire.jax.compress(spec, dense=False)
        update = jax.jit(transformation.update, donate_argnums=(0, 1))
        state = transformation.init(gradients(0, RANK))
        for step in range(6):
            own = gradients(step, RANK)
            given, waiting = sums(own), sums(state.residual)
            mean, state = update(own, state)
            for name, left in sums(state.residual).items():
                due, result = given[name] + waiting[name], np.asarray(mean[name], np.float64)
                error = np.linalg.norm(left + WORLD * result - due) / (np.linalg.norm(due) or 1)
                assert error <= 2e-6, (spec, step, name, error)
                assert bool(result.any()) == bool(due.any()), (spec, step, name)


@scenario
def x64_and_strict_promotion_change_no_bit() -> None:
    def strict() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        return stack

    def run(spec: str, setting: Callable[[], Any]) -> Any:
        with setting():
            transformation = gradwire.jax.compress(spec)
            tree = {**gradients(0, RANK), "v": jnp.ones(100, jnp.float32),
                    "h": jnp.ones((40, 50), jnp.bfloat16)}
            state, out = transformation.init(tree), []
            for step in range(3):
                mean, state = jax.jit(transformation.update)({**tree, **gradients(step, RANK)}, state)
                state = gradwire.jax.rescale(state, np.float64(2.0) if step % 2 else 0.5)
                out.append((mean, state))
            return jax.tree.map(np.asarray, (out, gradwire.jax.pmean(tree, "bf16")))

    for spec in ("bf16", "int4", *(s for s in SPECS if ":ra" in s), "powersgd:start=1099511627776"):
        plain = run(spec, contextlib.nullcontext)
        for setting in (lambda: jax.enable_x64(True), strict):
            other = run(spec, setting)
            for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other)):
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), spec


@scenario
def numbers_are_checked_by_name() -> None:
    gradwire.jax.shutdown()
    for arguments, error, words in (
            ({"timeout_s": math.nan}, ValueError, "timeout_s is nan"),
            ({"timeout_s": -1}, ValueError, "timeout_s is -1"), ({"timeout_s": "9"}, TypeError, "timeout_s"),
            ({"rank": 2**32}, ValueError, "rank is 4294967296"),
            ({"world": 2**32 + 1}, ValueError, "world is"),
            ({"rank": 0.0}, TypeError, "rank is float")):
        refused(error, words, lambda: gradwire.jax.init("local://jax", **arguments))
    for timeout in (math.inf, 1e17, datetime.timedelta(seconds=30)):
        gradwire.jax.init(f"local://jax {RANK}", timeout_s=timeout)
        gradwire.jax.shutdown()
    gradwire.jax.init(timeout_s=datetime.timedelta(seconds=60))
    assert float(gradwire.jax.pmean(jnp.float32(RANK))) == (WORLD - 1) / 2


@scenario
def powersgd_compresses_what_the_library_compresses() -> None:
    sides = (1, 2, 3, 5, 8, 17, 30, 32, 33, 64, 1_025)
    shapes = [(rows, cols) for rows in sides for cols in sides if rows * cols < 20_000]
    tree = {str(shape): jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes}
    specs = [f"powersgd:rank={rank},min_ratio={ratio},wire={wire}" for rank, ratio, wire in itertools.product(
        (1, 3, 512), ("0", "0.5", "1", "2"), ("fp32", "int8", "int4", "qsgd,block=128,bits=4"))]

    def body(comm: gradwire.Communicator) -> Any:
        found = []
        for spec in specs:
            with contextlib.closing(gradwire.Reducer(comm, spec, [(str(s), *s) for s in shapes])) as reducer:
                states = _reducer.unpack(reducer.save_state()).tensors
            found.append({name: len(state.entries["factor"].data) // 4 if "factor" in state.entries else 0
                          for name, state in states.items()})
        return found

    for spec, expected in zip(specs, run_ranks(2, body)[0]):
        factors = jax.eval_shape(gradwire.jax.compress(spec).init, tree).factor
        assert {name: math.prod(factor.shape) for name, factor in factors.items()} == expected, spec
