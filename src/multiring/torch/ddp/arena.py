"""shared_zeros_like: adjacent tensors in the arena, which a grouped allreduce reduces in place as one buffer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.torch.fusion_buffer import blocks, layout_of
from multiring.torch.interop import at_place, require_plain


def shared_zeros_like(tensors: Sequence[Tensor], process_set: ProcessSet = global_process_set) -> list[Tensor]:
    """Return zeros in the arena, of the shapes and types of `tensors`.

    The zeros of one type are adjacent. `grouped_allreduce_` of all of them, in this order, reduces their memory as one
    buffer, without a copy. The function is local: no other rank takes part. The memory is released when the last of the
    tensors is deleted.

    For tensors on a device, the zeros are on this device instead, since the arena is host memory.

    Args:
        tensors: tensors whose shapes and types are used, for example a model's parameters, to get tensors for their
            gradients.
        process_set: the ranks that will reduce the tensors.
    """
    group = members_of(process_set).group
    for tensor in tensors:
        require_plain(tensor)
    found = {
        place: torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for place, tensor in enumerate(tensors)
        if not tensor.is_cpu
    }
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_cpu):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype and tensor.is_cpu]
        layout = layout_of(dtype, tuple(tensors[place].shape for place in places))
        array = group.allocate(layout.total * dtype.itemsize, np.uint8)
        array.fill(0)
        memory = torch.empty(0, dtype=dtype, device="cpu")
        if array.size:
            memory = at_place(torch.frombuffer(array, dtype=torch.uint8), dtype, 0, (layout.total,))
            blocks.add(array, array.ctypes.data, array.nbytes)  # the tensors' storage holds `array` itself
        found |= zip(places, layout.views(memory), strict=True)
    return [found[place] for place in range(len(tensors))]
