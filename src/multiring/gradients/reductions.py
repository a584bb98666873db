"""How one bucket's gradients become those of all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.gradients.buckets import BucketLayout, GradientSpec, places_in
from multiring.runtime import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionState:
    """What is carried from one step to the next for one gradient; None where nothing is. Arrays of any library."""

    residual: Any = None  # this rank's own: what it has not sent yet of its gradients so far
    query: Any = None  # PowerSGD's Q, the same on all ranks


class Reduction(Protocol):
    """One bucket, in whatever way its gradients travel.

    Members of the bucket are numbered as in its layout. Gradients are put into `places`, and for each a 1 into `flags`,
    or zeros and a 0 where this rank has no such gradient; then comes `start`. Flags that are not a member's are reduced
    with the others.
    """

    @property
    def places(self) -> Sequence[Any]:
        """Where each member's gradient goes, and comes out: arrays of one library, of the gradients' form."""

    @property
    def flags(self) -> NDArray[Any]:
        """Whether this rank has such a gradient, by member, and the others; reduced, above zero where any is."""

    @property
    def sent_bytes(self) -> int:
        """How much one reduction gives to collectives, as it travels between hosts."""

    def start(self) -> Callable[[], object]:
        """Start to reduce; return what waits until `places` and `flags` are those of all ranks, or raises."""

    def state(self, member: int) -> CompressionState:
        """Return a copy of what is carried on for `member`; not while a reduction is going on."""

    def load_state(self, member: int, state: CompressionState) -> None:
        """Carry `state` on, as far as this reduction has use for it, in place of its own; of fitting shapes."""

    def twin(self) -> "Reduction":
        """Return one with places and flags of its own, for the same gradients of the step after; they take turns.

        Both carry on one state: what one leaves is what the other begins with, though the first one's sums are still
        on their way.
        """


class ArrayReduction(Reduction, Protocol):
    """A reduction whose places are NumPy's, and lie in one piece of memory."""

    @property
    def memory(self) -> NDArray[Any]:
        """The flat memory that the bucket's layout is about, with or without the flags."""

    def twin(self) -> "ArrayReduction":
        """See `Reduction.twin`."""


class Plain:
    """Gradients in their own type, with the flags behind them in one array of the arena."""

    def __init__(self, group: Group, op: str, layout: BucketLayout, specs: Sequence[GradientSpec]) -> None:
        self._group = group
        self._op = op
        self._form = layout, specs
        self.memory = zeros_in_arena(group, layout.count, layout.dtype)
        self.places = places_in(self.memory, layout, specs)
        self.flags = self.memory[layout.flags_offset :]

    @property
    def sent_bytes(self) -> int:
        """How much one reduction gives to collectives, as it travels between hosts."""
        return int(self.memory.nbytes)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return what waits until `places` and `flags` are those of all ranks, or raises."""
        return self._group.all_reduce_async(self.memory, self._op).wait

    def state(self, _member: int) -> CompressionState:
        """Return a copy of what is carried on for `member`; not while a reduction is going on."""
        return CompressionState()

    def load_state(self, _member: int, _state: CompressionState) -> None:
        """Carry `state` on, as far as this reduction has use for it, in place of its own; of fitting shapes."""

    def twin(self) -> "Plain":
        """See `Reduction.twin`."""
        return Plain(self._group, self._op, *self._form)


class Predivided:
    """A reduction whose average is divided in two parts: by `factor` before the sum, and by the rest after it."""

    def __init__(self, summed: Reduction, factor: float, ranks: int) -> None:
        """Divide what `summed`, a reduction that sums, is given and gives."""
        self._summed = summed
        self._parts = factor, ranks
        self._before = 1.0 / factor
        self._after = factor / ranks
        self.places = summed.places
        self.flags = summed.flags

    @property
    def sent_bytes(self) -> int:
        """How much one reduction gives to collectives, as it travels between hosts."""
        return self._summed.sent_bytes

    def start(self) -> Callable[[], object]:
        """Start to reduce; return what waits until `places` and `flags` are those of all ranks, or raises."""
        self._scale(self._before)
        summed = self._summed.start()

        def wait() -> None:
            summed()
            self._scale(self._after)

        return wait

    def _scale(self, factor: float) -> None:
        for place in self.places:  # NumPy's or torch's; 16-bit ones stay so
            part = place
            part *= place.dtype.type(factor) if isinstance(place, np.ndarray) else factor

    def state(self, member: int) -> CompressionState:
        """Return a copy of what is carried on for `member`; not while a reduction is going on."""
        return self._summed.state(member)

    def load_state(self, member: int, state: CompressionState) -> None:
        """Carry `state` on, as far as this reduction has use for it, in place of its own; of fitting shapes."""
        self._summed.load_state(member, state)

    def twin(self) -> "Predivided":
        """See `Reduction.twin`."""
        return Predivided(self._summed.twin(), *self._parts)


def zeros_in_arena(group: Group, count: int, dtype: str) -> NDArray[Any]:
    """Return `count` zeros of `dtype` in the arena.

    Raises:
        ArgumentError: multiring moves no such type, or the rank's segment is full.
    """
    array = group.allocate(count, dtype)
    array.view(np.uint8).fill(0)
    return array
