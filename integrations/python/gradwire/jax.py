"""Compressed averages over ranks inside jax.jit, and as an optax transformation.

    import gradwire.jax
    gradwire.jax.init()                                       # after jax.distributed.initialize()
    optimizer = optax.chain(gradwire.jax.compress("int8"), optax.adam(1e-3))

Each device is a rank, in the order of processes and of their local devices. docs/for-jax.md is the guide.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import os
import secrets
import socket
import sys
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, distributed  # the axes of a trace and jax.distributed's store have no public names
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure, tree_unflatten

from gradwire import _jax_call, _jax_ffi, _native
from gradwire._communicator import Communicator
from gradwire._jax_ffi import DTYPES, ranks
from gradwire._port import reserve_port
from gradwire._reducer import Reducer, orthonormalize
from gradwire._spec import info_of, matrix, method_of, split, stays_dense, with_options

# ---- The state of compress() -------------------------------------------------------------------------------


class CompressState(NamedTuple):
    """The state of compress().

    Attributes:
        residual: for each array that `spec` rounds, the part that this rank has not sent yet: FP32, of the
            array's shape, (1,) for a scalar. For other arrays an empty array. Residuals differ between ranks:
            save every rank's residuals.
        factor: PowerSGD's factor of each matrix, with orthonormal columns, the same on every rank: (cols,
            rank), with alternate=on (cols + rows, rank). () for wire formats.
        step: the number of steps done. () for wire formats.
    """

    residual: Any
    factor: Any = ()
    step: Any = ()


def _in_states(change: Callable[[CompressState], Any], other: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `change` to each CompressState of a tree and `other` to the other leaves."""
    def applied(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, CompressState) else other(leaf)

    return jax.tree.map(applied, tree, is_leaf=lambda leaf: isinstance(leaf, CompressState))


def partition_specs(state: Any, axes: Union[str, Sequence[str]]) -> Any:
    """Returns the in_specs and out_specs of an optimizer's state for jax.shard_map.

    Args:
        state: the state, or its shapes (from jax.eval_shape), of an optimizer that contains compress().
        axes: all mesh axes.

    Returns:
        The same tree with a PartitionSpec for each array. Residuals differ between ranks and are split along
        their first dimension. Other arrays are replicated.
    """
    split = PartitionSpec(axes if isinstance(axes, str) else tuple(axes))

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda _: PartitionSpec(), tree)

    return _in_states(lambda own: CompressState(jax.tree.map(lambda _: split, own.residual),
                                                everywhere(own.factor), everywhere(own.step)),
                      everywhere, state)


def rescale(state: Any, factor: Any) -> Any:
    """Multiplies residuals by `factor`. Call it whenever the scale of the gradients changes.

    Args:
        state: the state of an optimizer that contains compress().
        factor: the new scale divided by the old scale; a number or a scalar array.

    Returns:
        The state with new residuals.
    """
    def scaled(own: CompressState) -> CompressState:
        return own._replace(residual=jax.tree.map(lambda r: r * jnp.asarray(factor, r.dtype), own.residual))

    return _in_states(scaled, lambda leaf: leaf, state)


OTHER_STRUCTURE = ("gradwire.jax.compress: the updates have another structure than the parameters of init(): "
                   "call init() with parameters of the updates' structure")


def check_state(state: CompressState, structure: Any, paths: Sequence[str], leaves: Sequence[Any],
                factor_shapes: Sequence[Tuple[int, ...]] = ()) -> List[Any]:
    """Validates a state against the arrays of a tree.

    The library reads and writes as many residuals as an array has elements.

    Args:
        state: the state.
        structure, paths, leaves: the structure, paths and leaves of the tree.
        factor_shapes: the expected shapes of factors.

    Returns:
        The residuals.

    Raises:
        ValueError: the state is of other parameters, or of another part of a mesh.
    """
    if structure != tree_structure(state.residual):
        raise ValueError(OTHER_STRUCTURE)
    residuals = jax.tree.leaves(state.residual)
    for path, leaf, residual in zip(paths, leaves, residuals):
        if residual.size not in (0, leaf.size):
            raise ValueError(f"gradwire.jax.compress: the residual of {path or 'the array'} is "
                             f"{list(residual.shape)}, but its update is {list(leaf.shape)}: the state is of "
                             "other parameters. Under jax.shard_map, also call init() inside of it, with "
                             "partition_specs() as its out_specs")
    for path, factor, shape in zip(paths, jax.tree.leaves(state.factor), factor_shapes):
        if tuple(factor.shape) != shape:
            raise ValueError(f"gradwire.jax.compress: the factor of {path or 'the array'} is "
                             f"{list(factor.shape)}, but its update needs {list(shape)}: the state is of "
                             "other parameters, or of another spec")
    return residuals


TIMEOUT_S = 1800.0
# Leaves of fewer elements are copied into one message. A message costs at least as much as this number of
# bytes.
_SMALL = 1 << 16
_CODECS = ("powersgd", "randk")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def init(rendezvous: Optional[str] = None, rank: int = 0, world: int = 1, *, secret: str = "",
         timeout_s: Union[float, datetime.timedelta] = TIMEOUT_S) -> None:
    """Connects the ranks. Collective over the processes; blocks until all have joined.

    Call it once. With several processes, call it after jax.distributed.initialize().

    Args:
        rendezvous, secret: see gradwire.Communicator; for processes without jax.distributed. None: the
            processes of jax.distributed, which exchange an address and a secret through its store; without
            jax.distributed, this process's devices.
        rank, world: this process, and the number of processes. All processes have the same number of local
            devices.
        timeout_s: the longest wait for a peer, in init() and in every later call: seconds or a timedelta,
            infinity for no limit.

    Raises:
        BadArgument: a number is out of range.
        CommFailed: a process did not join within timeout_s.
        RuntimeError: init() was called before.
    """
    limit_s = _native.seconds(timeout_s)
    rank, world = _native.integer(rank, "rank"), _native.integer(world, "world")
    ranks.forget_parents()
    if ranks.communicators:
        raise RuntimeError("gradwire.jax.init() was called before: call gradwire.jax.shutdown() first")
    devices = jax.local_devices()
    on_gpus = devices[0].platform in ("gpu", "cuda")
    if not on_gpus and devices[0].platform != "cpu":
        raise _native.Unsupported("gradwire.jax supports JAX's CPU and CUDA devices, not "
                                  f"{devices[0].platform}")
    with contextlib.ExitStack() as stack:
        if rendezvous is None and jax.process_count() > 1:
            rank, world = jax.process_index(), jax.process_count()
            rendezvous, secret = _rendezvous(rank, limit_s, stack)
        elif rendezvous is None and world == 1:
            rendezvous = f"local://gradwire.jax {secrets.token_hex(8)}"
        elif rendezvous is None:
            raise _native.BadArgument(f"world={world} without a rendezvous: pass one, or call "
                                      "jax.distributed.initialize() first")
        count = world * len(devices)
        first = rank * len(devices)
        with concurrent.futures.ThreadPoolExecutor(len(devices)) as threads:  # each waits for all ranks
            made = list(threads.map(lambda i: Communicator(
                rendezvous if count > 1 else None, first + i, count, timeout_s=limit_s, secret=secret,
                device=devices[i].local_hardware_id if on_gpus else "host"), range(len(devices))))
    numbers = [device.local_hardware_id if on_gpus else device.id for device in devices]
    ranks.set(dict(zip(numbers, made)), count)
    _jax_ffi.register_average()


def shutdown() -> None:
    """Leaves the group after computations in flight. init() may be called again."""
    ranks.set({}, 0)


def world_size() -> int:
    """Returns the number of ranks: the devices of all processes. 0 before init()."""
    return ranks.world


def pmean(tree: Any, spec: str = "fp32", *, name: str = "") -> Any:
    """Averages each array of `tree` over all ranks, inside or outside of jax.jit. Collective.

    Makes one call into the library per tree. Calls of one traced function are chained, so that XLA runs them
    in program order on every rank. Calls of different functions that ranks run in different orders fail with
    an error that names them. Cannot be differentiated or vmapped: average gradients after jax.grad, outside
    of jax.vmap.

    Args:
        tree: float32, bfloat16 and float16 arrays, of the same structure, shapes and types on every rank.
        spec: a wire format of docs/formats.md with its options, such as "int8" or "bf16:schedule=ring". There
            is no error feedback; compress() has it.
        name: names the call in errors. By default the call's file and line.

    Returns:
        The tree of means, the same bits on every rank.

    Raises:
        BadArgument: the spec is invalid.
        TypeError: an array's type is not supported.
        JaxRuntimeError: from the computation: a peer died or timed out, or the ranks' trees differ.
    """
    return _reduce("pmean", tree, spec, name)


def psum(tree: Any, spec: str = "fp32", *, name: str = "") -> Any:
    """Sums each array of `tree` over all ranks; otherwise like pmean()."""
    return _reduce("psum", tree, spec, name)


class GradientTransformation(NamedTuple):
    """Has the interface of optax.GradientTransformation."""

    init: Callable[[Any], CompressState]
    update: Callable[..., Tuple[Any, CompressState]]


def compress(spec: str, *, error_feedback: bool = True, dense: bool = True,
             name: str = "") -> GradientTransformation:
    """Returns an optax transformation that averages updates over all ranks, with error feedback.

    A rank adds its rounding errors to the next step's update. Place it first in optax.chain(). An array whose
    update is zero on every rank gets a mean of what its residual sends: apply it, because values that a later
    transformation throws away are lost (docs/for-jax.md, 'Unused and frozen arrays').

    Args:
        spec: a wire format of docs/formats.md, or "powersgd:rank=4" or "randk:ratio=0.01", with options.
        error_feedback: False: rounding errors are lost, and there are no residuals.
        dense: True: in formats of fewer than 16 bits, vectors of up to 65,536 elements and other arrays of
            fewer than 1,024 elements are not compressed: they are sent in FP32, bfloat16 arrays in BF16.
            random-k and, if wire= has fewer than 8 bits, PowerSGD send these arrays in FP32. PowerSGD sends
            other arrays that it does not compress in its wire= format, by default FP32, or BF16 if all arrays
            are bfloat16.
        name: names the calls in errors. By default the call's file and line.
    """
    if method_of(spec) in _CODECS:
        return _compress_by_codec(spec, error_feedback, dense, name)
    _check_spec(spec)
    keeps = error_feedback and method_of(spec) != "fp32"

    def init_state(params: Any) -> CompressState:
        _, leaves, structure = _arrays("compress", params)
        return CompressState(tree_unflatten(structure, [
            _no_residual(leaf, keeps and not (dense and stays_dense(leaf.shape, spec))) for leaf in leaves]))

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
    method, options = split(spec)

    def full(leaves: Sequence[Any]) -> str:
        """Returns the reducer's spec."""
        own = [] if error_feedback else ["ef=off"]
        if not dense or method == "randk":
            own.append("dense=auto" if dense else "dense=off")
        if (leaves and all(str(leaf.dtype) == "bfloat16" for leaf in leaves)
                and not any(option.startswith("wire=") for option in options)):
            own.append("wire=bf16")
        return with_options(spec, *own)

    with Communicator() as alone:  # the library checks the spec
        Reducer(alone, full([]), []).close()

    def kept(leaves: Sequence[Any]) -> List[Tuple[bool, int, int]]:
        """Returns for each array whether it has a residual, and the rows and columns of its factor, or 0."""
        found, reducer_spec = [], full(leaves)
        for leaf in leaves:
            info, (rows, cols) = info_of(reducer_spec, leaf.shape), matrix(leaf.shape)
            sent_dense = dense and info.small and (method == "randk" or info.bits < 8)
            rank = 0 if sent_dense else info.rank
            lossy = not sent_dense and (rank > 0 or method == "randk" or not info.exact)
            found.append((error_feedback and lossy and leaf.size > 0,
                          (cols + rows if info.alternate else cols) if rank else 0, rank))
        return found

    def init_state(params: Any) -> CompressState:
        _, leaves, structure = _arrays("compress", params)
        numbers = {i: number for number, i in enumerate(i for i, leaf in enumerate(leaves) if leaf.size > 0)}
        has, seed = kept(leaves), info_of(full(leaves)).seed
        residuals = [_no_residual(leaf, keeps) for leaf, (keeps, _, _) in zip(leaves, has)]
        factors = [_first_factor(leaf, numbers[i], rows, rank, seed) if rank else jnp.zeros(0, jnp.float32)
                   for i, (leaf, (_, rows, rank)) in enumerate(zip(leaves, has))]
        return CompressState(tree_unflatten(structure, residuals), tree_unflatten(structure, factors),
                             jnp.zeros((), jnp.int32))

    def update(updates: Any, state: CompressState, params: Any = None) -> Tuple[Any, CompressState]:
        del params
        paths, leaves, structure = _checked("compress", updates)
        residuals = check_state(state, structure, paths, leaves,
                                [(rows, rank) if rank else (0,) for _, rows, rank in kept(leaves)])
        factors, out = jax.tree.leaves(state.factor), list(leaves)
        some = [i for i, leaf in enumerate(leaves) if leaf.size > 0]
        if some:
            means, new_residuals, new_factors = _jax_call.apply(
                full(leaves), _described(f"compress at {name or _call_site()}", paths, leaves), state.step,
                [leaves[i].astype(jnp.float32) for i in some], [residuals[i] for i in some],
                [factors[i] for i in some])
            for i, mean, residual, factor in zip(some, means, new_residuals, new_factors):
                out[i], residuals[i], factors[i] = mean.astype(leaves[i].dtype), residual, factor
        return tree_unflatten(structure, out), CompressState(
            tree_unflatten(structure, residuals), tree_unflatten(structure, factors), state.step + 1)

    return GradientTransformation(init_state, update)


def _first_factor(leaf: Any, number: int, rows: int, rank: int, seed: int) -> Any:
    """Returns the library's first Q of an array, with alternate=on followed by P."""
    factor: Any = np.zeros((rows, rank), np.float32)
    flags: Any = np.zeros(1, np.int32)
    cols = matrix(leaf.shape)[1]
    with Communicator() as alone:
        for second, part in ((True, factor[:cols]), (False, factor[cols:])):
            if part.size > 0:
                drawn = np.zeros(part.shape, np.float32)
                orthonormalize(alone, drawn.ctypes.data, [(len(drawn), rank, number)], second, seed, 0,
                               flags.ctypes.data)
                part[:] = drawn
    return jnp.asarray(factor)


# ---- Before the call: the messages, their formats and names ------------------------------------------------


class _Part(NamedTuple):
    """Arrays that are sent in one message."""

    leaves: List[int]
    spec: str
    dtype: Any
    keeps: bool
    tag: str


def _check_spec(spec: str) -> None:
    _native.text(spec, "the spec")
    if method_of(spec) in _CODECS:
        raise _native.BadArgument(f"'{spec}' keeps state between steps, but an average has none: use "
                                  "gradwire.jax.compress(), or a wire format such as int8")
    _check_options(spec)


def _check_options(spec: str) -> None:
    for option in split(spec)[1]:
        key = option.partition("=")[0]
        if key in ("ef", "residual", "dense"):
            raise _native.BadArgument(f"'{spec}' has the option {option}, which only a Reducer supports: use "
                                      "compress()'s own arguments error_feedback and dense")
        steps = key in ("ef_decay", "ramp", "momentum", "max_norm")
        if steps or (key == "start" and method_of(spec) != "powersgd"):
            raise _native.BadArgument(f"'{spec}' has the option {option}, which only a Reducer supports: use "
                                      "the DDP hook or a Reducer, or drop it")


def _call_site() -> str:
    """Returns the file and line of the user's call: "train.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_HERE):
        frame = frame.f_back
    # A file name is not always Unicode.
    file = os.path.basename(frame.f_code.co_filename).encode(errors="replace").decode()
    return f"{file}:{frame.f_lineno}"


def _described(what: str, paths: Sequence[str], leaves: Sequence[Any]) -> str:
    """Returns `what` with a digest of the tree, so that ranks with different trees get an error."""
    shapes = "; ".join(f"{path} {leaf.dtype}{list(leaf.shape)}" for path, leaf in zip(paths, leaves))
    return f"{what}, tree {zlib.crc32(shapes.encode()):08x}"


def _parts(what: str, paths: Sequence[str], leaves: Sequence[Any], spec: str, keeps: Sequence[bool],
           dense: bool) -> List[_Part]:
    """Divides arrays into messages: one message per large array or kind of small arrays."""
    what = _described(what, paths, leaves)
    parts: List[_Part] = []
    together: Dict[Any, _Part] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size == 0:
            continue
        how = (("bf16" if str(leaf.dtype) == "bfloat16" else "fp32")
               if dense and stays_dense(leaf.shape, spec) else spec)
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
    """Averages leaves. Returns (means, residuals). Uses no error feedback if `residuals` is None."""
    kept = [jnp.zeros(0, jnp.float32)] * len(leaves) if residuals is None else residuals
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
    """Returns paths, leaves and structure of a tree. Raises TypeError if an array's type is not supported."""
    found, structure = tree_flatten_with_path(tree)
    paths, leaves = [keystr(path) for path, _ in found], []
    for path, (_, leaf) in zip(paths, found):
        own = getattr(leaf, "dtype", None)
        leaf = leaf if own is not None and str(own) not in _CAST else jnp.asarray(leaf)
        if str(leaf.dtype) not in DTYPES:
            raise TypeError(f"gradwire.jax.{what}: {path or 'the array'} is {leaf.dtype}; expected one of "
                            f"{', '.join(DTYPES)}: cast it, or leave it out")
        leaves.append(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf))
    return paths, leaves, structure


_CAST = ("float64",)  # JAX converts to float32 unless jax_enable_x64 is on


def _no_residual(leaf: Any, keeps: bool) -> Any:
    """Returns zeros. A scalar's residual has shape (1,), so that jax.shard_map can split it."""
    return jnp.zeros((leaf.shape or (1,)) if keeps else (0,), jnp.float32)


def _checked(what: str, tree: Any) -> Tuple[List[str], List[Any], Any]:
    """Returns paths, leaves and structure of a tree. Raises if the current trace cannot average it."""
    if not ranks.communicators:
        raise RuntimeError(f"gradwire.jax.{what} was called without ranks: call gradwire.jax.init() first")
    if len(ranks.communicators) > 1 and not core.get_axis_env().axis_sizes:
        raise RuntimeError(f"gradwire.jax.{what} must run on all {len(ranks.communicators)} devices of this "
                           "process: call it inside jax.shard_map or jax.pmap over all of them")
    paths, leaves, structure = _arrays(what, tree)
    for path, leaf in zip(paths, leaves):
        _jax_call.check_leaf(what, leaf)
        if what == "compress" and leaf.size > 0 and _jax_call.same_on_every_device(leaf):
            raise ValueError(f"gradwire.jax.compress: {path or 'the array'} is the same on every device, "
                             "because jax.grad has summed it over the devices, uncompressed. Differentiate "
                             "with respect to varying parameters: jax.lax.pcast(parameters, axes, "
                             "to='varying') (docs/for-jax.md, 'A global mesh')")
    return paths, leaves, structure


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


# ---- Joining -----------------------------------------------------------------------------------------------


def _rendezvous(rank: int, timeout_s: float, stack: contextlib.ExitStack) -> Tuple[str, str]:
    """Returns (rendezvous, secret). Process 0 chooses them and publishes them in jax.distributed's store.

    The port is reserved until the stack closes.
    """
    state = distributed.global_state
    # Each process counts its init() calls in the store: after an init() that failed on one process only, the
    # next init() of all processes still matches. Each jax.distributed.initialize() creates a new store.
    key = f"gradwire.jax/{state.client.key_value_increment(f'gradwire.jax/of {rank}', 1)}"
    if rank == 0:
        host = (state.coordinator_address or "").rpartition(":")[0] or socket.gethostname()
        state.client.key_value_set(key, f"tcp://{host}:{reserve_port(stack)} {secrets.token_hex(16)}")
    rendezvous, secret = state.client.blocking_key_value_get(key, int(min(timeout_s, 1e6) * 1000)).split()
    return rendezvous, secret
