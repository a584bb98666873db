"""all_to_all of a process group, in all its variants."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiring._runtime import Handle
from multiring._runtime.arrays import Buffer
from multiring.torch.c10d.arguments import blocks_of
from multiring.torch.c10d.buffers import (
    as_bytes,
    bytes_in,
    contents,
    in_a_row,
    place_for,
    put_in_order,
    require_host,
    require_places,
)
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.c10d.group_state import GroupState, ReadyOperation
from multiring.torch.interop import dtype_name, new_memory

Settle = Callable[[], None] | None


def all_to_all_single(  # noqa: PLR0913, PLR0917 -- torch's
    state: GroupState,
    output: Tensor,
    source: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    opts: Any = None,
    timeout: timedelta | None = None,
) -> Any:
    """Send rows of `source` to each rank, and write the received rows to `output`.

    The received rows are in the senders' rank order. Without splits, each rank gets an equal number of rows.
    """
    what = "all_to_all_single"
    require_host(what, source)
    require_host(what, output)
    if source.dtype is not output.dtype:
        raise RefusedError(f"{what}: {dtype_name(source.dtype)} into {dtype_name(output.dtype)}; want the same type")
    rows = (
        _rows(state, what, "input", source, input_split_sizes),
        _rows(state, what, "output", output, output_split_sizes),
    )
    width = math.prod(source.shape[1:])
    if math.prod(output.shape[1:]) != width:
        raise RefusedError(
            f"{what}: rows of shape {tuple(source.shape[1:])} into rows of shape {tuple(output.shape[1:])}; want rows "
            "of the same number of elements"
        )
    place, settle = place_for(state.group, output)
    start = _exchange(state, source, place, rows, (dtype_name(source.dtype), width))
    return state.issue(what, ReadyOperation(start, settle), state.options_of(opts, timeout), (output,))


def alltoall(state: GroupState, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
    """Send input r to rank r, and write the tensor received from rank r to output r."""
    what = "all_to_all"
    sources, targets = (blocks_of(what, each, state.group.size) for each in (inputs, outputs))
    if sources[0].dtype is not targets[0].dtype:
        raise RefusedError(
            f"{what}: {dtype_name(sources[0].dtype)} into {dtype_name(targets[0].dtype)}; want the same type"
        )
    rows = [each.numel() for each in sources], [each.numel() for each in targets]
    whole, place = in_a_row(sources), in_a_row(targets)
    if whole is None:
        whole = torch.cat([contents(each).detach().view(-1) for each in sources])
    settle: Settle = None
    if place is None:
        require_places(*targets)
        place = new_memory(state.group, (sum(rows[1]),), targets[0].dtype)
        settle = partial(put_in_order, targets, place)
    start = _exchange(state, whole, place, rows, (dtype_name(whole.dtype), 1))
    return state.issue(what, ReadyOperation(start, settle), state.options_of(opts, timeout), targets)


def _exchange(
    state: GroupState, source: Tensor, place: Tensor, rows: tuple[Sequence[int], Sequence[int]], kind: tuple[str, int]
) -> Callable[[bool], Handle]:
    """Return a function that starts the exchange.

    Args:
        state: the process group.
        source: the rows to send.
        place: contiguous memory for the received rows.
        rows: the numbers of rows sent to, and received from, each rank.
        kind: the name of the rows' type, and the number of elements of a row.
    """
    width = kind[1] * source.element_size()
    sent, out = as_bytes(contents(source)), as_bytes(place)
    if bytes_in(sent, out):
        sent = as_bytes(contents(source).clone())
    taken, put = (
        Buffer(each.address, (sum(count), width), (width, 1), "uint8", each.owner)
        for each, count in zip((sent, out), rows, strict=True)
    )
    title = f"all_to_all of {kind[0]} rows of {kind[1]}"

    def start(waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        return state.group.known_sizes.all_to_all_rows(taken, put, rows, title, waits=waits)

    return start


def _rows(state: GroupState, what: str, name: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
    ranks, rows = state.group.size, len(tensor) if tensor.dim() else 0
    if not splits:
        if not tensor.dim() or rows % ranks:
            raise RefusedError(
                f"{what}: the {name} of shape {tuple(tensor.shape)} does not divide equally across the group of "
                f"{ranks} ranks; want a number of rows that is a multiple of the ranks, or split sizes"
            )
        return [rows // ranks] * ranks
    found = list(splits)
    if len(found) != ranks or min(found) < 0 or sum(found) != rows:
        raise RefusedError(
            f"{what}: split sizes {found} of the {name} of {rows} rows; want {ranks} numbers >= 0 whose sum is {rows}"
        )
    return found
