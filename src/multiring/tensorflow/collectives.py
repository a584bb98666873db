"""Collectives of tensors, eager and in graphs, with gradients.

The signatures are Horovod's.

Each collective is one TensorFlow operation, for any number of tensors. An attribute of the operation describes the
collective as a line of text (native/tensorflow/operations.cc). In a graph, ranks match operations by their position in
the graph. In eager execution, they match operations by the order of the calls.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from multiring._frontend.groups_without_arrays import meet_without_arrays
from multiring._frontend.handles import fail_call
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import LINEAR, Adasum, Average, Combination, Sum, combination, name_of
from multiring._frontend.requests.text import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    CallSignature,
)
from multiring._frontend.signatures import ALLGATHER, GROUPED_ALLREDUCE, REDUCESCATTER
from multiring._frontend.signatures import ALLTOALL as _ALLTOALL
from multiring._frontend.variable_names import names_of_variables
from multiring.errors import ArgumentError, UnsupportedError
from multiring.tensorflow.asking import now, ranks_now
from multiring.tensorflow.calls import by_type, call_of, parsed_call, places_of
from multiring.tensorflow.compression import Compression, compressor_of
from multiring.tensorflow.library import load_op_library
from multiring.tensorflow.naming import Naming, named

# ---- the public functions ----


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the combination of all ranks' `tensor`.

    The function is differentiable for Average and Sum. The gradient is a collective too, so every rank must compute it.

    Args:
        tensor: a tensor of the same shape and type on all ranks. For tf.IndexedSlices, the result is their sum or
            average as IndexedSlices.
        average: DEPRECATED, use op.
        device_dense: the argument of tf.device for dense tensors.
        device_sparse: the argument of tf.device for IndexedSlices.
        compression: a member of `Compression`, its name, or a `Compressor`.
        op: Average (the default), Sum, Adasum, Min, Max, Product, or their names.
        prescale_factor: a factor for the tensor before the reduction. It is applied to integers in float64 and to
            16-bit floats in float32.
        postscale_factor: a factor for the result, applied in the same way.
        name: a name by which ranks match the operation, in place of its position or order.
        process_set: by default, all ranks.
        ignore_name_scope: whether to leave the name scopes of a graph out of this name.

    Raises:
        ArgumentError: `op` is unknown, or this rank is not in the set.
        tf.errors.OpError: on every rank: the ranks disagree, or a rank is lost. Inputs are unchanged. `error_of`
            returns multiring's error.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            return _reduced_slices(tensor, how, name, process_set)
    with tf.device(device_dense):
        return _reduced([tensor], how, compression, named("allreduce", name, ignore_name_scope), process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the combination over the ranks for each of `tensors`.

    There is one collective for each type.

    Every rank must pass the same number of tensors, with the same shapes and types in the same order. See `allreduce`
    for the other arguments and the errors.
    """
    how = combination(op, average, prescale_factor, postscale_factor)
    return reduced_gradients(
        tensors,
        how,
        devices=(device_dense, device_sparse),
        compression=compression,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
        name=name,
    )


def reduced_gradients(
    tensors: Sequence[Any],
    how: Combination,
    *,
    devices: tuple[str, str],
    compression: Any,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    name: str | None,
    variables: "GradientVariables | None" = None,
) -> list[Any]:
    """Combine `tensors` over the ranks as `grouped_allreduce` does.

    Args:
        tensors: as in `grouped_allreduce`.
        how: the operation and its factors.
        devices: the arguments of tf.device for dense tensors and for IndexedSlices.
        compression: as in `grouped_allreduce`.
        process_set: as in `grouped_allreduce`.
        ignore_name_scope: as in `grouped_allreduce`.
        name: as in `grouped_allreduce`.
        variables: the variables of which `tensors` are gradients. By default the ranks compare places in the group.
    """
    if not tensors:
        _meet_without_tensors(GROUPED_ALLREDUCE, name, process_set)
        return []
    names, number_of = variables or GradientVariables(places_of(tensors), lambda _: 0)
    device_dense, device_sparse = devices
    naming = named("grouped_allreduce", name, ignore_name_scope)
    dense = [place for place, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    found: dict[int, Any] = {}
    if len(dense) < len(tensors):
        _require_linear(how)  # check this before any collective starts
    if dense:
        with tf.device(device_dense):
            known = GradientVariables(
                [names[place] for place in dense], lambda places: number_of([dense[place] for place in places])
            )
            reduced = _reduced([tensors[place] for place in dense], how, compression, naming, process_set, known)
        found = dict(zip(dense, reduced, strict=True))
    for place, tensor in enumerate(tensors):
        if place not in found:
            with tf.device(device_sparse):
                found[place] = _reduced_slices(tensor, how, name and f"{name}_{place}", process_set)
    return [found[place] for place in range(len(tensors))]


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate all ranks' `tensor` along the first dimension, and return the result.

    The parts are in the order of the ranks.

    The tensors may differ in their first dimension only. The function is differentiable: the gradient of a rank's rows
    is the average of all ranks' gradients for these rows. See `allreduce` for the arguments and the errors.
    """
    return _gathered([tensor], named("allgather", name, ignore_name_scope), process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the `allgather` of each of `tensors`.

    Every rank must pass the same number of tensors.
    """
    if not tensors:
        _meet_without_tensors(ALLGATHER, name, process_set)
    return _gathered(tensors, named("grouped_allgather", name, ignore_name_scope), process_set, places_of(tensors))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the `tensor` of rank `root_rank` on all ranks.

    `root_rank` is a number in the whole job.

    The gradient is the average of all ranks' gradients on the root, and zero on other ranks. See `allreduce` for the
    other arguments and the errors.
    """
    return _broadcast([tensor], root_rank, named("broadcast", name, ignore_name_scope), process_set)[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Assign the values of rank `root_rank` to `variables`, and return the variables.

    The ranks compare the names of the variables, but for the numbers that each process appends to them.
    """
    return broadcast_named(variables, names_of_variables(variables), root_rank, name, process_set)


def broadcast_named(
    variables: Sequence[Any], names: Sequence[str], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Do as `broadcast_`; the ranks compare `names`, one for each variable."""
    naming = named("broadcast_", name, ignores_scope=False)
    values = _broadcast(variables, root_rank, naming, process_set, names)
    return [variable.assign(value) for variable, value in zip(variables, values, strict=True)]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to each rank, and return the received rows by sender.

    The function is differentiable: the gradients of rows are sent back to the senders. See `allreduce` for the errors.

    Args:
        tensor: a tensor. The ranks' tensors may differ in their first dimension only.
        splits: integers, the number of rows for each rank of the set. By default every rank gets the same number, and
            the number of rows must be a multiple of the number of ranks.
        name: see `allreduce`.
        ignore_name_scope: see `allreduce`.
        process_set: see `allreduce`.

    Returns:
        The received rows; with `splits` also the number of rows from each rank, as int32.
    """
    members = members_of(process_set)
    tensor = tf.convert_to_tensor(tensor)
    ranks = ranks_now(process_set)
    if splits is None:
        given = None
        if tensor.shape.rank != 0:
            given = tf.fill([ranks], tf.shape(tensor, tf.int64)[0] // tf.cast(ranks, tf.int64))
        try:
            _check_multiple(tensor, members.size)
        except _RowsError as error:
            if tf.executing_eagerly():  # a graph is only being made
                fail_call(members, name, _ALLTOALL, error)
            raise
    else:
        given = tf.cast(splits, tf.int64)
    naming = named("alltoall", name, ignore_name_scope)
    call = call_of(ALL_TO_ALL, process_set, naming(tensor))
    none = tf.zeros([ranks], tf.int64)
    received, rows = load_op_library().multiring_exchange(
        values=tensor, splits=none if given is None else given, call=call
    )
    return received if splits is None else (received, tf.cast(rows, tf.int32))


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the combination of all ranks' `tensor`.

    `op` is Average or Sum.

    Rank r of n gets rows // n rows, and one more if r < rows % n. The function is differentiable. See `allreduce` for
    the arguments and the errors.
    """
    how = combination(op, None, prescale_factor, postscale_factor)
    with tf.device(device_dense):
        naming = named("reducescatter", name, ignore_name_scope)
        return _scattered([tensor], how, compression, naming, process_set)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return the `reducescatter` of each of `tensors`.

    Every rank must pass the same number of tensors.
    """
    how = combination(op, None, prescale_factor, postscale_factor)
    if not tensors:
        _meet_without_tensors(REDUCESCATTER, None, process_set)
    with tf.device(device_dense):
        naming = named("grouped_reducescatter", None, ignores_scope=False)
        return _scattered(tensors, how, compression, naming, process_set, places_of(tensors))


def _meet_without_tensors(operation: str, name: str | None, process_set: ProcessSet) -> None:
    """Meet the other ranks in a group's eager call; a graph is only being made."""
    if tf.executing_eagerly():
        meet_without_arrays(members_of(process_set), name, operation)


class GradientVariables(NamedTuple):
    """What is known of the variables of gradients.

    names: the names of the variables, which the ranks compare.
    number_of: takes positions of gradients, and returns the number of the reduction of these gradients. The ranks
        compare the first steps of a reduction unless its number is 0.
    """

    names: Sequence[str]
    number_of: Callable[[Sequence[int]], int]


# ---- the operations ----


def _reduced(
    tensors: Sequence[Any],
    how: Combination,
    compression: Any,
    naming: Naming,
    process_set: ProcessSet,
    variables: GradientVariables | None = None,
) -> list[Any]:
    members_of(process_set)
    compression = compressor_of(compression)
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    direct = _direct(how, compression, values)
    if direct is None:
        pairs = [compression.compress(value) for value in values]
        found = _reduced([value for value, _ in pairs], how, Compression.none, naming, process_set, variables)
        return [compression.decompress(value, ctx) for value, (_, ctx) in zip(found, pairs, strict=True)]

    places = {id(each): place for place, each in enumerate(values)}

    def run(alike: list[Any], name: str, signature: CallSignature | None) -> Sequence[Any]:
        number = 0 if variables is None else variables.number_of([places[id(each)] for each in alike])
        call = call_of(ALL_REDUCE, process_set, name, direct, root=number, signature=signature)
        results: Sequence[Any] = load_op_library().multiring_whole(values=alike, call=call)
        return results

    return by_type(values, naming, run, () if variables is None else variables.names)


def _direct(how: Combination, compression: Any, tensors: Sequence[Any]) -> Combination | None:
    """Return the combination that replaces `compression`, or None if `compression` must be called.

    A wire type of the compression can replace it for sums and averages of float32: the group then encodes the data
    between hosts itself.
    """
    if compression is Compression.none:
        return how
    for method in ("compress", "decompress"):
        if not callable(getattr(compression, method, None)):
            raise ArgumentError(f"compression={compression!r}: want a member of Compression, or a Compressor")
    wire = getattr(compression, "wire", None)
    if wire is not None and how.op in LINEAR and all(tensor.dtype == tf.float32 for tensor in tensors):
        return how._replace(wire=wire)
    return None


class _RowsError(ArgumentError, tf.errors.InvalidArgumentError):  # type: ignore[misc] # TensorFlow has no types
    """The rows cannot be divided among the ranks.

    This is also TensorFlow's error type, which programs for Horovod expect.
    """

    def __init__(self, text: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, text)


def _require_linear(how: Combination) -> None:
    """Raise NotImplementedError if IndexedSlices cannot be combined by `how`."""
    if how.op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors: pass sparse_as_dense=True"
        )
    if how.op not in LINEAR:
        raise NotImplementedError(f"{name_of(how.op)} of tf.IndexedSlices: want Sum or Average")
    if (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")


def _reduced_slices(slices: Any, how: Combination, name: str | None, process_set: ProcessSet) -> Any:
    """Return the sum or average of all ranks' slices: the slices of all ranks, concatenated in the order of ranks."""
    _require_linear(how)
    naming = named("allreduce.slices", name, ignores_scope=False)
    indices, values = _gathered([slices.indices, slices.values], naming, process_set)
    if how.op == Average:
        values = values / tf.cast(ranks_now(process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _gathered(tensors: Sequence[Any], naming: Naming, process_set: ProcessSet, names: Sequence[str] = ()) -> list[Any]:
    members_of(process_set)

    def run(alike: list[Any], name: str, signature: CallSignature | None) -> Sequence[Any]:
        call = call_of(ALL_GATHER, process_set, name, signature=signature)
        results: Sequence[Any] = load_op_library().multiring_rows(values=alike, call=call).results
        return results

    return by_type([tf.convert_to_tensor(tensor) for tensor in tensors], naming, run, names)


def _broadcast(
    tensors: Sequence[Any], root: int, naming: Naming, process_set: ProcessSet, names: Sequence[str] = ()
) -> list[Any]:
    members = members_of(process_set)
    if root not in members.group.ranks:
        raise ArgumentError(
            f"root_rank={root!r}: want one of the set's ranks, {list(members.group.ranks)}, as they are numbered in "
            "the whole job"
        )

    def run(alike: list[Any], name: str, signature: CallSignature | None) -> Sequence[Any]:
        call = call_of(BROADCAST, process_set, name, root=root, signature=signature)
        results: Sequence[Any] = load_op_library().multiring_whole(values=alike, call=call)
        return results

    return by_type([tf.convert_to_tensor(tensor) for tensor in tensors], naming, run, names)


def _scattered(
    tensors: Sequence[Any],
    how: Combination,
    compression: Any,
    naming: Naming,
    process_set: ProcessSet,
    names: Sequence[str] = (),
) -> list[Any]:
    members_of(process_set)
    compression = compressor_of(compression)
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]

    def run(alike: list[Any], name: str, signature: CallSignature | None) -> Sequence[Any]:
        call = call_of(REDUCE_SCATTER, process_set, name, how, signature=signature)
        results: Sequence[Any] = load_op_library().multiring_scatter(values=alike, call=call)
        return results

    found = by_type([value for value, _ in pairs], naming, run, names)
    return [compression.decompress(value, ctx) for value, (_, ctx) in zip(found, pairs, strict=True)]


def _check_multiple(tensor: Any, ranks: int) -> None:
    if tensor.shape.rank and tensor.shape[0] is not None and tensor.shape[0] % ranks:
        raise _RowsError(f"alltoall of {tensor.shape[0]} rows over {ranks} ranks: want a multiple, or splits")


# ---- gradients ----

_Gradient = Callable[..., Sequence[Any]]


def _gradient_of(operation: str) -> Callable[[_Gradient], _Gradient]:
    found: Callable[[_Gradient], _Gradient] = tf.RegisterGradient(operation)
    return found


@_gradient_of("MultiringWhole")
def _whole_gradient(operation: Any, *gradients: Any) -> Sequence[Any]:
    call = parsed_call(operation)
    naming = named("gradient", None, ignores_scope=False)
    if call.collective == BROADCAST:
        average = Combination(Average, 1.0, 1.0, None)
        found = _reduced(gradients, average, Compression.none, naming, call.process_set)
        # Without this dependency a graph would leave the reduction out on other ranks, and the root would wait.
        with tf.control_dependencies(found):
            is_root = tf.equal(now(lambda: _world_rank(call.process_set)), call.root)
            return [tf.where(is_root, each, tf.zeros_like(each)) for each in found]
    if call.how.op not in LINEAR:
        raise UnsupportedError(
            f"an allreduce by {name_of(call.how.op)} has no gradient: want Average or Sum, or tf.stop_gradient"
        )
    return _reduced(gradients, call.how, Compression.none, naming, call.process_set)


def _world_rank(process_set: ProcessSet) -> int:
    members = members_of(process_set)
    return members.group.ranks[members.rank]


@_gradient_of("MultiringRows")
def _rows_gradient(operation: Any, *gradients: Any) -> Sequence[Any]:
    call = parsed_call(operation)
    own = now(lambda: members_of(call.process_set).rank)
    count = len(operation.inputs)
    average = Combination(Average, 1.0, 1.0, None)
    naming = named("gradient", None, ignores_scope=False)
    found = _reduced(gradients[:count], average, Compression.none, naming, call.process_set)
    rows = operation.outputs[count:]
    return [
        each[tf.reduce_sum(counts[:own]) : tf.reduce_sum(counts[: own + 1])]
        for each, counts in zip(found, rows, strict=True)
    ]


@_gradient_of("MultiringScatter")
def _scatter_gradient(operation: Any, *gradients: Any) -> Sequence[Any]:
    call = parsed_call(operation)
    ranks = ranks_now(call.process_set) if call.how.op == Sum else 1
    factor = tf.cast(ranks, tf.float64) * call.how.prescale * call.how.postscale
    scaled = [tf.cast(factor, each.dtype) * each for each in gradients]
    return _gathered(scaled, named("gradient", None, ignores_scope=False), call.process_set)


@_gradient_of("MultiringExchange")
def _exchange_gradient(operation: Any, gradient: Any, _rows: Any) -> Sequence[Any]:
    call = parsed_call(operation)
    naming = named("gradient", None, ignores_scope=False)
    back, _ = load_op_library().multiring_exchange(
        values=gradient,
        splits=operation.outputs[1],
        call=call_of(ALL_TO_ALL, call.process_set, naming(gradient)),
    )
    shape = tf.shape(operation.inputs[0])
    unsent = tf.zeros(tf.concat([[shape[0] - tf.shape(back)[0]], shape[1:]], 0), back.dtype)
    return [tf.concat([back, unsent], 0), None]
