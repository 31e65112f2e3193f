"""Compressed averages over ranks inside jax.jit, and as an optax transformation.

    import gradwire.jax
    gradwire.jax.init()                                       # after jax.distributed.initialize()
    optimizer = optax.chain(gradwire.jax.compress("int8"), optax.adam(1e-3))

A rank is a device: of each process its local devices, in order. docs/for-jax.md is the guide.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import secrets
import socket
import sys
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
from jax._src import core, distributed  # the axes of a trace and jax.distributed's store have no public names
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from gradwire import _jax_call, _jax_codecs, _jax_run, _native
from gradwire._core import Communicator, Reducer
from gradwire._jax_run import DTYPES, ranks
from gradwire._jax_state import CompressState as CompressState
from gradwire._jax_state import check_state
from gradwire._jax_state import partition_specs as partition_specs
from gradwire._jax_state import rescale as rescale
from gradwire._port import reserve_port

TIMEOUT_S = 1800.0
# Leaves of fewer elements travel together, joined by a copy: one message costs as much as this many bytes or more.
_SMALL = 1 << 16
# A matrix of fewer elements, and a vector of up to _SMALL, stays in FP32 beside a format of fewer than 16 bits.
_SMALL_MATRIX = 1024
_WIDE = ("fp32", "bf16")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def init(rendezvous: Optional[str] = None, rank: int = 0, world: int = 1, *, secret: str = "",
         timeout_s: float = TIMEOUT_S) -> None:
    """Connects the ranks. Collective over the processes; once, after jax.distributed.initialize() if there is more
    than one process.

    rendezvous, rank, world, secret: where the processes meet, as in gradwire.Communicator, for processes that
        do without jax.distributed; `rank` and `world` count processes, all with as many local devices as this one.
        None: the processes of jax.distributed, which exchange an address and a secret through its store; a
        single process's devices otherwise.
    timeout_s: the longest wait for a peer, here and in every later call.

    Raises CommFailed when a process does not join in time, RuntimeError when called twice.
    """
    ranks.forget_parents()
    if ranks.communicators:
        raise RuntimeError("gradwire.jax.init() was called before; gradwire.jax.shutdown() ends what it began")
    devices = jax.local_devices()
    on_gpus = devices[0].platform in ("gpu", "cuda")
    if not on_gpus and devices[0].platform != "cpu":
        raise _native.Unsupported(f"gradwire.jax runs on JAX's CPU and CUDA devices, not on {devices[0].platform}")
    with contextlib.ExitStack() as stack:
        if rendezvous is None and jax.process_count() > 1:
            rank, world = jax.process_index(), jax.process_count()
            rendezvous, secret = _meeting(rank, timeout_s, stack)
        elif rendezvous is None and world == 1:
            rendezvous = f"local://gradwire.jax {secrets.token_hex(8)}"
        elif rendezvous is None:
            raise _native.BadArgument(f"world={world} without a rendezvous; give one, or call "
                                      "jax.distributed.initialize() before")
        count = world * len(devices)
        first = rank * len(devices)
        with concurrent.futures.ThreadPoolExecutor(len(devices)) as threads:  # each waits for the others
            made = list(threads.map(lambda i: Communicator(
                rendezvous if count > 1 else None, first + i, count, timeout_s=timeout_s, secret=secret,
                device=devices[i].local_hardware_id if on_gpus else "host"), range(len(devices))))
    numbers = [device.local_hardware_id if on_gpus else device.id for device in devices]
    ranks.set(dict(zip(numbers, made)), count)
    _jax_run.register()


def shutdown() -> None:
    """Leaves the group, after the computations in flight. init() may be called again."""
    for communicator, _ in ranks.communicators.values():
        communicator.close()
    ranks.set({}, 0)


def world_size() -> int:
    """The number of ranks: devices of all processes. 0 before init()."""
    return ranks.world


def pmean(tree: Any, spec: str = "fp32", *, name: str = "") -> Any:
    """The mean of each array of `tree` over all ranks, the same bits on every rank. Under jit, or without.

    tree: float32, bfloat16 and float16 arrays, of the same structure, shapes and types on every rank.
    spec: a wire format of docs/formats.md with its options, such as "int8" or "bf16:schedule=ring". What it
        rounds off is lost; compress() keeps it.
    name: of this call, in errors. The place in your program by default.

    One call into the library per tree. Calls of one traced function are chained, so that XLA runs them in the order
    of the program on every rank; calls of others that meet in a different order are refused by name. Raises
    BadArgument or TypeError for what cannot be averaged; a peer that is gone or silent, or ranks whose trees differ,
    end the computation with jax.errors.JaxRuntimeError. Cannot be differentiated or vmapped: average gradients after
    jax.grad, and outside of jax.vmap.
    """
    return _reduce("pmean", tree, spec, name)


def psum(tree: Any, spec: str = "fp32", *, name: str = "") -> Any:
    """The sum over all ranks; otherwise like pmean()."""
    return _reduce("psum", tree, spec, name)


class GradientTransformation(NamedTuple):
    """As optax.GradientTransformation, which this may be used as."""

    init: Callable[[Any], CompressState]
    update: Callable[..., Tuple[Any, CompressState]]


def compress(spec: str, *, error_feedback: bool = True, dense: bool = True, name: str = "") -> GradientTransformation:
    """An optax transformation that averages updates over all ranks in the format `spec`, with error feedback: what
    rounding loses stays on its rank and is part of the next step's update. First in optax.chain().

    spec: a wire format of docs/formats.md with its options; or "powersgd:rank=4", "randk:ratio=0.01" with theirs.
    error_feedback: False: what is rounded off is lost, and there are no residuals.
    dense: True: in a format of fewer than 16 bits, vectors of up to 65,536 elements and other arrays of fewer than
        1,024 travel as they are beside the others: in FP32, and bfloat16 ones in BF16. PowerSGD sends what is no matrix,
        or too small for its rank, as its wire= says; random-k the same of these. Without wire= that is FP32, or BF16 where
        all arrays are bfloat16.
    """
    if _jax_codecs.is_codec(_format(spec)):
        return _compress_by_codec(spec, error_feedback, dense, name)
    _check_spec(spec)
    keeps = error_feedback and _format(spec) != "fp32"

    def init_state(params: Any) -> CompressState:
        _, leaves, structure = _arrays("compress", params)
        return CompressState(tree_unflatten(structure, [
            _no_residual(leaf, keeps and not (dense and _stays_dense(leaf, spec))) for leaf in leaves]))

    def update(updates: Any, state: CompressState, params: Any = None) -> Tuple[Any, CompressState]:
        del params
        paths, leaves, structure = _checked("compress", updates)
        residuals = check_state(state, structure, paths, leaves)
        what = f"compress at {name or _call_site()}"
        out, kept = _averaged(what, paths, leaves, spec, residuals if keeps else None, dense)
        mean = tree_unflatten(structure, out)
        return mean, CompressState(tree_unflatten(structure, kept)) if keeps else state

    return GradientTransformation(init_state, update)


def _compress_by_codec(spec: str, error_feedback: bool, dense: bool, name: str) -> GradientTransformation:
    _check_options(spec)
    with Communicator() as alone:  # for what else may be wrong with it
        Reducer(alone, spec, []).close()
    codec = _jax_codecs.read(spec)  # for shapes, which do not depend on wire=

    def chosen(leaf: Any) -> bool:
        return _jax_codecs.is_compressed(codec, leaf, dense and _stays_dense(leaf, spec))

    def first_factor(leaf: Any, index: int) -> Any:
        has_one = chosen(leaf) and codec.method == "powersgd"
        return _jax_codecs.first_factor(codec, leaf, index) if has_one else jnp.zeros(0)

    def init_state(params: Any) -> CompressState:
        _, leaves, structure = _arrays("compress", params)
        lossy = _jax_codecs.read(spec, leaves).lossy
        residuals = [_no_residual(leaf, error_feedback and (lossy or chosen(leaf))) for leaf in leaves]
        factors = [first_factor(leaf, i) for i, leaf in enumerate(leaves)]
        return CompressState(tree_unflatten(structure, residuals), tree_unflatten(structure, factors),
                             jnp.zeros((), jnp.int32))

    def update(updates: Any, state: CompressState, params: Any = None) -> Tuple[Any, CompressState]:
        del params
        paths, leaves, structure = _checked("compress", updates)
        shapes = [jax.eval_shape(functools.partial(first_factor, leaf, i)).shape
                  for i, leaf in enumerate(leaves)]
        check_state(state, structure, paths, leaves, shapes)
        if _jax_call.alone(f"gradwire.jax.compress at {name or _call_site()}"):
            return updates, state._replace(step=state.step + 1)
        what = _described(f"compress at {name or _call_site()}", paths, leaves)

        def send(arrays: Sequence[Any], residuals: Sequence[Any], wire: str, part: str) -> Any:
            return _send(arrays, residuals, wire, f"{what}, {part}")

        kept = [_jax_codecs.Leaf(leaf, residual, factor, chosen(leaf), i) for i, (leaf, residual, factor) in enumerate(
            zip(leaves, jax.tree.leaves(state.residual), jax.tree.leaves(state.factor))) if leaf.size > 0]
        out, residuals, factors = list(leaves), jax.tree.leaves(state.residual), jax.tree.leaves(state.factor)
        results = _jax_codecs.step(_jax_codecs.read(spec, leaves), kept, state.step, error_feedback, send, _jax_call.branch)
        for leaf, mean, residual, factor in zip(kept, *results):
            out[leaf.place], residuals[leaf.place], factors[leaf.place] = mean, residual, factor
        return tree_unflatten(structure, out), CompressState(
            tree_unflatten(structure, residuals), tree_unflatten(structure, factors), state.step + 1)

    return GradientTransformation(init_state, update)


# ---- Before the call: which array travels how, under which name ---------------------------------------------------


class _Part(NamedTuple):
    """Arrays that travel as one message."""

    leaves: List[int]
    spec: str
    dtype: Any
    keeps: bool
    tag: str


def _format(spec: str) -> str:
    return spec.replace(",", ":", 1).partition(":")[0]


def _check_spec(spec: str) -> None:
    _native.text(spec, "the spec")
    if _jax_codecs.is_codec(_format(spec)):
        raise _native.BadArgument(f"'{spec}' keeps state between steps, and an average cannot: use "
                                  "gradwire.jax.compress(), or a wire format such as int8")
    _check_options(spec)


def _check_options(spec: str) -> None:
    for option in spec.replace(":", ",").split(",")[1:]:
        if option.partition("=")[0] in ("ef", "residual", "dense"):
            raise _native.BadArgument(f"'{spec}': {option} is a reducer's; use compress()'s own arguments")


def _stays_dense(leaf: Any, spec: str) -> bool:
    if _format(spec) in _WIDE:
        return False
    return leaf.size <= _SMALL if leaf.ndim <= 1 else leaf.size < _SMALL_MATRIX


def _call_site() -> str:
    """Where the user's program called: "train.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_HERE):
        frame = frame.f_back
    # A file's name need not be Unicode.
    file = os.path.basename(frame.f_code.co_filename).encode(errors="replace").decode()
    return f"{file}:{frame.f_lineno}"


def _described(what: str, paths: Sequence[str], leaves: Sequence[Any]) -> str:
    """With a digest of the tree, so that ranks whose trees differ are told."""
    shapes = "; ".join(f"{path} {leaf.dtype}{list(leaf.shape)}" for path, leaf in zip(paths, leaves))
    return f"{what}, tree {zlib.crc32(shapes.encode()):08x}"


def _parts(what: str, paths: Sequence[str], leaves: Sequence[Any], spec: str, keeps: Sequence[bool],
           dense: bool) -> List[_Part]:
    """Large arrays alone, the others together by how they travel."""
    what = _described(what, paths, leaves)
    parts: List[_Part] = []
    together: Dict[Any, _Part] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size == 0:
            continue
        how = ("bf16" if str(leaf.dtype) == "bfloat16" else "fp32") if dense and _stays_dense(leaf, spec) else spec
        if leaf.size >= _SMALL:
            parts.append(_Part([i], how, leaf.dtype, keeps[i], f"{what}, {paths[i]}"))
            continue
        key = (how, str(leaf.dtype), keeps[i])
        if key not in together:
            together[key] = _Part([], how, leaf.dtype, keeps[i], f"{what}, small {leaf.dtype}")
            parts.append(together[key])
        together[key].leaves.append(i)
    return parts


def _reduce(what: str, tree: Any, spec: str, name: str) -> Any:
    _check_spec(spec)
    paths, leaves, structure = _checked(what, tree)
    out, _ = _averaged(f"{what} at {name or _call_site()}", paths, leaves, spec, None, False,
                       "sum" if what == "psum" else "avg")
    return tree_unflatten(structure, out)


def _averaged(what: str, paths: Sequence[str], leaves: List[Any], spec: str, residuals: Optional[List[Any]],
              dense: bool, op: str = "avg") -> Tuple[List[Any], List[Any]]:
    """(means, residuals); without residuals, what is rounded off is lost."""
    kept = [jnp.zeros(0)] * len(leaves) if residuals is None else residuals
    parts = _parts(what, paths, leaves, spec, [residual.size > 0 for residual in kept], dense)
    out, kept_out = list(leaves), list(kept)
    if parts:
        results = _jax_call.average(
            [{"spec": p.spec, "keeps": p.keeps, "tag": p.tag, "op": op, "dtype": DTYPES[str(p.dtype)]}
             for p in parts],
            [_join([leaves[i] for i in p.leaves]) for p in parts],
            [_join([kept[i] for i in p.leaves]) for p in parts if p.keeps])
        for part, result in zip(parts, results):
            _split(part, result, leaves, out)
        for part, result in zip([p for p in parts if p.keeps], results[len(parts):]):
            _split(part, result, kept, kept_out)
    return out, kept_out


def _arrays(what: str, tree: Any) -> Tuple[List[str], List[Any], Any]:
    """Paths, leaves and structure of a tree whose arrays can be averaged."""
    found, structure = tree_flatten_with_path(tree)
    paths, leaves = [keystr(path) for path, _ in found], []
    for path, (_, leaf) in zip(paths, found):
        own = getattr(leaf, "dtype", None)
        leaf = leaf if own is not None and str(own) not in _CAST else jnp.asarray(leaf)
        if str(leaf.dtype) not in DTYPES:
            raise TypeError(f"gradwire.jax.{what}: {path or 'the array'} is {leaf.dtype}; {', '.join(DTYPES)} "
                            "can be averaged: cast it, or leave it out")
        leaves.append(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf))
    return paths, leaves, structure


_CAST = ("float64",)  # which JAX makes float32 of, unless jax_enable_x64 is on


def _no_residual(leaf: Any, keeps: bool) -> Any:
    """Zeros. Of a scalar an array of one element, which jax.shard_map can split along its first dimension."""
    return jnp.zeros((leaf.shape or (1,)) if keeps else (0,), jnp.float32)


def _checked(what: str, tree: Any) -> Tuple[List[str], List[Any], Any]:
    """Paths, leaves and structure of a tree that can be averaged now and here."""
    if not ranks.communicators:
        raise RuntimeError(f"gradwire.jax.{what} before gradwire.jax.init(), which connects the ranks")
    if len(ranks.communicators) > 1 and not core.get_axis_env().axis_sizes:
        raise RuntimeError(f"gradwire.jax.{what} runs on every device, of which this process has "
                           f"{len(ranks.communicators)}: call it inside jax.shard_map or jax.pmap over all of them")
    paths, leaves, structure = _arrays(what, tree)
    for path, leaf in zip(paths, leaves):
        _jax_call.check_leaf(what, leaf)
        if what == "compress" and leaf.size > 0 and _jax_call.same_on_every_device(leaf):
            raise ValueError(f"gradwire.jax.compress: {path or 'the array'} is the same on every device: "
                             "jax.grad has summed it over them, uncompressed. Differentiate with respect to "
                             "parameters that vary, jax.lax.pcast(parameters, axes, to='varying') "
                             "(docs/for-jax.md, 'A global mesh')")
    return paths, leaves, structure


def _send(arrays: Sequence[Any], residuals: Sequence[Any], spec: str, tag: str) -> Tuple[List[Any], List[Any]]:
    """The FP32 means of `arrays` as one message, and what is left of the residuals, each of which is empty or has its
    array's shape."""
    if not arrays:
        return [], []
    keeps = any(r.size for r in residuals)
    part = {"spec": spec, "keeps": keeps, "tag": tag, "op": "avg", "dtype": _native.FLOAT32}
    flat = jnp.concatenate([a.astype(jnp.float32).ravel() for a in arrays])
    kept = [jnp.concatenate([r.ravel() if r.size else jnp.zeros(a.size) for r, a in zip(residuals, arrays)])] if keeps else []
    results = _jax_call.average([part], [flat], kept)
    means, lost = [], []
    begin = 0
    for array, residual in zip(arrays, residuals):
        end = begin + array.size
        means.append(results[0][begin:end].reshape(array.shape))
        lost.append(results[1][begin:end].reshape(residual.shape) if residual.size else residual)
        begin = end
    return means, lost


def _join(arrays: List[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([a.ravel() for a in arrays])


def _split(part: _Part, result: Any, leaves: List[Any], into: List[Any]) -> None:
    if len(part.leaves) == 1:
        into[part.leaves[0]] = result
        return
    begin = 0
    for i in part.leaves:
        into[i] = jax.lax.slice(result, (begin,), (begin + leaves[i].size,)).reshape(leaves[i].shape)
        begin += leaves[i].size


# ---- Joining -----------------------------------------------------------------------------------------------------


def _meeting(rank: int, timeout_s: float, stack: contextlib.ExitStack) -> Tuple[str, str]:
    """(rendezvous, secret), chosen by process 0 and handed out through jax.distributed's store. The port is reserved
    until the stack closes."""
    state = distributed.global_state
    # Counted in the store, which is new with each jax.distributed.initialize(), and for each process: one whose init() has
    # failed by itself still meets the others at their next.
    key = f"gradwire.jax/{state.client.key_value_increment(f'gradwire.jax/of {rank}', 1)}"
    if rank == 0:
        host = (state.coordinator_address or "").rpartition(":")[0] or socket.gethostname()
        state.client.key_value_set(key, f"tcp://{host}:{reserve_port(stack)} {secrets.token_hex(16)}")
    rendezvous, secret = state.client.blocking_key_value_get(key, int(min(timeout_s, 1e6) * 1000)).split()
    return rendezvous, secret
