"""broadcast, all_gather and barrier of a process group, in all their variants."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiring._runtime import Handle
from multiring._runtime.group.starting import start_barrier
from multiring.torch.c10d.arguments import alike, blocks_of, one_of, require_as_many, require_like, require_rank
from multiring.torch.c10d.buffers import (
    as_bytes,
    bytes_in,
    contents,
    in_a_row,
    place_for,
    put_in_all,
    put_in_order,
    require_host,
    require_places,
    touching,
)
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.c10d.group_state import CallOptions, GroupState, ReadyOperation
from multiring.torch.interop import dtype_name, new_memory

Settle = Callable[[], None] | None


def broadcast(
    state: GroupState, tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None
) -> Any:
    """Overwrite the tensor, or all tensors, of every rank with one tensor of the root, in place."""
    if isinstance(opts, int):
        opts, root = None, opts
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    source, chosen = (root, 0) if opts is None else (opts.rootRank, opts.rootTensor)
    alike("broadcast", several)
    require_rank("broadcast", "root", source, state.group.size)
    if not 0 <= chosen < max(1, len(several)):
        raise RefusedError(f"broadcast: invalid root tensor {chosen}; want an index from 0 to {len(several) - 1}")
    tensor = several[chosen] if len(several) > 1 else one_of("broadcast", several)
    settle: Settle = None
    if state.group.rank == source:
        place = contents(tensor)
    else:
        place, settle = place_for(state.group, tensor)
    if len(several) > 1:
        require_places(*several)
        settle = partial(put_in_all, several, place)
    memory = as_bytes(place)
    title = f"broadcast from rank {source} of {dtype_name(tensor.dtype)} of shape ({tensor.numel()},)"

    def start(waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        return state.group.known_sizes.broadcast(memory, source, title, waits=waits)

    return state.issue("broadcast", ReadyOperation(start, settle), state.options_of(opts, timeout), several)


def allgather(state: GroupState, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
    """Gather every rank's tensor into the list of outputs; output r must have the size of rank r's tensor."""
    if not isinstance(inputs, Tensor) and len(inputs) > 1:
        return _allgather_several(state, outputs, inputs, state.options_of(opts, timeout))
    tensor = one_of("all_gather", inputs)
    blocks = blocks_of("all_gather", outputs, state.group.size)
    ready = _into_list(state, "all_gather", blocks, tensor)
    return state.issue("all_gather", ready, state.options_of(opts, timeout), blocks)


def _allgather_several(
    state: GroupState, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: CallOptions
) -> Any:
    """Gather several tensors of each rank into each list of outputs, in rank order.

    All ranks must pass the same number of tensors.
    """
    what = "all_gather"
    require_as_many(what, outputs, inputs)
    lists = [blocks_of(what, [each], state.group.size * len(inputs)) for each in outputs]
    alike(what, [*inputs, *(block for blocks in lists for block in blocks)])
    own = torch.cat([contents(each).detach().view(-1) for each in inputs])
    place = new_memory(state.group, (state.group.size * own.numel(),), own.dtype)
    for blocks in lists:
        require_places(*blocks)

    def settle() -> None:
        for blocks in lists:
            put_in_order(blocks, place)

    ready = _gather(state, own, place, (own.numel(),) * state.group.size, settle)
    return state.issue(what, ready, options, [block for blocks in lists for block in blocks])


def allgather_coalesced(
    state: GroupState, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
) -> Any:
    """Gather many tensors as `allgather` does; `outputs[r]` lists the outputs for the tensors of rank r."""
    what = "all_gather_coalesced"
    for of_rank in outputs or [[]]:
        require_as_many(what, of_rank, inputs)
    columns = [[of_rank[number] for of_rank in outputs] for number in range(len(inputs))]
    lists = [blocks_of(what, each, state.group.size) for each in columns]
    for tensor in inputs:
        require_host(what, tensor)
    pairs = list(zip(lists, inputs, strict=True))
    apart = touching([(blocks, (tensor,)) for blocks, tensor in pairs])
    ready = [_into_list(state, what, *pair, apart=each) for pair, each in zip(pairs, apart, strict=True)]
    return state.issue_several(what, ready, opts, [block for blocks in lists for block in blocks])


def all_gather_single(state: GroupState, output: Tensor, source: Tensor, opts: Any = None) -> Any:
    """Gather every rank's tensor into one output tensor, in rank order."""
    ready = _into_one(state, "all_gather_single", output, source)
    return state.issue("all_gather_single", ready, state.options_of(opts), (output,))


def all_gather_single_coalesced(
    state: GroupState, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
) -> Any:
    """Gather many tensors, each as `all_gather_single` does."""
    what = "all_gather_single_coalesced"
    require_as_many(what, outputs, sources)
    for tensor in (*outputs, *sources):
        require_host(what, tensor)
    pairs = list(zip(outputs, sources, strict=True))
    apart = touching([((output,), (source,)) for output, source in pairs])
    ready = [_into_one(state, what, *pair, apart=each) for pair, each in zip(pairs, apart, strict=True)]
    return state.issue_several(what, ready, opts, outputs)


def barrier(state: GroupState, opts: Any = None, *, timeout: timedelta | None = None) -> Any:
    """Wait until every rank has called this function."""

    def start(waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        return start_barrier(state.calls, "", waits=waits)

    return state.issue("barrier", ReadyOperation(start), state.options_of(opts, timeout), ())


def _into_list(
    state: GroupState, what: str, blocks: Sequence[Tensor], tensor: Tensor, *, apart: bool = False
) -> ReadyOperation:
    require_host(what, tensor)
    require_like(what, tensor, blocks[state.group.rank])
    place = None if apart else in_a_row(blocks)
    settle: Settle = None
    counts = tuple(block.numel() for block in blocks)
    if place is None:
        require_places(*blocks)
        place = new_memory(state.group, (sum(counts),), tensor.dtype)
        settle = partial(put_in_order, blocks, place)
    return _gather(state, tensor, place, counts, settle)


def _into_one(state: GroupState, what: str, output: Tensor, source: Tensor, *, apart: bool = False) -> ReadyOperation:
    ranks, each = state.group.size, source.numel()
    require_host(what, source)
    require_host(what, output)
    if output.numel() != each * ranks or source.dtype is not output.dtype:
        raise RefusedError(
            f"{what}: the input is {dtype_name(source.dtype)} of {each} elements, the output "
            f"{dtype_name(output.dtype)} of {output.numel()}; want the same type, and {ranks} times as many for "
            f"{ranks} ranks"
        )
    place, settle = place_for(state.group, output, apart=apart)
    return _gather(state, source, place, (each,) * ranks, settle)


def _gather(
    state: GroupState, tensor: Tensor, place: Tensor, counts: tuple[int, ...], settle: Settle
) -> ReadyOperation:
    """Return the operation that fills the contiguous `place` with `counts[r]` elements from each rank r."""
    own, out = as_bytes(contents(tensor)), as_bytes(place)
    itemsize = tensor.element_size()
    start_at = out.address + itemsize * sum(counts[: state.group.rank])
    if own.address != start_at and bytes_in(own, out):  # other ranks would read `own` while it is overwritten
        own = as_bytes(contents(tensor).clone())
    sizes = tuple(count * itemsize for count in counts)
    each = f"{len(counts)} times {counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
    title = f"all_gather of {each} {dtype_name(tensor.dtype)}"

    def start(waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        return state.group.known_sizes.all_gather(own, out, sizes, title, waits=waits)

    return ReadyOperation(start, settle)
