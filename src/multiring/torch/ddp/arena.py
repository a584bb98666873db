"""Tensors side by side in the arena, where a group of them is reduced in place, as one buffer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.torch.fusion_buffer import blocks, layout_of
from multiring.torch.interop import at_place, require_plain


def arena_like(tensors: Sequence[Tensor], process_set: ProcessSet = global_process_set) -> list[Tensor]:
    """Return zeros of the shapes and types of `tensors`, those of one type side by side in the arena.

    `grouped_allreduce_` of all of them, in this order, needs no copy: it reduces the memory they lie in as one. Local:
    no other rank takes part. The memory is given back with the last of them.

    Args:
        tensors: of which the contents do not matter; a model's parameters, to have tensors for their gradients.
        process_set: whose ranks are to reduce them.
    """
    group = members_of(process_set).group
    for tensor in tensors:
        require_plain(tensor)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        layout = layout_of(dtype, tuple(tensors[place].shape for place in places))
        array = group.allocate(layout.total * dtype.itemsize, np.uint8)
        array.fill(0)
        memory = torch.empty(0, dtype=dtype)
        if array.size:
            memory = at_place(torch.frombuffer(array, dtype=torch.uint8), dtype, 0, (layout.total,))
            blocks.add(array, array.ctypes.data, array.nbytes)  # which the tensors' storage holds, this very object
        found |= zip(places, layout.views(memory), strict=True)
    return [found[place] for place in range(len(tensors))]
