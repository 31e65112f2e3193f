"""The custom call of gradwire.jax while it is traced: where it may stand, and its order within a program.

What depends on the ranks is read when a program runs (_jax_run.py), not while it is traced: a program may outlive init().
"""
from __future__ import annotations

import json
import math
import threading
import weakref
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
from jax._src import core, effects  # the current trace, and effects of a primitive, have no public names
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gradwire._jax_run import TARGET, check_mapped, ranks

_NOT_MAPPED = ("jax.jit shards the program over {} devices by itself, and a rank is a device: call gradwire.jax "
               "inside jax.shard_map over the whole mesh (docs/for-jax.md, 'A global mesh')")

# ---- Where a call may stand ----------------------------------------------------------------------


def manual_axes() -> Tuple[str, ...]:
    """The mesh axes over which the current trace is mapped, by jax.shard_map or jax.pmap."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def _mapped_devices() -> int:
    """Over how many devices jax.shard_map or jax.pmap maps the current trace; 0 where nothing does."""
    axes = manual_axes()
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes) if axes else 0


def _varying_axes(x: Any) -> FrozenSet[str]:
    aval = jax.typeof(x)
    mat = getattr(aval, "mat", None)  # JAX 0.10; `vma` before
    return frozenset(mat.varying if mat is not None else getattr(aval, "vma", ()))


def varying(x: Any) -> Any:
    """Tells jax.shard_map that x differs from device to device."""
    missing = tuple(axis for axis in manual_axes() if axis not in _varying_axes(x))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def same_on_every_device(x: Any) -> bool:
    """Whether jax.shard_map has proved that x is the same on every device. False where it does not check."""
    axes = manual_axes()
    return bool(axes) and not _varying_axes(x) and bool(_varying_axes(jax.lax.axis_index(axes[0])))


def check_leaf(what: str, leaf: Any) -> None:
    """Raises where XLA would shard the arrays of the call, as far as it is known while tracing."""
    mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
    devices = 1
    if mesh is not None and not mesh.empty:
        for name, size in mesh.shape.items():
            devices *= 1 if name in mesh.manual_axes else size
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        devices = max(devices, len(leaf.sharding.device_set))
    if devices > 1:
        raise RuntimeError(f"gradwire.jax.{what}: " + _NOT_MAPPED.format(devices))


def _check_program(context: Any, *_: Any) -> List[Any]:
    """The lowering rule of _checked_p: raises where XLA would shard the program."""
    axis_context = context.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    devices = getattr(axis_context, "num_devices", 1)
    if mesh is not None:
        devices = 1
        for name, size in mesh.shape.items():
            devices *= 1 if name in axis_context.manual_axes else size
    if devices > 1:
        raise RuntimeError(_NOT_MAPPED.format(devices))
    if mesh is not None and ranks.communicators:
        check_mapped(mesh.size)
    return []


class _Effect(effects.Effect):
    """Keeps an equation without results in its program."""


for _allowed in (effects.lowerable_effects, effects.control_flow_allowed_effects, effects.remat_allowed_effects,
                 effects.custom_derivatives_allowed_effects):
    _allowed.add_type(_Effect)
# Takes a call's token and returns nothing. Checks the program when it is lowered; keeps the token while it is traced.
_checked_p = Primitive("gradwire_checked")
_checked_p.multiple_results = True
_checked_p.def_effectful_abstract_eval(lambda *_: ([], {_Effect()}))
mlir.register_lowering(_checked_p, _check_program)

# ---- Order: each call takes the token of the one before it ---------------------------------------


class _Last(threading.local):
    """The token of this thread's last call. Refers weakly to a tracer, whose trace ends before this thread."""

    token: Any = None
    generation = 0


_last = _Last()


def _remember(token: Any) -> None:
    if isinstance(token, jax.core.Tracer):
        token = weakref.ref(token)
    _last.token, _last.generation = token, ranks.generation


def _token() -> Any:
    """The last call's token, if it belongs to the function that is being traced."""
    last = _last.token() if isinstance(_last.token, weakref.ref) else _last.token
    current = core.trace_ctx.trace
    if isinstance(last, jax.core.Tracer):
        if last._trace is current:
            return last
    # An array of before init() or shutdown() may hold the error that its computation ended with.
    elif last is not None and isinstance(current, core.EvalTrace) and _last.generation == ranks.generation:
        return last
    return jnp.zeros((), jnp.uint32)


def average(parts: Sequence[Dict[str, Any]], arrays: List[Any], residuals: List[Any]) -> List[Any]:
    """One custom call, in place. Its first operand and result is a token: XLA is free to run custom calls in any
    order that their operands allow, so each call of a traced function takes the token of the one before it.

    Args:
        parts: for each array "spec", "keeps" (whether it has a residual), "tag", "op" and "dtype"; or one part
            with "alone": no arrays, and the call fails in a world of more than 1.
        arrays: what is averaged.
        residuals: of the parts that keep one.

    Returns:
        The means, then what is left of the residuals.
    """
    # The first part of the call says over how many devices it is mapped: the program may outlive this world.
    plan = json.dumps([{**parts[0], "devices": _mapped_devices()}, *parts[1:]])

    def custom_call(*operands: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        with jax.named_scope("gradwire"):
            in_place = {i: i for i in range(len(operands))}
            return jax.ffi.ffi_call(TARGET, shapes, has_side_effect=True,
                                    input_output_aliases=in_place)(*operands, plan=plan)

    # jax.custom_jvp and custom_vmap only to say what is wrong in the user's terms.
    call = jax.custom_jvp(custom_call)

    @call.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        raise TypeError("gradwire.jax cannot be differentiated: average the gradients, after jax.grad")

    batched = custom_vmap(call)

    @batched.def_vmap
    def _vmap(axis_size: int, in_batched: Any, *operands: Any) -> Any:
        raise TypeError("gradwire.jax cannot be vmapped: average outside of jax.vmap")

    token, *results = batched(*map(varying, (_token(), *arrays, *residuals)))
    if isinstance(token, jax.core.Tracer):
        _checked_p.bind(token)
    _remember(token)
    means = len(arrays)
    return results[:means] + [varying(residual) for residual in results[means:]]


def branch(predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """lax.cond with calls in its branches, which keep their place among those before and after it."""
    def chained(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(token: Any, *operands: Any) -> Any:
            _remember(token)
            out = body(*operands)
            return _token(), out
        return run

    token, out = jax.lax.cond(predicate, chained(yes), chained(no), _token(), *operands)
    if isinstance(token, jax.core.Tracer):
        _checked_p.bind(token)
    _remember(token)
    return out


def alone(what: str) -> bool:
    """Whether a codec that is being traced is alone, in a world of 1, where it leaves everything as it is. Such a program
    fails in another world; init() has it traced again."""
    ranks.traced_alone = ranks.world == 1
    if ranks.traced_alone:
        average([{"alone": what}], [], [])
    return ranks.traced_alone
