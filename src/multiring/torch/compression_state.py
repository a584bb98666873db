"""What lossy gradients carry from step to step, as part of an optimizer's state_dict.

`state_dict()[KEY]` is a dict that plain optimizers pass over:

    rank, size    of the rank that saved it
    residuals     by parameter, what that rank had not sent yet: every rank's own
    queries       by parameter, PowerSGD's Q: the same on all ranks

Parameters are numbered as in the rest of a state_dict, through all groups.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multiring.errors import ArgumentError
from multiring.runtime import Group
from multiring.torch.bucket_reductions import Kept

KEY = "multiring"
_log = logging.getLogger("multiring")


def packed(kept: Mapping[int, Kept], parameters: Sequence[Tensor], group: Group) -> dict[str, Any]:
    """Return `kept`, which is by the parameters' `id`, for a state_dict; empty where there is nothing to carry."""
    found = {index: kept[id(each)] for index, each in enumerate(parameters) if id(each) in kept}
    residuals = {index: each.residual for index, each in found.items() if each.residual is not None}
    queries = {index: each.query for index, each in found.items() if each.query is not None}
    if not residuals and not queries:
        return {}
    return {"rank": group.rank, "size": group.size, "residuals": residuals, "queries": queries}


def unpacked(
    carried: Mapping[str, Any], own: Mapping[int, Kept], parameters: Sequence[Tensor], group: Group
) -> dict[int, Kept]:
    """Return what this rank carries on after loading `carried`, by the parameters' `id`.

    Residuals of another rank, or of a job of another size, are dropped, and so are those that this optimizer has no
    use for: the rank then owes nothing, and the log says so. Where `carried` has none at all, this rank's own stay.

    Args:
        carried: what `packed` returned, perhaps without "residuals".
        own: what this rank carries so far.
        parameters: the optimizer's.
        group: the ranks that share gradients.

    Raises:
        ArgumentError: a residual is not of its parameter's shape.
    """
    residuals: dict[int, Tensor] | None = carried.get("residuals")
    loaded = dict(residuals or {})
    for index, residual in loaded.items():
        shape = tuple(parameters[index].shape) if index < len(parameters) else None
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
    elif any(own.get(id(parameters[index]), Kept()).residual is None for index in loaded):
        _log.warning(
            "load_state_dict: what this rank had not sent yet of its gradients is dropped in part, as not all of them "
            "have error feedback now"
        )
    return {
        id(parameter): Kept(
            residual=None if residuals is None else loaded.get(index, torch.zeros_like(parameter.detach())),
            query=carried.get("queries", {}).get(index),
        )
        for index, parameter in enumerate(parameters)
    }
