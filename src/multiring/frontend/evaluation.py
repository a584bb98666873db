"""What all ranks found in their parts of a data set, as if one had seen all of it."""

import math
import numbers
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError
from multiring.frontend.errors import HorovodInternalError
from multiring.frontend.handles import submit
from multiring.frontend.object_collectives import allgather_object
from multiring.frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring.frontend.signatures import TENSORS, allreduce_signature
from multiring.runtime import Group, Handle


def mean(
    metrics: Mapping[str, Any], weight: float = 1.0, process_set: ProcessSet = global_process_set
) -> dict[str, Any]:
    """Return the mean of each metric over all ranks' samples: exact, however unevenly they were dealt.

    Every rank of the set calls it, also one that had no samples, with `weight` 0.

    Args:
        metrics: by name, the same names in the same order on all ranks; numbers, or arrays of them, each the mean over
            this rank's samples.
        weight: how many samples those are. What a rank of weight 0 brings does not count, whatever it is.
        process_set: by default all ranks.

    Returns:
        By name a float, or an array of float64, the same on all ranks.

    Raises:
        ArgumentError: `weight` is below 0 or no number, or a metric is none; on every rank: no rank has any samples.
        MismatchError: on the other ranks: one's weight or metric makes no sense.
        HorovodInternalError: on every rank: the names or shapes differ, or a rank is gone.
    """
    members = members_of(process_set)
    try:
        values = checked(metrics, weight)
    except ArgumentError as error:
        with suppress(HorovodInternalError):  # the others have that one; this rank has the better one
            _all_reduce(members, np.full(1, math.nan), f"failed with {error}")
        raise
    scaled = [value * weight if weight else np.zeros_like(value) for value in values]
    sums = np.concatenate([[float(weight)], *(value.reshape(-1) for value in scaled)])
    shapes = ", ".join(f"{name} {value.shape}" for name, value in zip(metrics, values, strict=True))
    _all_reduce(members, sums, shapes)
    total = float(sums[0])
    if not total:
        raise ArgumentError("mean: no rank has any samples; want a weight above 0 on one of them")
    found: dict[str, Any] = {}
    start = 1
    for name, value in zip(metrics, values, strict=True):
        whole = sums[start : start + value.size].reshape(value.shape) / total
        found[name] = whole if value.shape else float(whole)
        start += value.size
    return found


def gathered(outputs: Any, rows: Callable[[Any], Any | None]) -> Any:
    """Return all ranks' outputs, by rank: of arrays the rows, of lists the elements; in dicts and tuples each.

    Args:
        outputs: alike on all ranks, but for how many rows or elements there are.
        rows: returns all ranks' rows of an array of the framework's; None where it is none.
    """
    if isinstance(outputs, Mapping):
        return {name: gathered(each, rows) for name, each in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(gathered(each, rows) for each in outputs)
    if isinstance(outputs, list):
        return [each for part in allgather_object(outputs, name="gather") for each in part]
    found = rows(outputs)
    if found is None:
        raise ArgumentError(
            f"gather: a {type(outputs).__name__}; want arrays with a dimension of samples, lists, or dicts and tuples "
            "of those"
        )
    return found


def checked(metrics: Any, weight: Any) -> list[NDArray[np.float64]]:
    """Return the metrics' values; raises ArgumentError where they are none, or `weight` is no number of samples."""
    if not isinstance(metrics, Mapping):
        raise ArgumentError(f"mean: metrics is a {type(metrics).__name__}; want them by name, as {{'loss': loss}}")
    if not isinstance(weight, numbers.Real) or not 0 <= float(weight) < math.inf:
        raise ArgumentError(f"mean: weight={weight!r}; want how many samples the metrics are of, 0 or more")
    found = []
    for name, value in metrics.items():
        plain = value.detach() if hasattr(value, "detach") else value  # of a tensor that autograd knows
        try:
            found.append(np.asarray(math.nan if plain is None else plain, np.float64))
        except (TypeError, ValueError):
            plain = None
        if plain is None:
            raise ArgumentError(f"mean: {name} is {value!r}; want a number, or an array of numbers")
    return found


def _all_reduce(members: Members, sums: NDArray[np.float64], shapes: str) -> None:
    def start(group: Group, label: str) -> Handle:
        return group.all_reduce_async(sums, label=label)

    def finish(_: Any) -> None:
        return None

    operation, *terms = allreduce_signature("float64", sums.shape, "sum", (1.0, 1.0), None)
    signature = (operation, (TENSORS, shapes), *terms)  # what differs is named before what follows from it
    submit(members, None, signature, start, finish).wait()
