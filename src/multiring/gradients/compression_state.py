"""What lossy gradients carry from step to step, as an optimizer's or a checkpoint's state has it.

A dict, in a state_dict under KEY, which plain optimizers pass over:

    rank, size    of the rank that saved it
    residuals     by parameter, what that rank had not sent yet: every rank's own
    queries       by parameter, PowerSGD's Q: the same on all ranks

Parameters are numbered as in the rest of a state_dict, through all groups.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiring.errors import ArgumentError
from multiring.gradients.reductions import CompressionState
from multiring.runtime import Group

KEY = "multiring"
_log = logging.getLogger("multiring")


def packed(states: Sequence[CompressionState | None], group: Group) -> dict[str, Any]:
    """Return what is carried on, by parameter, for a state_dict; empty where there is nothing to carry."""
    found = {index: each for index, each in enumerate(states) if each is not None}
    residuals = {index: each.residual for index, each in found.items() if each.residual is not None}
    queries = {index: each.query for index, each in found.items() if each.query is not None}
    if not residuals and not queries:
        return {}
    return {"rank": group.rank, "size": group.size, "residuals": residuals, "queries": queries}


def unpacked(
    carried: Mapping[str, Any],
    has_residual: Sequence[bool],
    shapes: Sequence[Sequence[int]],
    group: Group,
    zeros: Callable[[int], Any],
) -> list[CompressionState]:
    """Return what this rank carries on after loading `carried`, by parameter.

    Residuals of another rank, or of a job of another size, are dropped, and so are those that this rank has no use
    for: the rank then owes nothing, and the log says so. Where `carried` has none at all, this rank's own stay.

    Args:
        carried: what `packed` returned, perhaps without "residuals".
        has_residual: by parameter, whether this rank carries something for it.
        shapes: of the parameters.
        group: the ranks that share gradients.
        zeros: returns zeros of the shape of a parameter of this number.

    Raises:
        ArgumentError: a residual is not of its parameter's shape.
    """
    residuals: dict[int, Any] | None = carried.get("residuals")
    loaded = dict(residuals or {})
    for index, residual in loaded.items():
        shape = tuple(shapes[index]) if index < len(shapes) else None
        if tuple(residual.shape) != shape:
            wanted = "no such parameter" if shape is None else f"of shape {shape}"
            raise ArgumentError(
                f"the state_dict's residual of parameter {index} is of shape {tuple(residual.shape)}, the parameter is "
                f"{wanted}; want the state_dict of the same model"
            )
    if residuals and (carried["rank"], carried["size"]) != (group.rank, group.size):
        _log.warning(
            "load_state_dict: the state was saved by rank %d of %d, this is rank %d of %d: what that rank had not sent "
            "yet of its gradients is dropped. To go on exactly, save and load one state_dict a rank",
            *(carried["rank"], carried["size"], group.rank, group.size),
        )
        loaded = {}
    elif not all(has_residual[index] for index in loaded):
        _log.warning(
            "load_state_dict: what this rank had not sent yet of its gradients is dropped in part, as not all of them "
            "have error feedback now"
        )
    return [
        CompressionState(
            residual=None if residuals is None else loaded[index] if index in loaded else zeros(index),
            query=carried.get("queries", {}).get(index),
        )
        for index in range(len(shapes))
    ]
