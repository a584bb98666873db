"""Collectives of arrays and pytrees, eager and inside jit, with gradients.

Each collective is one custom call of XLA, for all arrays of a pytree. Arrays of one type are sent together. The program
contains the description of the call as text, so a program from JAX's compilation cache works in another process.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from multiring._frontend.compression_names import Compression, wire_of
from multiring._frontend.dtype_conversion import dtype_conversion
from multiring._frontend.former_arguments import former_arguments
from multiring._frontend.process_sets import (
    Members,
    global_process_set,
    members_numbered,
    members_of,
    number_of_group,
    world_rank_in,
)
from multiring._frontend.reduce_ops import LINEAR, Average, Max, Min, Product, chosen_op, name_of
from multiring._frontend.requests.text import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from multiring._runtime import Group
from multiring._runtime.named.signature_text import path_text
from multiring.errors import ArgumentError, UnsupportedError
from multiring.jax.call import CustomCall, Ranks, sets
from multiring.jax.devices import PLATFORMS, platform_here
from multiring.jax.primitive import bind

# ---- the public functions ----


@former_arguments(wire="compression")
def allreduce(
    tree: Any,
    op: int | str = Average,
    *,
    compression: Any = Compression.none,
    name: str | None = None,
    process_set: Ranks = global_process_set,
) -> Any:
    """Return `tree` with each array combined over the ranks.

    The function is differentiable for Sum and Average, and works inside jit and vmap. Every rank must run the same
    program.

    Args:
        tree: an array or a pytree of arrays, with the same shapes and types on all ranks.
        op: Average, Sum, Min, Max or Product, or its name.
        compression: the type of float32 values between hosts: a member of `Compression`, or its name.
        name: a name by which ranks match the call. By default they match it by the order of calls.
        process_set: a process set, or a group from `multiring.world().subgroup`. By default, all ranks.

    Raises:
        ArgumentError: `op` is unknown or not defined for a type, `compression` is unknown, or this rank is not in the
            set.
        JaxRuntimeError: on every rank: the ranks disagree, or a rank is lost. `error_of` returns multiring's error.
    """
    leaves, paths, shape = _flattened(tree)
    call = reduction_call(leaves, op, wire=wire_of(compression), name=name, process_set=process_set)
    return _called(replace(call, paths=paths), leaves, shape)


def reduction_call(
    leaves: Sequence[Any],
    op: int | str,
    *,
    wire: str | None,
    name: str | None = None,
    process_set: Ranks,
) -> CustomCall:
    """Return the CustomCall that combines the arrays `leaves`.

    `wire` is a wire type, or None. See `allreduce` for the other arguments and the errors.
    """
    number = chosen_op(op)
    if number not in {*LINEAR, Min, Max, Product}:
        raise ArgumentError(f"op={op!r}: want Average, Sum, Min, Max or Product")
    known = _known(ALL_REDUCE, name, process_set)
    for leaf in leaves:
        dtype_conversion(_dtype_of(leaf), number, 1.0, known.members.size)
    return known.named(name_of(number), wire=wire)


@former_arguments(root="root_rank")
def broadcast(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: Ranks = global_process_set
) -> Any:
    """Return the `tree` of rank `root_rank` on all ranks.

    `root_rank` is a rank's number in the whole job.

    The gradient is the average of all ranks' gradients on the root, and zero on other ranks, as in Horovod. See
    `allreduce` for the other arguments and the errors.
    """
    leaves, paths, shape = _flattened(tree)
    known = _known(BROADCAST, name, process_set)
    world_rank_in(known.members, root_rank)  # fails before the call starts if the root is not in the set
    return _called(replace(known.named("", root=root_rank), paths=paths), leaves, shape)


def allgather(tree: Any, *, name: str | None = None, process_set: Ranks = global_process_set) -> Any:
    """Return the rows of all ranks.

    An array of shape (n, ...) becomes an array of shape (ranks * n, ...).

    See `allreduce` for the arguments and the errors.
    """
    return _by_rows(ALL_GATHER, tree, name, process_set)


def reducescatter(
    tree: Any, op: int | str = Average, *, name: str | None = None, process_set: Ranks = global_process_set
) -> Any:
    """Return this rank's rows of the average or sum over the ranks.

    An array of shape (ranks * n, ...) becomes an array of shape (n, ...).

    `op` is Average or Sum. See `allreduce` for the other arguments and the errors.
    """
    number = chosen_op(op)
    if number not in LINEAR:
        raise ArgumentError(f"op={op!r}: want Average or Sum")
    return _by_rows(REDUCE_SCATTER, tree, name, process_set, name_of(number))


def alltoall(tree: Any, *, name: str | None = None, process_set: Ranks = global_process_set) -> Any:
    """Send rows to each rank, and return the received rows.

    Each rank gets n rows of an array of shape (ranks * n, ...).

    See `allreduce` for the arguments and the errors.
    """
    return _by_rows(ALL_TO_ALL, tree, name, process_set)


# ---- while a program is traced ----

_NAMES = {
    ALL_REDUCE: "allreduce",
    BROADCAST: "broadcast",
    ALL_GATHER: "allgather",
    ALL_TO_ALL: "alltoall",
    REDUCE_SCATTER: "reducescatter",
}


@dataclass(frozen=True, slots=True)
class _Known:
    collective: int
    name: str
    process_set: int
    members: Members

    def named(self, op: str, *, root: int = 0, wire: str | None = None) -> CustomCall:
        return CustomCall(self.collective, op, root, wire, self.process_set, self.name)


def _known(collective: int, name: str | None, process_set: Ranks) -> _Known:
    if (platform := platform_here()) not in PLATFORMS:
        raise UnsupportedError(
            f"{_NAMES[collective]}: JAX computes on {platform}, but multiring serves {' and '.join(PLATFORMS)} only: "
            "set JAX_PLATFORMS=cpu"
        )
    if isinstance(process_set, Group):
        number = number_of_group(process_set)
        members = members_numbered(number)
        sets[number] = members
    else:
        members = members_of(process_set)
        number = process_set.process_set_id or 0
        sets[number] = process_set
    return _Known(collective, name or "", number, members)


def _dtype_of(leaf: Any) -> str:
    return str(np.dtype(jax.dtypes.result_type(leaf)).name)


def _by_rows(collective: int, tree: Any, name: str | None, process_set: Ranks, op: str = "") -> Any:
    leaves, paths, shape = _flattened(tree)
    known = _known(collective, name, process_set)
    ranks = known.members.size
    for leaf in leaves:
        rows = np.shape(leaf)[:1]
        if not rows or (collective != ALL_GATHER and rows[0] % ranks):
            _fail_on_all_ranks(replace(known.named(op), paths=paths), leaves)
            raise ArgumentError(
                f"{_NAMES[collective]} of an array of shape {np.shape(leaf)}: want a first dimension"
                + ("" if collective == ALL_GATHER else f" that is a multiple of {ranks}, the number of ranks")
            )
    return _called(replace(known.named(op), paths=paths), leaves, shape)


def _fail_on_all_ranks(call: CustomCall, leaves: Sequence[Any]) -> None:
    """Make a call of arrays of these shapes that fails, because other ranks with other shapes wait in theirs."""
    if members_of(sets[call.process_set]).size == 1:
        return
    arrays = [np.zeros(np.shape(leaf) or (0,), _dtype_of(leaf)) for leaf in leaves]
    with suppress(jax.errors.JaxRuntimeError), jax.ensure_compile_time_eval():  # the caller raises its own error
        jax.block_until_ready(bind(call, arrays))


_NOTHING = "(a tree without arrays)"  # the path in place of an empty tree's


def _flattened(tree: Any) -> tuple[list[Any], tuple[str, ...], Any]:
    """Return the arrays of a tree, their paths for `CallSignature`, and the tree's structure."""
    named, shape = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in named]
    if not leaves:
        return leaves, (_NOTHING,), shape
    is_array = named[0][0] == ()
    return leaves, () if is_array else paths_of([jax.tree_util.keystr(path) for path, _ in named], leaves), shape


def paths_of(names: Sequence[str], leaves: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of a tree's arrays, with their types, for `CallSignature`."""
    return tuple(path_text(name, _dtype_of(leaf)) for name, leaf in zip(names, leaves, strict=True))


def _called(call: CustomCall, leaves: Sequence[Any], shape: Any) -> Any:
    """Make the call, and return the results as a tree.

    A call without arrays meets the other ranks, too, because their trees may have arrays.
    """
    if not leaves:
        meet_without_arrays(call)
    return jax.tree.unflatten(shape, bind(call, leaves) if leaves else [])


def meet_without_arrays(call: CustomCall) -> None:
    """Make the call without arrays: the other ranks would take this rank's next call for it."""
    if members_of(sets[call.process_set]).size > 1:
        (found,) = bind(replace(call, paths=(_NOTHING,)), [np.zeros(0, np.uint8)])
        if not isinstance(found, jax.core.Tracer):
            jax.block_until_ready(found)  # the caller gets no array that could raise the error
