"""Scenarios of gradwire.jax: the types and layouts of docs/for-jax.md, loss scales and the profiler."""
from __future__ import annotations

import glob
import gzip
import json
import tempfile
from typing import Any, Callable, Dict, Tuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import sparse

import gradwire.jax
import laws
from jax_ranks import everyones, refused
from rank import RANK, WORLD
from scenarios import scenario


def values(rank: int, *shape: int) -> np.ndarray:
    """Returns small integers, whose means are exact in every tested type."""
    return (np.arange(np.prod(shape)).reshape(shape) % 8 + 4 * rank).astype(np.float32)


# Supported inputs: a function of the rank, and the type of the mean.
TAKEN: Dict[str, Tuple[Callable[[int], Any], str]] = {
    "numpy float32": (lambda rank: values(rank, 40, 60), "float32"),
    "numpy float16": (lambda rank: values(rank, 40, 60).astype(np.float16), "float16"),
    "numpy float64": (lambda rank: values(rank, 40, 60).astype(np.float64), "float32"),
    "numpy, Fortran order": (lambda rank: np.asfortranarray(values(rank, 40, 60)), "float32"),
    "numpy, strided": (lambda rank: values(rank, 80, 120)[::2, ::-2], "float32"),
    "numpy, read-only": (lambda rank: np.broadcast_to(values(rank, 60), (40, 60)), "float32"),
    "a Python float": (lambda rank: float(4 * rank), "float32")}
SHAPED: Dict[str, Callable[[int], Any]] = {
    "": lambda rank: values(rank, 40, 60), "0-dim": lambda rank: float(4 * rank),
    "empty": lambda rank: np.zeros((0, 3)), "large": lambda rank: values(rank, 70_000)}


def taken() -> Dict[str, Tuple[Callable[[int], Any], str]]:
    cases = dict(TAKEN)
    for dtype in ("float32", "bfloat16", "float16"):
        for name, make in SHAPED.items():
            cases[f"{dtype}, {name}"] = (lambda rank, m=make, d=dtype: jnp.asarray(m(rank), d)), dtype
        cases[f"{dtype}, transposed"] = (lambda rank, d=dtype: jnp.asarray(values(rank, 60, 40), d).T), dtype
        cases[f"{dtype}, expanded"] = (lambda rank, d=dtype: jnp.broadcast_to(
            jnp.asarray(values(rank, 60), d), (40, 60))), dtype
    return cases


def refusals() -> Dict[str, Tuple[Any, str]]:
    """Returns rejected inputs, and the text that the error must contain."""
    narrow = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "bool", "complex64",
              "float8_e4m3fn", "float8_e5m2")
    cases: Dict[str, Tuple[Any, str]] = {dtype: (jnp.zeros((3, 4), dtype), dtype) for dtype in narrow}
    with jax.enable_x64(True):
        for dtype in ("float64", "int64", "complex128"):
            cases[dtype] = jnp.zeros((3, 4), dtype), dtype
    tangent = jax.grad(lambda x: x.astype(jnp.float32).sum(), allow_int=True)(jnp.arange(3))
    return {**cases, "a Python int": (3, "int32"), "a random key": (jax.random.key(0), "key<fry>"),
            "the tangent of integers": (tangent, "float0"),
            "sparse": (sparse.BCOO.fromdense(jnp.eye(4)), "int32")}


@scenario()
def every_type_and_layout_is_averaged_or_refused_by_name() -> None:
    transformations = {spec: gradwire.jax.compress(spec)
                       for spec in ("fp32", "bf16", "powersgd:rank=2", "randk:ratio=0.5")}
    for name, (make, dtype) in taken().items():
        own = make(RANK)
        tree = {"array": own, "none": None, "tied": own, "list": [jnp.float32(RANK), jnp.zeros((0, 3))]}
        mean = np.mean([np.asarray(make(rank), np.float64) for rank in range(WORLD)], 0)
        for how in (gradwire.jax.pmean, jax.jit(gradwire.jax.pmean),
                    jax.jit(gradwire.jax.pmean, donate_argnums=0)):
            out = how(tree if how is gradwire.jax.pmean else jax.tree.map(jnp.array, tree))
            assert out["none"] is None and float(out["list"][0]) == (WORLD - 1) / 2, name
            for got in (out["array"], out["tied"]):
                assert (str(got.dtype), got.shape) == (dtype, np.shape(own)), (name, got.dtype, got.shape)
                np.testing.assert_array_equal(np.asarray(got, np.float64), mean, err_msg=name)
        np.testing.assert_array_equal(np.asarray(gradwire.jax.psum(own), np.float64), mean * WORLD,
                                      err_msg=name)
        for spec, transformation in transformations.items():
            what, update = f"{name}, {spec}", jax.jit(transformation.update)
            given, state = {"array": jnp.asarray(own)}, transformation.init({"array": own})
            if "=" in spec and np.size(own):
                text = update.lower(given, state).as_text()
                assert spec in text and ("wire=bf16" in text) == (dtype == "bfloat16"), what
            got, state = update(given, state)
            assert (str(got["array"].dtype), got["array"].shape) == (dtype, np.shape(own)), what
            if "=" not in spec:
                np.testing.assert_array_equal(np.asarray(got["array"], np.float64), mean, err_msg=what)
                continue
            kept = np.zeros(np.shape(own)) + (np.float64(state.residual["array"]).reshape(np.shape(own))
                                              if state.residual["array"].size else 0)
            laws.nothing_is_lost(what, {"array": own}, {"array": 0 * kept}, {"array": got["array"]},
                                 {"array": kept}, 1e-5 if dtype == "float32" else 0.02, everyones=everyones)
    small, int8 = jnp.asarray(values(RANK, 3, 5), jnp.bfloat16), gradwire.jax.compress("int8")
    assert "\\22spec\\22: \\22bf16\\22" in jax.jit(int8.update).lower(small, int8.init(small)).as_text()
    mean = np.mean([values(rank, 3, 5) for rank in range(WORLD)], 0)
    np.testing.assert_allclose(np.float32(int8.update(small, int8.init(small))[0]), mean, rtol=0.02)
    zeros = jnp.zeros(3, jnp.float32)
    for name, (array, words) in refusals().items():
        with jax.enable_x64("64" in name or "128" in name):
            for call in (gradwire.jax.pmean, gradwire.jax.psum):
                refused(TypeError, words, lambda: call({"w": array}))
            for transformation in transformations.values():
                refused(TypeError, "['w']", lambda: transformation.init({"w": array}))
                fits = transformation.init(jax.tree.map(lambda _: zeros, {"w": array}))
                refused(TypeError, words, lambda: transformation.update({"w": array}, fits))


@scenario(2)
def the_profiler_shows_what_travels() -> None:
    transformation = gradwire.jax.compress("int8", dense=False, name="step")
    gradient, step = jnp.ones((256, 256)), jax.jit(transformation.update)
    _, state = step(gradient, transformation.init(gradient))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(gradient, state))
            jax.block_until_ready(
                gradwire.jax.pmean({"a": jnp.ones(10), "b": jnp.ones(5, jnp.bfloat16)}, "bf16", name="mean"))
        path, = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    ranges = {event["name"]: event["args"] for event in events
              if event.get("name", "").startswith("gradwire ")}
    found = sorted((name.partition(", tree")[0], args["spec"], int(args["bytes"]))
                   for name, args in ranges.items())
    assert found == [("gradwire bf16: pmean at mean", "bf16", 10),
                     ("gradwire bf16: pmean at mean", "bf16", 40),
                     ("gradwire int8: compress at step", "int8", 4 * 256 * 256)], ranges


SIZE = (48, 64)


def scaled_steps(spec: str, rescales: bool) -> float:
    """Returns the error of the sum of averages and residuals, relative to one gradient.

    The loss scale changes, and two steps overflow on one rank.
    """
    transformation = gradwire.jax.compress(spec, dense=False)

    @jax.jit
    def step(gradient: Any, state: Any, scale: Any) -> Any:
        averaged, after = transformation.update((gradient * scale).astype(jnp.float32), state)
        finite = jnp.isfinite(averaged).all()
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        return averaged / scale, after, finite

    gradients = np.random.default_rng(1).standard_normal((WORLD, *SIZE)).astype(np.float32)
    state, scale, total = transformation.init(jnp.zeros(SIZE)), 65536.0, np.zeros(SIZE)
    for number in range(40):
        own = np.array(gradients[RANK])
        if number in (15, 16) and RANK == WORLD - 1:
            own[0, 0] = np.inf
        averaged, state, finite = step(jnp.asarray(own), state, scale)
        assert bool(finite) == (number not in (15, 16)), number
        if finite:
            total += np.asarray(averaged, np.float64)
        else:
            scale /= 16
            state = gradwire.jax.rescale(state, 1 / 16) if rescales else state
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state)), spec
    kept, mean = np.asarray(gradwire.jax.pmean(state.residual), np.float64) / scale, gradients.mean(0)
    return float(np.linalg.norm(total + kept - 38 * mean.astype(np.float64)) / np.linalg.norm(mean))


@scenario()
def a_loss_scale_changes_and_steps_are_skipped() -> None:
    for spec in ("int4", "int8:schedule=ring", "powersgd:rank=4", "powersgd:rank=2,alternate=on",
                 "randk:ratio=0.1"):
        right, unscaled = scaled_steps(spec, True), scaled_steps(spec, False)
        assert right < 0.01 and unscaled > 10 * right, (spec, right, unscaled)
    # rescale() changes residuals only.
    optimizer = optax.chain(gradwire.jax.compress("powersgd:rank=2"), optax.adam(1e-3))
    weights = {"a": jnp.asarray(values(RANK, 40, 60)), "b": jnp.ones(3)}
    _, state = optimizer.update(weights, optimizer.init(weights))
    scaled = jax.jit(gradwire.jax.rescale)(state, 0.25)
    np.testing.assert_array_equal(scaled[0].residual["a"], state[0].residual["a"] * 0.25)
    assert np.abs(state[0].residual["a"]).max() > 0
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (scaled[0].factor, scaled[1:]),
                        (state[0].factor, state[1:]))
    assert all(jax.tree.leaves(same)), same
