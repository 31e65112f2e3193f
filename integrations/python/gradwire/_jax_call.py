"""The custom call of gradwire.jax during tracing: where it is allowed, and its order within a program.

Properties of the ranks are read when a program runs (_jax_ffi.py), not while it is traced: a program may
outlive init().
"""
from __future__ import annotations

import json
import math
import threading
import weakref
from typing import Any, Dict, FrozenSet, List, Sequence, Tuple

import jax
import jax.numpy as jnp
from jax._src import core, effects  # the current trace, and effects of a primitive, have no public names
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gradwire._jax_ffi import TARGET, check_mapped, ranks
from gradwire._spec import matrix

_NOT_MAPPED = ("jax.jit shards the program automatically over {} devices, but each device is a rank: call "
               "gradwire.jax inside jax.shard_map over the whole mesh (docs/for-jax.md, 'A global mesh')")

# ---- Where a call is allowed -------------------------------------------------------------------------------


def manual_axes() -> Tuple[str, ...]:
    """Returns the mesh axes over which jax.shard_map or jax.pmap maps the current trace."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _mapped_devices() -> int:
    """Returns the number of devices over which jax.shard_map or jax.pmap maps the trace; 0: not mapped."""
    axes = manual_axes()
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes) if axes else 0


def _varying_axes(x: Any) -> FrozenSet[str]:
    aval = jax.typeof(x)
    mat = getattr(aval, "mat", None)  # JAX 0.10; `vma` in older versions
    return frozenset(mat.varying if mat is not None else getattr(aval, "vma", ()))


def varying(x: Any) -> Any:
    """Marks x as different on each device, for jax.shard_map."""
    missing = tuple(axis for axis in manual_axes() if axis not in _varying_axes(x))
    if not missing:
        return x
    return (jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast")
            else jax.lax.pvary(x, missing))


def same_on_every_device(x: Any) -> bool:
    """Returns whether jax.shard_map has proved that x is the same on every device.

    Returns False if jax.shard_map does not check this property.
    """
    axes = manual_axes()
    return bool(axes) and not _varying_axes(x) and bool(_varying_axes(jax.lax.axis_index(axes[0])))


def _sharded(mesh: Any, mapped: Any) -> int:
    """Returns the number of devices over the axes of a mesh that are not mapped."""
    return math.prod(size for axis, size in mesh.shape.items() if axis not in mapped)


def check_leaf(what: str, leaf: Any) -> None:
    """Raises RuntimeError if XLA would shard the call's arrays, as far as tracing can tell."""
    mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
    devices = 1 if mesh is None or mesh.empty else _sharded(mesh, mesh.manual_axes)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        devices = max(devices, len(leaf.sharding.device_set))
    if devices > 1:
        raise RuntimeError(f"gradwire.jax.{what}: " + _NOT_MAPPED.format(devices))


def _check_program(context: Any, *_: Any) -> List[Any]:
    """Lowers _checked_p. Raises RuntimeError if XLA would shard the program."""
    axis_context = context.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    devices = (getattr(axis_context, "num_devices", 1) if mesh is None
               else _sharded(mesh, axis_context.manual_axes))
    if devices > 1:
        raise RuntimeError(_NOT_MAPPED.format(devices))
    if mesh is not None and ranks.communicators:
        check_mapped(mesh.size)
    return []


class _Effect(effects.Effect):
    """Keeps an equation without results in its program."""


for _allowed in (effects.lowerable_effects, effects.control_flow_allowed_effects,
                 effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects):
    _allowed.add_type(_Effect)
# A primitive that takes a call's token and returns nothing. It checks the program in lowering, and keeps the
# token alive while tracing.
_checked_p = Primitive("gradwire_checked")
_checked_p.multiple_results = True
_checked_p.def_effectful_abstract_eval(lambda *_: ([], {_Effect()}))
mlir.register_lowering(_checked_p, _check_program)

# ---- Order: each call takes the previous call's token ------------------------------------------------------


class _Last(threading.local):
    """The token of this thread's last call. The reference to a tracer is weak: traces end before threads."""

    token: Any = None
    generation = 0


_last = _Last()


def _remember(token: Any) -> None:
    if isinstance(token, jax.core.Tracer):
        token = weakref.ref(token)
    _last.token, _last.generation = token, ranks.generation


def _token() -> Any:
    """Returns the last call's token if it belongs to the current trace, otherwise a new token."""
    last = _last.token() if isinstance(_last.token, weakref.ref) else _last.token
    current = core.trace_ctx.trace
    if isinstance(last, jax.core.Tracer):
        if last._trace is current:
            return last
    # An array from before init() or shutdown() may hold its computation's error.
    elif last is not None and isinstance(current, core.EvalTrace) and _last.generation == ranks.generation:
        return last
    return jnp.zeros((), jnp.uint32)


def _call(parts: Sequence[Dict[str, Any]], operands: List[Any]) -> List[Any]:
    """Makes one custom call, in place. Returns the operands' new values.

    The first operand and result is a token. XLA may run custom calls in any order that their operands allow,
    so each call of a traced function takes the previous call's token.
    """
    # The first part has the number of mapped devices: the program may outlive this world.
    plan = json.dumps([{**parts[0], "devices": _mapped_devices()}, *parts[1:]])

    def custom_call(*operands: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        with jax.named_scope("gradwire"):
            in_place = {i: i for i in range(len(operands))}
            return jax.ffi.ffi_call(TARGET, shapes, has_side_effect=True,
                                    input_output_aliases=in_place)(*operands, plan=plan)

    # jax.custom_jvp and custom_vmap only improve the error messages.
    call = jax.custom_jvp(custom_call)

    @call.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        raise TypeError("gradwire.jax cannot be differentiated: average the gradients after jax.grad")

    batched = custom_vmap(call)

    @batched.def_vmap
    def _vmap(axis_size: int, in_batched: Any, *operands: Any) -> Any:
        raise TypeError("gradwire.jax cannot be vmapped: call it outside of jax.vmap")

    token, *results = batched(*map(varying, (_token(), *operands)))
    if isinstance(token, jax.core.Tracer):
        _checked_p.bind(token)
    _remember(token)
    return list(results)


def average(parts: Sequence[Dict[str, Any]], arrays: List[Any], residuals: List[Any]) -> List[Any]:
    """Averages arrays in one custom call.

    Args:
        parts: for each array "spec", "keeps" (whether it has a residual), "tag", "op" and "dtype".
        arrays: the arrays to average.
        residuals: the residuals of the parts that have one.

    Returns:
        The means, then the new residuals.
    """
    results = _call(parts, [*arrays, *residuals])
    means = len(arrays)
    return results[:means] + [varying(residual) for residual in results[means:]]


def apply(spec: str, tag: str, step: Any, arrays: List[Any], residuals: List[Any],
          factors: List[Any]) -> Tuple[List[Any], List[Any], List[Any]]:
    """Runs a step of a reducer in one custom call.

    Args:
        spec: the reducer's spec.
        step: the number of earlier steps, an int32.
        arrays: float32.
        residuals, factors: for each array; of size 0 if it has none.

    Returns:
        (means, residuals, factors).
    """
    tensors = [[*matrix(a.shape), r.size > 0, f.size > 0] for a, r, f in zip(arrays, residuals, factors)]
    states = [x for x in (*residuals, *factors) if x.size > 0]
    results = iter(_call([{"spec": spec, "tag": tag, "tensors": tensors}], [step, *arrays, *states])[1:])
    means = [next(results) for _ in arrays]
    kept = [varying(next(results)) if r.size > 0 else r for r in residuals]
    return means, kept, [next(results) if f.size > 0 else f for f in factors]
