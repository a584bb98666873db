"""Where the tensors of a group lie in the one buffer that is reduced for all of them.

Tensors lie one after the other, row by row, each at a multiple of 64 bytes from the first one: the same on every rank,
wherever a rank has its own tensors. Where they lie so already, that memory is the buffer.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from multiring.runtime import Group
from multiring.torch.interop import at_place, new_memory
from multiring.torch.layout_cache import TensorLayout, tensor_layout_of

_ALIGNMENT_BYTES = 64
_MOST_SPANS = 256
_MOST_SPARE = 4  # buffers that are kept for the next groups of a layout


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where tensors of one type lie in a flat buffer. Offsets and `total` are in elements; gaps are part of it."""

    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    total: int
    has_gaps: bool

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors' places in the flat `memory`."""
        start = int(memory.storage_offset())
        return [
            at_place(memory, self.dtype, start + offset, shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]


@lru_cache(maxsize=256)
def layout_of(dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> Layout:
    """Return the layout of tensors of these shapes; the same one each time."""
    grain = _ALIGNMENT_BYTES // dtype.itemsize
    offsets, end, has_gaps = [], 0, False
    for shape in shapes:
        start = -(-end // grain) * grain
        has_gaps = has_gaps or start != end
        offsets.append(start)
        end = start + shape.numel()
    return Layout(dtype, shapes, tuple(offsets), end, has_gaps)


def new_buffer(group: Group, layout: Layout) -> tuple[Tensor, list[Tensor]]:
    """Return a new buffer for `layout`, and the tensors' places in it."""
    memory = new_memory(group, (layout.total,), layout.dtype)
    if layout.has_gaps:
        memory.zero_()  # what is in the gaps is reduced as well
    return memory, layout.views(memory)


class Blocks:
    """Memory in which what lies between the tensors is nobody's, as long as it is there."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by start, addresses

    def add(self, owner: object, start: int, size_bytes: int) -> None:
        """Know the memory that `owner` keeps."""
        self._ends[start] = start + size_bytes
        weakref.finalize(owner, self._ends.pop, start, None)

    def has(self, start: int, end: int) -> bool:
        """Return whether all memory from address `start` on to `end` is known, in one piece."""
        return any(first <= start and end <= last for first, last in list(self._ends.items()))


blocks = Blocks()  # of this process; memory outlives groups


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tensors that lie in memory as their layout has them, and that memory as one."""

    watched: list["weakref.ref[Tensor]"]  # as long as they live, nothing else has their identity
    tensor_layout: TensorLayout
    memory: Tensor
    layout: Layout
    repeats: dict[Hashable, Any]  # what whoever reduces it keeps for the next time


class Packing:
    """The buffers of the groups of one process set, kept from one group to the next like it."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int], Span] = {}
        self._layouts: dict[Hashable, Layout | None] = {}  # by the form of layouts; None: they lie otherwise
        self._spare: dict[Layout, list[tuple[Tensor, list[Tensor]]]] = {}

    def span_of(self, tensors: Sequence[Tensor]) -> Span | None:
        """Return the span of `tensors`; None where they are not alike, or do not lie as their layout has them.

        Memory between them is reduced like they are, so it has to be known to be nobody's.
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

    def known_span(self, tensors: Sequence[Tensor]) -> Span | None:
        """Return the span of `tensors` where `span_of` has returned it before."""
        found = self._spans.get(_key(tensors))
        if found is None or not found.tensor_layout.is_of(tensors):
            return None
        if len(found.watched) < len(tensors):
            # Many never come again. Since the first time others may have taken the places of all but the first.
            if any(map(Tensor.is_neg, tensors)):
                return None
            found.watched[:] = self._watch(tensors, tensors)
        return found

    def _watch(self, group: Sequence[Tensor], tensors: Sequence[Tensor]) -> list["weakref.ref[Tensor]"]:
        """Return references to `tensors`; when one of them dies the span of `group` goes, and lets go of its memory."""
        on_death = partial(self._drop, _key(group))
        return [weakref.ref(tensor, on_death) for tensor in tensors]

    def _find(self, tensors: Sequence[Tensor]) -> Span | None:
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
        if end > storage.data_ptr() + storage.nbytes():  # the next tensors are there by chance
            return None
        if layout.has_gaps and not blocks.has(start, end):
            return None
        return Span(
            self._watch(tensors, tensors[:1]), tensor_layout, first.as_strided((layout.total,), (1,)), layout, {}
        )

    def _layout_at(self, tensor_layout: TensorLayout, tensors: Sequence[Tensor]) -> Layout | None:
        """Return the layout of `tensors`; None where they do not lie as it has them."""
        form = tensor_layout.form
        if form not in self._layouts:
            if len(self._layouts) >= _MOST_SPANS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[form] = _layout_at(tensor_layout.address, tensors)
        return self._layouts[form]

    def _drop(self, key: tuple[int, int], _dead: object) -> None:
        self._spans.pop(key, None)

    def take(self, group: Group, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        """Return a buffer for `layout`, and the tensors' places in it."""
        spare = self._spare.get(layout)
        if spare:
            return spare.pop()
        return new_buffer(group, layout)

    def give_back(self, layout: Layout, memory: Tensor, views: list[Tensor]) -> None:
        """Keep a buffer for the next group of its layout."""
        spare = self._spare.setdefault(layout, [])
        if len(spare) < _MOST_SPARE:
            spare.append((memory, views))


def _key(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return what the span of `tensors` is looked up by."""
    return id(tensors[0]), len(tensors)


def _layout_at(start: int, tensors: Sequence[Tensor]) -> Layout | None:
    layout = layout_of(tensors[0].dtype, tuple(tensor.shape for tensor in tensors))
    size = layout.dtype.itemsize
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        if tensor.data_ptr() != start + offset * size and tensor.numel():  # of no elements, it is nowhere
            return None
    return layout
