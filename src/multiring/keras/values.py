"""Collectives of numbers, arrays and Keras' variables, for any backend."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras.src.utils import python_utils

from multiring._frontend import array_collectives, array_rows
from multiring._frontend.compression_names import Compression, wire_of
from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.evaluation import gathered
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, world_rank_in
from multiring._frontend.reduce_ops import LINEAR, Average, combination
from multiring._frontend.requests.interrupts import has_cancelled
from multiring._frontend.variable_names import names_of_variables
from multiring.errors import UnsupportedError


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | str | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return `value` combined over the ranks, as a NumPy array.

    Args:
        value: a number or an array, of the same shape and type on all ranks.
        name: the ranks match calls by this name. By default they match unnamed calls in the order of the calls.
        average: DEPRECATED, use op.
        prescale_factor: multiplies the value first.
        postscale_factor: multiplies the result.
        op: Average (the default), Sum, Min, Max or Product.
        compression: the type in which float32 travels between hosts: a member of `Compression`, or its name.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: `op` is unknown, or this rank is not in the set.
        CollectiveError: on every rank: the ranks' arguments differ, or a rank is gone.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    array = np.array(_plain(value))
    wire = wire_of(compression) if array.dtype == np.float32 and how.op in LINEAR else None
    return array_collectives.allreduce(
        array,
        how.op,
        name=name,
        compression=wire,
        process_set=process_set,
        scales=(how.prescale, how.postscale),
    )


def grouped_allreduce(
    values: Sequence[Any],
    name: str | None = None,
    op: int | str = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the `allreduce` of each of `values`; every rank passes the same number of values."""
    arrays = [np.array(_plain(value)) for value in values]
    return list(array_rows.grouped_allreduce(arrays, op, compression=compression, name=name, process_set=process_set))


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate all ranks' arrays along the first dimension, and return the result.

    The first dimension may differ between ranks.
    """
    return np.concatenate(allgather_object(np.atleast_1d(np.array(_plain(value))), name, process_set))


def grouped_allgather(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the `allgather` of each of `values`; every rank passes the same number of values."""
    arrays = [np.array(_plain(value)) for value in values]
    return list(array_rows.grouped_allgather(arrays, name=name, process_set=process_set))


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return the outputs of all ranks in rank order, with NumPy arrays in place of tensors.

    The rows of tensors and the elements of lists are concatenated. The values of dicts and tuples are gathered one by
    one; values of dicts are matched by key. Every rank calls this function. A rank without samples passes tensors
    without rows.

    Raises:
        ArgumentError: an output is not a tensor, array, list, dict or tuple.
        CollectiveError: on every rank: outputs differ in keys or kinds, tensors differ in more than the number of their
            rows, or a rank is gone.
    """

    def rows(value: Any) -> Any:
        return array_collectives.allgather(_plain(value), process_set=process_set)

    return gathered(outputs, _is_array, rows, process_set)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | keras.Variable) or keras.ops.is_tensor(value)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the `value` of rank `root_rank`, as a NumPy array."""
    return broadcast_object(np.array(_plain(value)), root_rank, name, process_set)


def reducescatter(
    value: Any, name: str | None = None, op: int | str = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Combine `value` over the ranks by Average or Sum, and return this rank's rows of the result."""
    return array_rows.reducescatter(_plain(value), op, name=name, process_set=process_set)


def grouped_reducescatter(
    values: Sequence[Any],
    name: str | None = None,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the `reducescatter` of each of `values`; every rank passes the same number of values."""
    arrays = [np.array(_plain(value)) for value in values]
    return list(array_rows.grouped_reducescatter(arrays, op, name=name, process_set=process_set))


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of `value` to each rank, and return the received rows as a NumPy array.

    See `multiring._frontend.array_rows.alltoall` for `splits`, the result and the errors.
    """
    return array_rows.alltoall(_plain(value), splits, name=name, process_set=process_set)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Set Keras' variables on all ranks to the values of rank `root_rank`.

    Args:
        variables: the same variables on all ranks, in the same order.
        root_rank: a rank of the whole job.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: `root_rank` is not in the set.
        MismatchError: on every rank: the ranks' variables differ in names, shapes or types, or `root_rank` differs. The
            numbers that Keras appends to the names of layers do not count.
    """
    members = members_of(process_set)
    with internal_errors("broadcast_variables"):
        with reporting_errors(members.group, "broadcast_variables"):
            root = world_rank_in(members, root_rank)
        names = names_of_variables(variables)
        lines = [
            f"{name}, {variable.dtype} of shape {tuple(variable.shape)}"
            for name, variable in zip(names, variables, strict=True)
        ]
        require_alike(members.group, "broadcast_variables", [f"root_rank={root_rank}", *lines])
    is_root = members.rank == root
    values = [keras.ops.convert_to_numpy(variable.value) for variable in variables] if is_root else None
    values = broadcast_object(values, root_rank, "broadcast_variables", process_set)
    if not is_root:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


MARK = "_multiring_is_distributed"  # an attribute of distributed models


def is_shared(model: Any) -> bool:
    """Return whether `distribute` was called for this model."""
    return bool(getattr(model, MARK, False))


def settled(model: Any) -> None:
    """Update the variables of `model`.

    During `fit` on JAX, their current values are stored elsewhere.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def raise_failed(logs: Any) -> None:
    """Raise the error of a failed step.

    JAX raises the error when a program reads a value, and Keras drops the error when Keras reads the logs.

    Args:
        logs: the logs that Keras passes to a callback at the end of a batch. Keras converts each value that it can read
            to a number.

    Raises:
        KeyboardInterrupt: the step failed because of Ctrl-C.
    """
    try:
        for value in (logs or {}).values():
            if not isinstance(value, int | float):
                _plain(value)
    except Exception as error:
        if has_cancelled():  # Keras has dropped the KeyboardInterrupt as well
            raise KeyboardInterrupt from error
        raise


def raise_failed_steps() -> None:
    """Make `fit` on JAX raise the error of a failed step.

    Keras itself drops the error when Keras reads the logs.
    """
    plain = python_utils.pythonify_logs
    if keras.backend.backend() != "jax" or hasattr(plain, "multiring"):
        return

    @functools.wraps(plain)
    def read(logs: Any) -> Any:
        raise_failed(logs)
        return plain(logs)

    read.multiring = True  # type: ignore[attr-defined]
    python_utils.pythonify_logs = read


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UnsupportedError, because Keras 3 has no global variables.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"broadcast_global_variables({root_rank}): Keras 3 has no global variables; want "
        "callbacks.BroadcastGlobalVariablesCallback in fit, or broadcast_variables(model.variables)"
    )


def _plain(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) or hasattr(value, "value") else value
