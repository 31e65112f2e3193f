"""The state of gradwire.jax.compress(): its mapping over devices, rescaling, and checks."""
from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import tree_structure


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
