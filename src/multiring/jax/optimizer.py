"""distribute: an optimizer of optax's form whose gradients are those of all ranks."""

from typing import Any, NamedTuple

import jax
import numpy as np

from multiring.frontend.process_sets import global_process_set
from multiring.frontend.reduce_ops import Average
from multiring.jax.call import Ranks
from multiring.jax.first_steps import Watching, reduced


class Transformation(NamedTuple):
    """What optax calls a GradientTransformation: a pair of functions, which is all that it asks for."""

    init: Any
    update: Any


def distribute(
    transformation: Any,
    *,
    op: int | str = Average,
    wire: str | None = None,
    process_set: Ranks = global_process_set,
) -> Transformation:
    """Return `transformation`, an optimizer of optax's form, with gradients that are combined over the ranks first.

    Every rank updates its own copy of the parameters alike; begin with `broadcast(parameters)`. All gradients of one
    type are one collective. At the first update of a model the ranks compare their gradients, at the second one the
    parameters, where `update` is given them; MULTIRING_CHECK_FIRST_STEPS=0 turns that off.

    Args:
        transformation: has `init(parameters)` and `update(gradients, state, parameters=None, **more)`.
        op: Average or Sum.
        wire: "fp16", "bf16" or "int8": how float32 travels between hosts.
        process_set: by default all ranks; a process set, or a group, as `multiring.world().subgroup` gives them.
    """
    owner = object()

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> Any:
        named, shape = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in named]
        values = None if params is None else jax.tree.leaves(params)
        if values is not None and [np.shape(each) for each in values] != [np.shape(each) for each in leaves]:
            values = None  # of another structure: it is for the transformation to say so
        key = (owner, shape, *((np.shape(each), str(jax.numpy.result_type(each))) for each in leaves))
        names = [jax.tree_util.keystr(path) for path, _ in named]
        watching = Watching(key, "distribute", names, "parameters = broadcast(parameters) does", sees=True)
        shared = reduced(leaves, values, watching, op=op, wire=wire, process_set=process_set)
        return transformation.update(jax.tree.unflatten(shape, shared), state, params, **more)

    return Transformation(transformation.init, update)
