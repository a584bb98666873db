"""gather and scatter of a process group: all ranks send a tensor to the root, or the root sends a tensor to each rank.

Both are an all_to_all in which all blocks but the root's are empty. All ranks agree on the operation before data moves,
and all ranks detect the failure of a rank, including ranks that only send.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiring._runtime import Handle
from multiring._schedule import Splits
from multiring.torch.c10d.arguments import blocks_of, one_of, require_like, require_rank
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


def gather(
    state: GroupState, outputs: Any, inputs: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None
) -> Any:
    """Gather every rank's tensor into the root's list of outputs.

    Args:
        state: the process group.
        outputs: on the root, a list of a tensor for each rank, or a list of this list; on other ranks, nothing.
        inputs: this rank's tensor, or a list of it; the same type and number of elements on all ranks.
        opts: torch's GatherOptions, whose root takes precedence over `root`; or the root's rank.
        root: the root's rank in the group.
        timeout: the timeout of the operation; it takes precedence over that of `opts`.
    """
    root, opts = _root_of(opts, root)
    require_rank("gather", "root", root, state.group.size)
    tensor = one_of("gather", inputs)
    require_host("gather", tensor)
    own, settle = contents(tensor), None
    place, blocks = tensor.new_empty(0), []
    if state.group.rank == root:
        blocks = list(blocks_of("gather", outputs, state.group.size))
        for block in blocks:
            require_like("gather", block, tensor)
        found = in_a_row(blocks)
        if found is None:
            require_places(*blocks)
        place = new_memory(state.group, (tensor.numel() * len(blocks),), tensor.dtype) if found is None else found
        settle = partial(put_in_order, blocks, place) if found is None else None
        if bytes_in(as_bytes(own), as_bytes(place)):
            own = own.clone()
    else:
        _require_none(state, "gather", "output", outputs, root)
    start = _start(state, f"gather to rank {root}", own, place, root, is_gather=True)
    return state.issue("gather", ReadyOperation(start, settle), state.options_of(opts, timeout), blocks)


def scatter(
    state: GroupState, outputs: Any, inputs: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None
) -> Any:
    """Send tensor r of the root's list of inputs to the output of rank r; the arguments are as for `gather`."""
    root, opts = _root_of(opts, root)
    require_rank("scatter", "root", root, state.group.size)
    tensor = one_of("scatter", outputs)
    require_host("scatter", tensor)
    place, settle = place_for(state.group, tensor)
    whole = tensor.new_empty(0)
    if state.group.rank == root:
        blocks = blocks_of("scatter", inputs, state.group.size)
        for block in blocks:
            require_like("scatter", block, tensor)
        found = in_a_row(blocks)
        whole = torch.cat([contents(each).detach().view(-1) for each in blocks]) if found is None else found
        if bytes_in(as_bytes(whole), as_bytes(place)):
            whole = whole.clone()
    else:
        _require_none(state, "scatter", "input", inputs, root)
    start = _start(state, f"scatter from rank {root}", whole, place, root, is_gather=False)
    return state.issue("scatter", ReadyOperation(start, settle), state.options_of(opts, timeout), (tensor,))


def _start(
    state: GroupState, title: str, source: Tensor, place: Tensor, root: int, *, is_gather: bool
) -> Callable[[bool], Handle]:
    """Return a function that starts the operation.

    `source` and `place` are contiguous. The tensor of all parts (`place` of a gather, `source` of a scatter) is empty
    on ranks other than the root.
    """
    part = source if is_gather else place
    size_bytes, ranks = part.numel() * part.element_size(), state.group.size
    one = tuple(size_bytes if rank == root else 0 for rank in range(ranks))
    all_ = (size_bytes if state.group.rank == root else 0,) * ranks
    sizes = Splits(one, all_) if is_gather else Splits(all_, one)
    buffers = as_bytes(source), as_bytes(place)
    title = f"{title} of {part.numel()} {dtype_name(part.dtype)}"

    def start(waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        return state.group.known_sizes.all_to_all(buffers, sizes, size_bytes, title, waits=waits)

    return start


def _require_none(state: GroupState, what: str, name: str, tensors: Any, root: int) -> None:
    if tensors is not None and any(isinstance(each, Tensor) or len(each) for each in tensors):
        raise RefusedError(
            f"{what}: rank {state.group.rank} has {name} tensors; want them only on the root, rank {root}"
        )


def _root_of(opts: Any, root: int) -> tuple[int, Any]:
    if isinstance(opts, int):
        return opts, None
    return (root, None) if opts is None else (opts.rootRank, opts)
