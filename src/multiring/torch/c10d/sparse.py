"""all_reduce of sparse tensors: every rank gathers the entries of all ranks, and adds them up itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multiring._runtime import Group, Handle
from multiring._runtime.group.compile import Request
from multiring._runtime.group.handles import AgreedHandle, TimedSteps, in_background
from multiring._schedule import Collective
from multiring.torch.c10d.buffers import as_bytes
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.c10d.group_state import ReadyOperation
from multiring.torch.c10d.reduce_ops import ReduceRule
from multiring.torch.interop import dtype_name, new_memory
from multiring.torch.sparse_sums import average_of_entries, sum_of_entries

Wait = Callable[[AgreedHandle], Any]


def sparse_sum(group: Group, tensor: Tensor, reduction: ReduceRule) -> ReadyOperation:
    """Return the operation that sums or averages a sparse COO tensor over all ranks, in place.

    The result is coalesced.

    Raises:
        RefusedError: the reduction is neither a sum nor an average.
    """
    if reduction.factor is not None or reduction.op not in {"sum", "average"}:
        raise RefusedError(f"all_reduce: {reduction.name} of a sparse tensor; want SUM or AVG, or a dense tensor")
    own = tensor.detach().coalesce()
    found: list[Tensor] = []

    def start(waits: bool) -> Handle:  # noqa: FBT001 -- `issue` calls it this way
        gather = _SparseGather(group, own, reduction.name)
        first = gather.counts(waits=waits)

        def finish(wait: Wait = _wait) -> None:
            found.append(gather.rest(first, wait))

        return TimedSteps(finish) if waits else in_background(finish, "all_reduce")

    def settle() -> None:
        total = found.pop()
        base = tensor._base if tensor._is_view() else None  # noqa: SLF001 -- torch has no other name for it
        with torch.no_grad():
            # Copy into `tensor` itself, because tensor.detach() does not share its entries. For complex tensors, torch
            # passes a view of real numbers, which does not share entries with its base either: copy into the base.
            if base is not None and base.dtype.is_complex:
                values = torch.view_as_complex(total.values().contiguous())
                whole = torch.sparse_coo_tensor(
                    total.indices(), values, base.shape, is_coalesced=True, check_invariants=False
                )
                base.copy_(whole)
            else:
                tensor.copy_(total)

    return ReadyOperation(start, settle)


class _SparseGather:
    """One operation in three steps: gather the counts, the indices and the values of the ranks' entries."""

    def __init__(self, group: Group, own: Tensor, name: str) -> None:
        self._group = group
        self._calls = group.calls
        self._own = own
        self._averages = name == "average"
        kind, shape = dtype_name(own.dtype), tuple(own.shape)
        self._title = f"all_reduce {name} of sparse {kind} of shape {shape} and {own.sparse_dim()} sparse dimensions"
        self._call = self._calls.next("all_gather")

    def counts(self, *, waits: bool) -> AgreedHandle:
        table = torch.empty(self._group.size, dtype=torch.int64, device="cpu")
        self._table = table
        return self._gather(
            0, torch.tensor([len(self._own.values())], device="cpu"), table, [1] * self._group.size, waits=waits
        )

    def rest(self, first: AgreedHandle, wait: Wait) -> Tensor:
        """Gather indices and values, and return their sum or average."""
        wait(first)
        counts: list[int] = self._table.tolist()
        own, total = self._own, sum(counts)
        # The entries are the first dimension, so that each rank's part is contiguous.
        places = new_memory(self._group, (total, own.sparse_dim()), torch.int64)
        wait(self._gather(1, own.indices().t().contiguous(), places, counts, waits=True))
        values = new_memory(self._group, (total, *own.values().shape[1:]), own.dtype)
        wait(self._gather(2, own.values().contiguous(), values, counts, waits=True))
        if not self._averages:
            return sum_of_entries(places, values, own.shape)
        found = average_of_entries(places, values, own.shape, self._group.size)
        return torch.sparse_coo_tensor(*found, own.shape, is_coalesced=True, check_invariants=False)

    def _gather(self, step: int, own: Tensor, out: Tensor, counts: list[int], *, waits: bool) -> AgreedHandle:
        place = self._call.step(step, "counts" if step == 0 else "all_gather")
        memory, target = as_bytes(own), as_bytes(out)
        width = target.shape[0] // max(1, sum(counts))
        sizes = tuple(count * width for count in counts)
        with self._calls.telling(place):
            request = Request(Collective.ALL_GATHER, "uint8", sizes, target.shape[0])
            return self._calls.run(place, self._title, request, (memory, target), None, waits=waits)


def _wait(handle: AgreedHandle) -> Any:
    return handle.wait()
