"""distribute: make an optimizer of optax's form use all ranks' gradients."""

from typing import Any, NamedTuple

import jax
import numpy as np

from multiring._frontend.compression_names import Compression, wire_of
from multiring._frontend.former_arguments import former_arguments
from multiring._frontend.process_sets import global_process_set
from multiring._frontend.reduce_ops import Average
from multiring.jax.call import Ranks
from multiring.jax.collectives import paths_of
from multiring.jax.first_steps import Watching, reduced


class Transformation(NamedTuple):
    """A pair of functions `init` and `update`, like optax's GradientTransformation."""

    init: Any
    update: Any


@former_arguments(wire="compression")
def distribute(
    transformation: Any,
    *,
    op: int | str = Average,
    compression: Any = Compression.none,
    process_set: Ranks = global_process_set,
) -> Transformation:
    """Return an optimizer that combines all ranks' gradients.

    The result passes the combined gradients to `transformation`.

    Every rank makes the same update to its own copy of the parameters, so begin with `broadcast(parameters)`. All
    gradients of one type share one collective. At the first update of a model, the ranks compare their gradients. At
    the second update, the ranks compare the parameters if `update` gets parameters. MULTIRING_CHECK_FIRST_STEPS=0 turns
    the comparison off.

    Args:
        transformation: has `init(parameters)` and `update(gradients, state, parameters=None, **more)`, as in optax.
        op: Average or Sum.
        compression: the type of float32 values between hosts: a member of `Compression`, or its name.
        process_set: a process set, or a group from `multiring.world().subgroup`. By default, all ranks.

    Raises:
        ArgumentError: `compression` is unknown.
    """
    owner, wire = object(), wire_of(compression)

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> Any:
        named, shape = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in named]
        values = None if params is None else jax.tree.leaves(params)
        if values is not None and [np.shape(each) for each in values] != [np.shape(each) for each in leaves]:
            values = None  # the structures differ; leave the error to the transformation
        key = (owner, shape, *((np.shape(each), str(jax.numpy.result_type(each))) for each in leaves))
        names = [jax.tree_util.keystr(path) for path, _ in named]
        remedy, paths = "parameters = broadcast(parameters) does", paths_of(names, leaves)
        watching = Watching(key, "distribute", names, remedy, sees=True, paths=paths if names != [""] else ())
        shared = reduced(leaves, values, watching, op=op, wire=wire, process_set=process_set)
        return transformation.update(jax.tree.unflatten(shape, shared), state, params, **more)

    return Transformation(transformation.init, update)
