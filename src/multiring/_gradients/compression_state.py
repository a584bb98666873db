"""The state of lossy gradient compression in a state_dict.

The state is a dict under KEY in a state_dict. Plain optimizers ignore this entry:

    rank, size    the rank that saved the state, and the number of ranks at that time
    residuals     by parameter, the part of the gradients that the rank has not sent yet: each rank has its own
    queries       by parameter, PowerSGD's Q: the same on all ranks

Parameters are numbered through all groups, as in the rest of a state_dict.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiring._gradients.reductions import CompressionState
from multiring._runtime import Group
from multiring.errors import ArgumentError

KEY = "multiring"
_log = logging.getLogger("multiring")


def packed(states: Sequence[CompressionState | None], group: Group) -> dict[str, Any]:
    """Return the compression state for a state_dict, or an empty dict."""
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
    """Return this rank's compression state by parameter after loading `carried`.

    Residuals are discarded, and a warning is logged, if they come from another rank or from a job of another size. The
    same holds for residuals of parameters without error feedback. If `carried` has no residuals entry, this rank's
    residuals stay.

    Args:
        carried: the result of `packed`, perhaps without "residuals".
        has_residual: for each parameter, whether this rank keeps a residual for it.
        shapes: the shapes of the parameters.
        group: the ranks that reduce gradients together.
        zeros: a function that returns zeros in the shape of a parameter, given its number.

    Raises:
        ArgumentError: a residual does not have its parameter's shape.
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
            "load_state_dict: the state was saved by rank %d of %d, this is rank %d of %d: the gradients that the "
            "saving rank had not sent yet are discarded. To continue exactly, save and load one state_dict a rank",
            *(carried["rank"], carried["size"], group.rank, group.size),
        )
        loaded = {}
    elif not all(has_residual[index] for index in loaded):
        _log.warning(
            "load_state_dict: a part of the gradients that this rank had not sent yet is discarded, because not all "
            "parameters have error feedback now"
        )
    return [
        CompressionState(
            residual=None if residuals is None else loaded[index] if index in loaded else zeros(index),
            query=carried.get("queries", {}).get(index),
        )
        for index in range(len(shapes))
    ]
