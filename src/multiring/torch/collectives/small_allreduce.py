"""All-reduces of small tensors on a device, which take little of the caller's time.

The caller's thread only records an event behind the kernels that the program has started, and puts the operation on the
submission line. The line's thread, or a thread that waits for the operation, takes pinned memory and starts the copy to
the host behind the event. Until then the operation keeps the tensor's memory, so this is for small tensors.
What does not depend on the tensor's values is checked for the first tensor of a kind.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multiring._frontend.handles import Name, Placed, Submitted, Unnamed, refuse_in_flight
from multiring._frontend.process_sets import Members
from multiring._frontend.reduce_ops import Combination
from multiring._frontend.signatures import ALLREDUCE
from multiring.torch.collectives.staged import Staged, host_memory, report_failure, to_device
from multiring.torch.device_staging import DeviceStaging, staging_of
from multiring.torch.interop import is_one_piece

MOST_BYTES = 16 << 10  # of a tensor whose memory may be kept until its copy starts
_MOST_KINDS = 4096


class TensorKind(NamedTuple):
    """What the operations of a set have in common if they need the same checks."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    layout: torch.layout
    how: Combination


class SmallKinds:
    """The kinds of small tensors that one process set has staged so far. `Members.kept` makes one for each set."""

    def __init__(self) -> None:
        self._known: dict[TensorKind, DeviceStaging] = {}

    def staging(self, kind: TensorKind) -> DeviceStaging | None:
        """Return the staging of the kind's device if tensors of this kind are known to be served, else None."""
        return self._known.get(kind)

    def add(self, kind: TensorKind) -> None:
        """Note that the set has checked a tensor of this kind, and that it was staged."""
        if kind.shape.numel() * kind.dtype.itemsize <= MOST_BYTES and len(self._known) < _MOST_KINDS:
            self._known[kind] = staging_of(kind.device)


class LateCopy:
    """A small tensor whose copy to the host starts later, behind what the program has started so far."""

    __slots__ = ("_mark", "_members", "_shape", "_staging", "_tensor", "error", "host", "kind")

    def __init__(self, members: Members, staging: DeviceStaging, tensor: Tensor) -> None:
        """Keep `tensor`; see `DeviceStaging.reached` for the error."""
        self._mark = staging.reached()
        self._members, self._staging = members, staging
        self._tensor: Tensor | None = tensor.detach()
        self.host: Tensor | None = None
        self.error: Exception | None = None

    def begin(self) -> Sequence[Any]:
        """Start the copy, and return its event; any thread may call this, once. An error is kept in `error`."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None  # noqa: S101
        try:
            host = host_memory(self._members.group, tensor.shape, tensor.dtype, tensor.device)
            event = self._staging.all_to_host_behind(self._mark, [tensor], [host])
        except Exception as error:  # noqa: BLE001 -- the operation reports it to all ranks, and raises it
            self.error = error
            return ()
        self.host = host
        return (event,)


def submit_small(
    members: Members, kind: TensorKind, tensor: Tensor, name: Name, start: Any, *, in_place: bool
) -> Staged | None:
    """Start an all-reduce of a tensor on a device; return None, and do nothing, if it needs further checks first.

    Args:
        members: the ranks of the set.
        kind: the kind of the tensor.
        tensor: any tensor.
        name: the operation's name.
        start: starts the host's all-reduce of the copy, in place, under a name.
        in_place: whether the result replaces the tensor.
    """
    staging = members.kept(SmallKinds).staging(kind)
    if staging is None or isinstance(name, tuple) or not is_one_piece(tensor):
        return None
    key, plain = "", Unnamed(members.next_number(), "") if name is None else name
    if name is not None:
        key = f"{ALLREDUCE}.{name}"
        refuse_in_flight(members, key, key)

    def decline(error: Exception) -> None:
        report_failure(members, ALLREDUCE, plain, error)

    try:
        copy = LateCopy(members, staging, tensor)
    except Exception as error:
        decline(error)
        raise
    if key:
        members.in_flight.add(key)
    placed = Placed(plain, tensor.device.type)

    def steps() -> Submitted:
        if copy.error is not None:
            decline(copy.error)
            raise copy.error
        host, copy.host = copy.host, None
        found: Submitted = start(host, placed)
        return found

    device, own = tensor.device, tensor if in_place else None  # a tensor that is not needed may be freed

    def finish(found: Tensor) -> Tensor:
        return to_device(members, found, device, own)

    return Staged(members, key, members.line.put(steps, (), copy.begin, decline), finish)
