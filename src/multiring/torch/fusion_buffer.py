"""The fusion buffer: one buffer in which all tensors of a group are reduced together.

The buffer holds the tensors one after the other in row-major order. Each starts at a multiple of 64 bytes from the
first. This layout is the same on all ranks, wherever a rank's own tensors are. If a rank's tensors already have this
layout in memory, their memory is the buffer.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from multiring._runtime import Group
from multiring.torch.interop import at_place, new_memory
from multiring.torch.layout_cache import TensorLayout, tensor_layout_of

_ALIGNMENT_BYTES = 64
_MOST_SPANS = 256
_MOST_SPARE = 4  # the number of buffers that are kept for later groups of a layout


@dataclass(frozen=True, slots=True, eq=False)
class BufferLayout:
    """The places of tensors of one type in a flat buffer. Offsets and `total` are in elements, and include gaps."""

    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    total: int
    has_gaps: bool

    def zero_gaps(self, memory: Tensor) -> None:
        """Write zeros between the tensors' places, because the gaps are reduced too."""
        if self.has_gaps:
            ends = [offset + shape.numel() for offset, shape in zip(self.offsets, self.shapes, strict=True)]
            for end, offset in zip(ends, self.offsets[1:], strict=False):
                memory[end:offset].zero_()

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return a tensor in the flat `memory` for each place."""
        start = int(memory.storage_offset())
        return [
            at_place(memory, self.dtype, start + offset, shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]


@lru_cache(maxsize=256)
def layout_of(dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> BufferLayout:
    """Return the layout of tensors of these shapes; equal arguments give the same object while it is cached."""
    grain = _ALIGNMENT_BYTES // dtype.itemsize
    offsets, end, has_gaps = [], 0, False
    for shape in shapes:
        start = -(-end // grain) * grain
        has_gaps = has_gaps or start != end
        offsets.append(start)
        end = start + shape.numel()
    return BufferLayout(dtype, shapes, tuple(offsets), end, has_gaps)


def new_buffer(group: Group, layout: BufferLayout) -> tuple[Tensor, list[Tensor]]:
    """Return a new buffer for `layout`, and the tensors' places in it."""
    memory = new_memory(group, (layout.total,), layout.dtype)
    if layout.has_gaps:
        memory.zero_()  # the gaps are reduced too
    return memory, layout.views(memory)


class MemoryBlocks:
    """Known blocks of memory whose gaps between tensors are unused, so that a reduction may overwrite the gaps."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # the end address of each block, by its start address

    def add(self, owner: object, start: int, size_bytes: int) -> None:
        """Register a block of memory; it is removed when `owner` is deleted."""
        self._ends[start] = start + size_bytes
        weakref.finalize(owner, self._ends.pop, start, None)

    def has(self, start: int, end: int) -> bool:
        """Return whether one registered block contains all memory from address `start` to `end`."""
        return any(first <= start and end <= last for first, last in list(self._ends.items()))


blocks = MemoryBlocks()  # one object per process, because memory outlives groups


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpan:
    """Tensors that already have their layout in memory, and this memory as one tensor."""

    watched: list["weakref.ref[Tensor]"]  # while the tensors live, no other object has their `id`
    tensor_layout: TensorLayout
    memory: Tensor
    layout: BufferLayout
    repeats: dict[Hashable, Any]  # operations that can be repeated; the reducing caller stores them here


class Packing:
    """Buffers and spans of one process set's groups of tensors, kept for later groups of the same layout."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int], TensorSpan] = {}
        self._layouts: dict[Hashable, BufferLayout | None] = {}  # the span of each `form`; None if there is no span
        self._spare: dict[BufferLayout, list[tuple[Tensor, list[Tensor]]]] = {}

    def span_of(self, tensors: Sequence[Tensor]) -> TensorSpan | None:
        """Return the span of `tensors`; None if their types differ or their memory does not have their layout.

        Gaps between the tensors are reduced too. They must therefore be in a registered block.
        """
        found = self.known_span(tensors)
        if found is not None:
            return found
        found = self._find(tensors)
        if found is not None:
            if len(self._spans) >= _MOST_SPANS:
                self._spans.pop(next(iter(self._spans)))
            self._spans[_key(tensors)] = found
        return found

    def known_span(self, tensors: Sequence[Tensor]) -> TensorSpan | None:
        """Return the span that `span_of` returned for `tensors` before, or None."""
        found = self._spans.get(_key(tensors))
        if found is None or not found.tensor_layout.is_of(tensors):
            return None
        if len(found.watched) < len(tensors):
            # Watch all tensors only now, at the second use, because many groups are used once. Until now only the first
            # tensor was watched, so the program may have replaced the others.
            if any(map(Tensor.is_neg, tensors)):
                return None
            found.watched[:] = self._watch(tensors, tensors)
        return found

    def _watch(self, group: Sequence[Tensor], tensors: Sequence[Tensor]) -> list["weakref.ref[Tensor]"]:
        """Return weak references to `tensors`; when a tensor is deleted, the span of `group` is discarded."""
        on_death = partial(self._drop, _key(group))
        return [weakref.ref(tensor, on_death) for tensor in tensors]

    def _find(self, tensors: Sequence[Tensor]) -> TensorSpan | None:
        tensor_layout = tensor_layout_of(tensors)
        if tensor_layout is None:
            return None
        layout = self._layout_at(tensor_layout, tensors)
        if layout is None or any(map(Tensor.is_neg, tensors)):
            return None
        first = tensors[0].detach()
        storage = first.untyped_storage()
        start = tensor_layout.address
        end = start + layout.total * first.itemsize
        if end > storage.data_ptr() + storage.nbytes():  # the tensors are in separate storages, adjacent by chance
            return None
        if layout.has_gaps and not blocks.has(start, end):
            return None
        return TensorSpan(
            self._watch(tensors, tensors[:1]), tensor_layout, first.as_strided((layout.total,), (1,)), layout, {}
        )

    def _layout_at(self, tensor_layout: TensorLayout, tensors: Sequence[Tensor]) -> BufferLayout | None:
        """Return the layout of `tensors`; None if their memory does not have it."""
        form = tensor_layout.form
        if form not in self._layouts:
            if len(self._layouts) >= _MOST_SPANS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[form] = _layout_at(tensor_layout.address, tensors)
        return self._layouts[form]

    def _drop(self, key: tuple[int, int], _dead: object) -> None:
        self._spans.pop(key, None)

    def take(self, group: Group, layout: BufferLayout) -> tuple[Tensor, list[Tensor]]:
        """Return a kept or new buffer for `layout`, and the tensors' places in it."""
        spare = self._spare.get(layout)
        if spare:
            return spare.pop()
        return new_buffer(group, layout)

    def give_back(self, layout: BufferLayout, memory: Tensor, views: list[Tensor]) -> None:
        """Keep a buffer for a later group of its layout."""
        spare = self._spare.setdefault(layout, [])
        if len(spare) < _MOST_SPARE:
            spare.append((memory, views))


def _key(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the key of the span of `tensors`."""
    return id(tensors[0]), len(tensors)


def _layout_at(start: int, tensors: Sequence[Tensor]) -> BufferLayout | None:
    layout = layout_of(tensors[0].dtype, tuple(tensor.shape for tensor in tensors))
    size = layout.dtype.itemsize
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        if tensor.data_ptr() != start + offset * size and tensor.numel():  # a tensor without elements has no address
            return None
    return layout
