"""What all ranks found in their parts of a data set, as if one had seen all of it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError, MismatchError
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
        ArgumentError: `weight` is below 0 or no number; on every rank: no rank has any samples.
        MismatchError: on the other ranks: one's weight makes no sense.
        HorovodInternalError: on every rank: the names or shapes differ, or a rank is gone.
    """
    members = members_of(process_set)
    is_wrong = not (math.isfinite(weight) and weight >= 0)
    values = [np.asarray(_plain(value), np.float64) for value in metrics.values()]
    scaled = [value * weight if weight else np.zeros_like(value) for value in values]
    sums = np.concatenate([[math.nan if is_wrong else float(weight)], *(value.reshape(-1) for value in scaled)])
    shapes = ", ".join(f"{name} {value.shape}" for name, value in zip(metrics, values, strict=True))
    _all_reduce(members, sums, shapes)
    if is_wrong:
        raise ArgumentError(f"mean: weight={weight!r}; want how many samples the metrics are of, 0 or more")
    total = float(sums[0])
    if math.isnan(total):
        raise MismatchError("mean: another rank's weight is no number of samples")
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


def _plain(value: Any) -> Any:
    """Return a number or an array that NumPy takes, of what may be a tensor that autograd knows."""
    return value.detach() if hasattr(value, "detach") else value


def _all_reduce(members: Members, sums: NDArray[np.float64], shapes: str) -> None:
    def start(group: Group, label: str) -> Handle:
        return group.all_reduce_async(sums, label=label)

    def finish(_: Any) -> None:
        return None

    signature = (*allreduce_signature("float64", sums.shape, "sum", (1.0, 1.0), None), (TENSORS, shapes))
    submit(members, None, signature, start, finish).wait()
