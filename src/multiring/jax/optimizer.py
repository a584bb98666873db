"""distribute: an optimizer of optax's form whose gradients are those of all ranks."""

from typing import Any, NamedTuple

from multiring.frontend.process_sets import global_process_set
from multiring.frontend.reduce_ops import Average
from multiring.jax.call import Ranks
from multiring.jax.collectives import all_reduce


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
    type are one collective.

    Args:
        transformation: has `init(parameters)` and `update(gradients, state, parameters=None, **more)`.
        op: Average or Sum.
        wire: "fp16", "bf16" or "int8": how float32 travels between hosts.
        process_set: by default all ranks; a process set, or a group, as `multiring.world().subgroup` gives them.
    """

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> Any:
        shared = all_reduce(gradients, op, wire=wire, process_set=process_set)
        return transformation.update(shared, state, params, **more)

    return Transformation(transformation.init, update)
