"""The host copies of a group of tensors of which some are on devices, in the layout of the fusion buffer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multiring._frontend.process_sets import Members
from multiring.torch.collectives.staged import Staging, host_memory, to_device
from multiring.torch.fusion_buffer import BufferLayout, blocks, layout_of


class GroupCopies:
    """Pinned copies of a group's device tensors, one buffer for each type, and the group's host tensors."""

    def __init__(self, members: Members, staging: Staging, tensors: Sequence[Tensor], *, in_place: bool) -> None:
        """Start the copies of `tensors`; `in_place` says that the results replace the tensors."""
        self._members = members
        # A device tensor that is not changed may be freed as soon as its copy is on the way.
        self._places = [each if in_place and not each.is_cpu else each.device for each in tensors]
        self._buffers: list[tuple[Tensor, BufferLayout]] = []
        # The host's collective overwrites what it is given, so a host tensor that must not change is copied.
        self.hosts = [each if in_place or not each.is_cpu else each.detach().clone() for each in tensors]
        of_types: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if not tensor.is_cpu:
                of_types.setdefault(tensor.dtype, []).append(place)
        for dtype, places in of_types.items():
            self._start(staging, dtype, places, [tensors[place] for place in places])

    def _start(self, staging: Staging, dtype: torch.dtype, places: Sequence[int], sources: Sequence[Tensor]) -> None:
        layout = layout_of(dtype, tuple(source.shape for source in sources))
        memory = host_memory(self._members.group, (layout.total,), dtype, sources[0].device)
        self._buffers.append((memory, layout))
        views = layout.views(memory)
        for place, view in zip(places, views, strict=True):
            self.hosts[place] = view
        staging.copied_to(views, sources)

    def fill_gaps(self) -> None:
        """Write zeros between the tensors' copies, so that a buffer can be reduced as one tensor."""
        for memory, layout in self._buffers:
            if layout.has_gaps:
                layout.zero_gaps(memory)
                blocks.add(memory, memory.data_ptr(), memory.nbytes)  # this object keeps `memory`

    def put_back(self, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the results to their tensors' devices, and return the group's results."""
        results = []
        for place, result in zip(self._places, found, strict=True):
            if isinstance(place, Tensor):
                results.append(to_device(self._members, result, place.device, place))
            else:
                results.append(result if place.type == "cpu" else to_device(self._members, result, place))
        return tuple(results)
