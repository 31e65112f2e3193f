"""The suite of scenarios.py for gradwire.jax: JAX's CPU devices. docs/for-jax.md says what holds.

Scenarios with ranks of their own ("ends") call connect() or meet(); other ranks are connected by begin().
"""
from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import pickle
from typing import Any, Callable, Dict, List, Tuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec

import gradwire
import gradwire.jax
import laws
import rank as this_rank
from gradwire import _jax_ffi, _reducer
from rank import RANK, WORLD
from scenarios import scenario
from thread_ranks import run_ranks

_calls = itertools.count()


def begin() -> None:
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    if "SCENARIO_FOLDER" not in os.environ:
        connect()


def end() -> None:
    gradwire.jax.shutdown()


def connect(devices: int = 1) -> None:
    """Connects the processes, each with this number of devices, through jax.distributed."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if WORLD > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", WORLD, RANK)
    gradwire.jax.init(timeout_s=60)


def meet(number: int = 0) -> None:
    """Connects the processes without jax.distributed, which ends every process when one dies."""
    gradwire.jax.init(f"file://{os.environ['SCENARIO_FOLDER']}/{number}", RANK, WORLD, timeout_s=30)


def everyones(value: Any) -> List[Any]:
    """Returns the values of all processes, through jax.distributed's store."""
    if WORLD == 1:
        return [value]
    client, number = distributed.global_state.client, next(_calls)
    client.key_value_set_bytes(f"test/{number}/{RANK}", pickle.dumps(value))
    return [pickle.loads(client.blocking_key_value_get_bytes(f"test/{number}/{rank}", 120_000))
            for rank in range(WORLD)]


def agree(what: str, *arrays: Any) -> None:
    laws.ranks_agree(what, *arrays, everyones=everyones)


def refused(kind: Any, words: str, call: Callable[[], Any]) -> None:
    this_rank.refused(lambda: jax.block_until_ready(call()), kind, words)


# ---- Laws --------------------------------------------------------------------------------------------------

SPECS = ("fp32", "bf16", "bf16:round=stochastic", "fp8", "int8:schedule=ring", "int4:rotate=hadamard", "int2",
         "mxfp8", "nvfp4", "natural:round=nearest", "sign", "topk:k=4,of=64", "powersgd:rank=2",
         "powersgd:rank=2,wire=int4,warm=off", "powersgd:rank=2,alternate=on,wire=int8,schedule=ring",
         "powersgd:rank=2,start=2,wire=bf16", "randk:ratio=0.1", "randk:ratio=0.05,wire=bf16")


def gradients(step: int, rank: int = RANK) -> Dict[str, Any]:
    """Returns a step's gradients. Matrix a or b is zero on all ranks, c on all but one, d always.

    Vector v is last, because small arrays share a message, and other arrays should begin with a block.
    """
    rng = np.random.default_rng(step * 100 + rank)
    used = {"a": step in (0, 3, 4), "b": step in (1, 2, 5), "c": rank == step % WORLD, "d": False, "v": 1}
    return {name: jnp.asarray(used[name] * rng.standard_normal((48, 64) if name in "abcd" else 70),
                              jnp.float32) for name in used}


@scenario()
def every_spec_keeps_the_laws() -> None:
    """Nothing is lost; ranks agree; a state continues bit for bit, also copied through NumPy, or donated.

    The mean of a zero gradient sends what waits in the residual.
    """
    for spec in SPECS:
        transformation = gradwire.jax.compress(spec, dense=spec in ("fp32", "int8:schedule=ring"))
        donating, plain = (jax.jit(transformation.update, donate_argnums=d) for d in ((0, 1), ()))
        state, later = transformation.init(gradients(0)), []

        def residuals(state: Any) -> laws.Arrays:
            return {name: np.float64(r) if r.size else np.zeros((48, 64) if name in "abcd" else 70)
                    for name, r in state.residual.items()}

        for step in range(6):
            before, given = residuals(state), {n: np.float64(g) for n, g in gradients(step).items()}
            mean, state = donating(gradients(step), state)
            means, what = {n: np.asarray(m) for n, m in mean.items()}, f"{spec}, step {step}"
            laws.nothing_is_lost(what, given, before, means, residuals(state), 2e-6, everyones=everyones)
            agree(what, *means.values())
            waiting = everyones({n: bool((given[n] + before[n]).any()) for n in given})
            for name, result in means.items():
                assert bool(result.any()) == any(w[name] for w in waiting), f"{what}: {name}"
            if step == 2:
                saved = jax.tree.map(np.asarray, state)
            later += [means] if step > 2 else []
        assert spec == "fp32" or any(r.any() for r in residuals(state).values()), spec
        state = jax.tree.map(jnp.asarray, saved)
        # Random formats draw other numbers.
        for step, wanted in zip((3, 4, 5), () if "stochastic" in spec or "rotate" in spec else later):
            mean, state = plain(gradients(step), state)
            assert laws.same_bits({n: np.asarray(m) for n, m in mean.items()}, wanted), f"{spec}, step {step}"


@scenario()
def powersgd_learns_what_is_of_low_rank() -> None:
    """The mean of matrices of low rank is exact, also after zeros. NaN stays in its matrix and step."""
    rng = np.random.default_rng(7)
    left, right = rng.standard_normal((WORLD, 50, 2)), rng.standard_normal((2, 70))
    own = {"low": jnp.asarray(left[RANK] @ right, jnp.float32), "bias": jnp.full((5,), float(RANK)),
           "half": jnp.full((64, 64), RANK, jnp.bfloat16)}
    spoilt = dict(own, low=own["low"].at[3, 3].set(jnp.nan) if RANK == 0 else own["low"])
    for spec in ("powersgd:rank=2", "powersgd:rank=2,alternate=on"):
        transformation = gradwire.jax.compress(spec, error_feedback=False)
        update, state = jax.jit(transformation.update), transformation.init(own)
        for given in (*[jax.tree.map(jnp.zeros_like, own)] * 3, *[own] * 12, spoilt, own):
            out, state = update(given, state)
            if given is spoilt:
                assert np.isnan(out["low"]).all() and np.isfinite(np.float32(out["half"])).all(), spec
        laws.near(spec, out["low"], (left @ right).mean(0), 1e-4)
        half = np.float32(out["half"])
        assert np.allclose(half, (WORLD - 1) / 2, 1e-2) and out["half"].dtype == jnp.bfloat16
        assert (np.asarray(out["bias"]) == (WORLD - 1) / 2).all() and int(state.step) == 17


@scenario()
def training_in_fp32_is_that_of_jaxs_own_psum() -> None:
    optimizer, mesh = optax.adam(1e-3), jax.make_mesh((WORLD,), ("ranks",))
    keys = jax.random.split(jax.random.key(0), 2)
    first = {"up": jax.random.normal(keys[0], (32, 64)) / 6, "down": jax.random.normal(keys[1], (64, 8)) / 8,
             "bias": jnp.zeros(64)}
    pmean = jax.jit(jax.shard_map(lambda t: jax.lax.pmean(t, "ranks"), mesh=mesh, out_specs=PartitionSpec(),
                                  in_specs=PartitionSpec("ranks")))

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] - x[:, :8]) ** 2)

    def theirs(tree: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec("ranks"))
        return jax.tree.map(lambda leaf: jnp.asarray(pmean(jax.make_array_from_single_device_arrays(
            (WORLD, *leaf.shape), sharding, [leaf[None]])).addressable_data(0))[0], tree)

    def apply(gradient: Any, state: Any, p: Any) -> Any:
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(p, updates), state

    ours = jax.jit(lambda p, state, x: apply(
        gradwire.jax.pmean(jax.grad(loss)(p, x), "fp32:schedule=ring"), state, p))
    both = [(first, optimizer.init(first))] * 2
    for step in range(50):
        x = jax.random.normal(jax.random.key(step * 100 + RANK), (16, 32))
        both = [ours(*both[0], x), jax.jit(apply)(theirs(jax.jit(jax.grad(loss))(both[1][0], x)), both[1][1],
                                                  both[1][0])]
    for name in first:
        assert np.abs(both[0][0][name] - both[1][0][name]).max() <= 1e-6, name
    assert float(loss(both[0][0], x)) < 0.9 * float(loss(first, x))


@scenario()
def calls_keep_the_order_of_the_program() -> None:
    """Makes twenty independent calls, between computations that take very different times."""
    @jax.jit
    def many(x: Any, big: Any) -> List[Any]:
        # A slow computation, in other calls on other ranks.
        return [gradwire.jax.pmean(x * (i + 1) + (0 * jnp.sum(big @ big) if (i + RANK) % 2 else 0))
                for i in range(20)]

    for i, y in enumerate(many(jnp.full((100,), float(RANK)), jnp.ones((300, 300)))):
        assert float(y[0]) == (i + 1) * (WORLD - 1) / 2, (i, y[0])

    def body(carry: Any, x: Any) -> Tuple[Any, Any]:
        return gradwire.jax.pmean(carry + x), gradwire.jax.psum(x, "bf16")

    carry, sums = jax.jit(lambda x: jax.lax.scan(body, x[0], x))(jnp.full((3, 5), float(RANK)))
    assert float(sums[2][0]) == sum(range(WORLD)) and float(carry[0]) == 4 * (WORLD - 1) / 2


# ---- Settings and refusals ---------------------------------------------------------------------------------


@scenario(2)
def x64_and_strict_promotion_change_no_bit() -> None:
    def strict() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        return stack

    def run(spec: str, setting: Callable[[], Any]) -> Any:
        with setting():
            transformation = gradwire.jax.compress(spec)
            tree = {**gradients(0), "h": jnp.ones((40, 50), jnp.bfloat16)}
            state, out = transformation.init(tree), []
            for step in range(3):
                mean, state = jax.jit(transformation.update)({**tree, **gradients(step)}, state)
                state = gradwire.jax.rescale(state, np.float64(2.0) if step % 2 else 0.5)
                out.append((mean, state))
            return jax.tree.leaves(jax.tree.map(np.asarray, (out, gradwire.jax.pmean(tree, "bf16"))))

    for spec in ("bf16", "int4", *(s for s in SPECS if ":ra" in s), "powersgd:start=1099511627776"):
        plain = run(spec, contextlib.nullcontext)
        for setting in (lambda: jax.enable_x64(True), strict):
            for a, b in zip(plain, run(spec, setting), strict=True):
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), spec


@scenario(2)
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


@scenario(2)
def what_cannot_work_is_refused() -> None:
    x, compress = jnp.ones((3, 4)), gradwire.jax.compress
    int8, randk = compress("int8"), compress("randk")
    matrix, other = {"a": jnp.ones((40, 60))}, {"a": jnp.ones((60, 80))}
    for kind, words, call in (
        (TypeError, "['a'] is int32", lambda: gradwire.jax.pmean({"a": jnp.arange(3)})),
        (TypeError, "after jax.grad", lambda: jax.grad(lambda y: gradwire.jax.pmean(y).sum())(x)),
        (TypeError, "outside of jax.vmap", lambda: jax.vmap(gradwire.jax.pmean)(x)),
        (ValueError, "use gradwire.jax.compress()", lambda: gradwire.jax.pmean(x, "powersgd:rank=2")),
        (ValueError, "compress()'s own", lambda: compress("powersgd:rank=2,ef=off")),
        (ValueError, "rank", lambda: compress("powersgd:rank=0")),
        (ValueError, "ratio", lambda: compress("randk:ratio=2")),
        (ValueError, "compress()'s own", lambda: compress("int8:ef=off")),
        (RuntimeError, "was called before", gradwire.jax.init),
        (Exception, "'int3'", lambda: gradwire.jax.pmean(x, "int3")),
        (ValueError, "another structure", lambda: int8.update({"b": x}, int8.init({"a": x}))),
        (ValueError, "residual of ['a'] is [40, 60], but its update is [60, 80]",
         lambda: int8.update(other, int8.init(matrix))),
        (ValueError, "residual of ['a']", lambda: randk.update(other, randk.init(matrix))),
        (ValueError, "factor of ['a'] is [60, 3]",
         lambda: compress("powersgd:rank=2").update(matrix, compress("powersgd:rank=3").init(matrix))),
    ):
        refused(kind, words, call)
    gradwire.jax.shutdown()
    refused(RuntimeError, "gradwire.jax.init()", lambda: gradwire.jax.pmean(x))
    for arguments, error, words in (
        ({"timeout_s": math.nan}, ValueError, "timeout_s is nan"),
        ({"timeout_s": -1}, ValueError, "timeout_s is -1"), ({"timeout_s": "9"}, TypeError, "timeout_s"),
        ({"rank": 2**32}, ValueError, "rank is 4294967296"), ({"world": 2**32 + 1}, ValueError, "world is"),
        ({"rank": 0.0}, TypeError, "rank is float")):
        refused(error, words, lambda: gradwire.jax.init("local://jax", **arguments))
    for timeout in (math.inf, 1e17, datetime.timedelta(seconds=30)):
        gradwire.jax.init(f"local://jax {RANK}", timeout_s=timeout)
        gradwire.jax.shutdown()
    gradwire.jax.init(timeout_s=datetime.timedelta(seconds=60))
    assert float(gradwire.jax.pmean(jnp.float32(RANK))) == (WORLD - 1) / 2


@scenario(2)
def no_trace_leaves_its_tracers_behind() -> None:
    optimizer = optax.chain(gradwire.jax.compress("powersgd:rank=2,start=1"), optax.sgd(0.1))
    matrix = jnp.full((40, 60), RANK, jnp.float32)

    def twice(x: Any) -> Any:
        return gradwire.jax.pmean(gradwire.jax.pmean(x) + x)

    with jax.checking_leaks():
        assert float(jax.jit(twice)(jnp.float32(RANK))) == WORLD - 1
        assert float(jax.jit(lambda x: twice(jax.jit(twice)(x)))(jnp.float32(RANK))) == 2 * (WORLD - 1)
        jax.jit(optimizer.update)(matrix, optimizer.init(matrix))
        jax.jit(lambda x: jax.lax.scan(lambda carry, y: (twice(carry + y), carry), x[0], x))(jnp.ones((3, 5)))
        jax.jit(lambda x: jax.lax.cond(True, twice, lambda y: y, x))(jnp.ones(3))
        jax.jit(lambda x: twice(jax.grad(lambda y: (y * y).sum())(x)))(jnp.ones(3))
        jax.eval_shape(twice, jnp.ones(3))
        twice(jnp.ones(3))


@scenario(2, 4, ends=True)
def a_dead_peer_raises() -> None:
    meet()
    step, x = jax.jit(lambda x: gradwire.jax.pmean(x)), jnp.ones(1000)
    for _ in range(3):
        x = jax.block_until_ready(step(x))
    if RANK != 1:
        this_rank.refused(lambda: [jax.block_until_ready(step(x)) for _ in range(1000)],
                          jax.errors.JaxRuntimeError, "rank 1", within_s=20)
    os._exit(0)


@scenario(1, ends=True)
def a_step_is_lowered_for_a_gpu() -> None:
    gradwire.jax.init()
    _jax_ffi.ranks.world = 2
    transformation = gradwire.jax.compress("powersgd:rank=2,wire=bf16,start=3")
    tree = {"w": jnp.ones((40, 60))}
    text = jax.jit(transformation.update).trace(tree, transformation.init(tree)).lower(
        lowering_platforms=("cuda",)).as_text()
    assert "gradwire_average" in text and "output_operand_aliases" in text, text
