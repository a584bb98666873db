"""Metrics and outputs of a whole data set, combined from the parts that the ranks evaluated."""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import is_number
from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import OperationError, internal_errors
from multiring._frontend.handles import submit
from multiring._frontend.object_collectives import allgather_object
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.signatures import TENSORS, allreduce_signature
from multiring._runtime import Group, Handle
from multiring.errors import ArgumentError


def mean(
    metrics: Mapping[str, Any], weight: float = 1.0, process_set: ProcessSet = global_process_set
) -> dict[str, Any]:
    """Return the mean of each metric over all ranks' samples.

    It is exact, even if ranks have different sample counts. Every rank of the set calls it. A rank without samples
    passes `weight` 0.

    Args:
        metrics: by name; the same names in the same order on all ranks. Each is a number or an array of numbers, the
            mean over this rank's samples.
        weight: the number of this rank's samples. Metrics of a rank with weight 0 are ignored.
        process_set: the ranks that take part; by default all ranks.

    Returns:
        For each name a float, or an array of float64; the same on all ranks.

    Raises:
        ArgumentError: `weight` is below 0 or not a number, or a metric is not a number or an array of numbers. On every
            rank: no rank has any samples.
        MismatchError: on the other ranks: the weight or a metric of one rank is invalid.
        CollectiveError: on every rank: the names or shapes differ, or a rank is gone.
    """
    members = members_of(process_set)
    try:
        values = checked(metrics, weight)
    except ArgumentError as error:
        with suppress(OperationError):  # the other ranks raise this error; this rank raises a more precise one
            _all_reduce(members, np.full(1, math.nan), f"failed with {error}")
        raise
    scaled = [value * weight if weight else np.zeros_like(value) for value in values]
    sums = np.concatenate([[float(weight)], *(value.reshape(-1) for value in scaled)])
    shapes = ", ".join(f"{name} {value.shape}" for name, value in zip(metrics, values, strict=True))
    _all_reduce(members, sums, shapes)
    total = float(sums[0])
    if not total:
        raise ArgumentError("mean: no rank has any samples; want a weight above 0 on at least one rank")
    found: dict[str, Any] = {}
    start = 1
    for name, value in zip(metrics, values, strict=True):
        whole = sums[start : start + value.size].reshape(value.shape) / total
        found[name] = whole if value.shape else float(whole)
        start += value.size
    return found


def gathered(outputs: Any, is_array: Callable[[Any], bool], rows: Callable[[Any], Any], process_set: ProcessSet) -> Any:
    """Return all ranks' outputs concatenated, in the order of the ranks.

    Arrays are concatenated by rows and lists by elements. Dicts and tuples keep their structure.

    Args:
        outputs: the same structure on all ranks. Numbers of rows and elements, and the order of names in dicts, may
            differ.
        is_array: returns whether a value is an array of the framework.
        rows: returns all ranks' rows of an array.
        process_set: the ranks.

    Raises:
        ArgumentError: `outputs` contains a value of another type.
        CollectiveError: on every rank: outputs differ in names or kinds, or a rank is gone.
    """
    group = members_of(process_set).group
    with internal_errors("gather"):
        with reporting_errors(group, "gather"):
            lines = list(_lines_of(outputs, is_array, "outputs"))
        require_alike(group, "gather", lines)
    return _put_together(outputs, is_array, rows, process_set)


def _lines_of(value: Any, is_array: Callable[[Any], bool], where: str) -> Iterator[str]:
    """Yield a description of each part of the structure that must be the same on all ranks."""
    if isinstance(value, Mapping):
        names = _in_order(value)
        yield f"{where} is a dict of {', '.join(map(repr, names))}"
        for name in names:
            yield from _lines_of(value[name], is_array, f"{where}[{name!r}]")
    elif isinstance(value, tuple):
        yield f"{where} is a tuple of {len(value)}"
        for place, each in enumerate(value):
            yield from _lines_of(each, is_array, f"{where}[{place}]")
    elif isinstance(value, list):
        yield f"{where} is a list"
    elif is_array(value):
        yield f"{where} is an array"
    else:
        raise ArgumentError(
            f"gather: {where} is a {type(value).__name__}; want arrays with a dimension of samples, lists, or dicts "
            "and tuples of those"
        )


def _put_together(
    value: Any, is_array: Callable[[Any], bool], rows: Callable[[Any], Any], process_set: ProcessSet
) -> Any:
    """Return the same as `gathered`; the caller has checked that the outputs have the same structure on all ranks."""
    if is_array(value):
        return rows(value)
    if isinstance(value, list):
        parts = allgather_object(value, name="gather", process_set=process_set)
        return [each for part in parts for each in part]
    if isinstance(value, Mapping):
        # All ranks gather in the same order; the result has this rank's own order of names.
        found = {name: _put_together(value[name], is_array, rows, process_set) for name in _in_order(value)}
        return {name: found[name] for name in value}
    each = [_put_together(part, is_array, rows, process_set) for part in value]
    return type(value)(*each) if hasattr(value, "_fields") else tuple(each)  # a namedtuple remains a namedtuple


def _in_order(names: Mapping[Any, Any]) -> list[Any]:
    return sorted(names, key=lambda name: (type(name).__name__, repr(name)))


def checked(metrics: Any, weight: Any) -> list[NDArray[np.float64]]:
    """Return the metrics' values as float64; raise ArgumentError if a metric or `weight` is invalid."""
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"mean: metrics is a {type(metrics).__name__}; want a dict of values by name, as {{'loss': loss}}"
        )
    if not is_number(weight) or not 0 <= float(weight) < math.inf:
        raise ArgumentError(f"mean: weight={weight!r}; want the number of samples of the metrics, 0 or more")
    found = []
    for name, value in metrics.items():
        made = _real_numbers(value)
        if made is None:
            raise ArgumentError(f"mean: {name} is {str(value)[:200]!r}; want a real number, or an array of them")
        found.append(made)
    return found


def _real_numbers(value: Any) -> NDArray[np.float64] | None:
    """Return a real number, array or tensor as an array of float64; return None for any other value."""
    try:
        plain = value.detach() if hasattr(value, "detach") else value  # a torch tensor may require gradients
        plain = plain.cpu() if hasattr(plain, "cpu") else plain  # or be on a device
        # torch does not hand bfloat16 to NumPy.
        plain = plain.double() if str(getattr(plain, "dtype", "")) == "torch.bfloat16" else plain
        array = np.asarray(plain)
        is_real = array.dtype.kind in "biuf" or array.dtype.name.startswith(("bfloat16", "float"))
        # Such objects are Python's integers of more than 64 bits, decimals and fractions.
        are_objects = array.dtype.kind == "O" and all(
            isinstance(each, numbers.Number) and not isinstance(each, complex) for each in array.flat
        )
        return array.astype(np.float64) if is_real or are_objects else None
    except Exception:  # noqa: BLE001 -- frameworks may raise any error, which the other ranks must receive
        return None


def _all_reduce(members: Members, sums: NDArray[np.float64], shapes: str) -> None:
    def start(group: Group, label: str) -> Handle:
        return group.all_reduce_async(sums, label=label)

    def finish(_: Any) -> None:
        return None

    operation, *terms = allreduce_signature("float64", sums.shape, "sum", (1.0, 1.0), None)
    signature = (operation, (TENSORS, shapes), *terms)  # the error names the first term that differs
    submit(members, None, signature, start, finish).wait()
