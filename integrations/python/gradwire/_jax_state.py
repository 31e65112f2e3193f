"""The state of gradwire.jax.compress(), and what a training loop does with it beyond carrying it along."""
from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Sequence, Tuple, Union

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_structure


class CompressState(NamedTuple):
    """The state of compress().

    Attributes:
        residual: of each array that `spec` rounds, what this rank has not sent yet: FP32, of its shape, (1,) for a
            scalar. Of others an empty array. Differs from rank to rank: checkpoint each rank's.
        factor: PowerSGD's factor of each matrix, with orthonormal columns, the same on every rank: (cols, rank),
            and with alternate=on (cols + rows, rank). () for wire formats.
        step: the number of steps so far. () for wire formats.
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
    """The in_specs and out_specs of an optimizer's state for jax.shard_map.

    Args:
        state: the state, or its shapes (from jax.eval_shape), of an optimizer with compress() anywhere in it.
        axes: the mesh axes over which the ranks are spread: all of them.

    Returns:
        The same tree with a PartitionSpec for each array: residuals are split along their first dimension,
        because they differ from rank to rank; everything else is the same on every rank.
    """
    split = PartitionSpec(axes if isinstance(axes, str) else tuple(axes))

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda _: PartitionSpec(), tree)

    return _in_states(lambda own: CompressState(jax.tree.map(lambda _: split, own.residual),
                                                everywhere(own.factor), everywhere(own.step)),
                      everywhere, state)


def rescale(state: Any, factor: Any) -> Any:
    """Brings residuals to a new loss scale. Call it whenever the scale of the gradients changes.

    Args:
        state: the state of an optimizer with compress() anywhere in it.
        factor: the new scale divided by the old one; a number or a scalar array.

    Returns:
        The same tree, in which every residual is multiplied by `factor`.
    """
    return _in_states(lambda own: own._replace(residual=jax.tree.map(lambda r: (r * factor).astype(r.dtype),
                                                                     own.residual)), lambda leaf: leaf, state)


OTHER_STRUCTURE = ("gradwire.jax.compress: the updates have another structure than the parameters that "
                   "init() saw")


def check_state(state: CompressState, structure: Any, paths: Sequence[str], leaves: Sequence[Any],
                factor_shapes: Sequence[Tuple[int, ...]] = ()) -> List[Any]:
    """The residuals of a tree, which must fit its arrays: the library reads and writes as many elements.

    Raises:
        ValueError: they are of other parameters, or of another part of a mesh.
    """
    if structure != tree_structure(state.residual):
        raise ValueError(OTHER_STRUCTURE)
    residuals = jax.tree.leaves(state.residual)
    for path, leaf, residual in zip(paths, leaves, residuals):
        if residual.size not in (0, leaf.size):
            raise ValueError(f"gradwire.jax.compress: the residual of {path or 'the array'} is "
                             f"{list(residual.shape)}, its update {list(leaf.shape)}: the state is of other "
                             "parameters. Under jax.shard_map, call init() inside of it too, with "
                             "partition_specs() as its out_specs")
    for path, factor, shape in zip(paths, jax.tree.leaves(state.factor), factor_shapes):
        if tuple(factor.shape) != shape:
            raise ValueError(f"gradwire.jax.compress: the factor of {path or 'the array'} is "
                             f"{list(factor.shape)}, and its update takes {list(shape)}: the state is of other "
                             "parameters, or of another spec")
    return residuals
