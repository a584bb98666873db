"""The reduction of one bucket's gradients over all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring._gradients.buckets import BucketLayout, GradientSpec, places_in
from multiring._runtime import Group
from multiring._runtime.arrays import numpy_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionState:
    """The compression state of one gradient; None for absent parts.

    The arrays may belong to any library.
    """

    residual: Any = None  # the part of this rank's gradients that it has not sent yet
    query: Any = None  # PowerSGD's Q, the same on all ranks


class Reduction(Protocol):
    """The reduction of one bucket, in any form of compression.

    Members of the bucket are numbered as in its layout. The caller puts each gradient into `places` and a 1 into
    `flags`, or zeros and a 0 if this rank does not have the gradient. Then it calls `start`. The flags behind the
    members' flags are reduced, too.
    """

    @property
    def places(self) -> Sequence[Any]:
        """Arrays of each member's gradient, before and after the reduction."""

    @property
    def flags(self) -> NDArray[Any]:
        """The members' flags, followed by further flags.

        After the reduction, a flag is above 0 if any rank has set it.
        """

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction sends, as encoded between hosts."""

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits for the result, or raises."""

    def state(self, member: int) -> CompressionState:
        """Return a copy of `member`'s compression state; call this only while no reduction runs."""

    def load_state(self, member: int, state: CompressionState) -> None:
        """Load the parts of `state` that this reduction uses, for `member`."""

    def twin(self) -> "Reduction":
        """Return a second reduction of the same gradients, with its own places and flags.

        The two reductions take turns from step to step, and share one compression state. The second reduction may start
        before the first has finished. It still uses the state that the first reduction leaves.
        """


Zeros = Callable[[Group, int, str], NDArray[Any]]  # returns a number of zeros of a type; see `zeros_in_arena`


class ArrayReduction(Reduction, Protocol):
    """A reduction whose places are NumPy arrays in one block of memory."""

    @property
    def memory(self) -> NDArray[Any]:
        """The flat memory of the bucket's layout, with or without the flags."""

    def twin(self) -> "ArrayReduction":
        """See `Reduction.twin`."""


class Plain:
    """The reduction of gradients in their own type.

    The flags follow the gradients in one array.
    """

    def __init__(
        self, group: Group, op: str, layout: BucketLayout, specs: Sequence[GradientSpec], zeros: Zeros
    ) -> None:
        self._group = group
        self._op = op
        self._form = layout, specs, zeros
        self.memory = zeros(group, layout.count, layout.dtype)
        self.places = places_in(self.memory, layout, specs)
        self.flags = self.memory[layout.flags_offset :]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction sends, as encoded between hosts."""
        return int(self.memory.nbytes)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits for the result, or raises."""
        return self._group.all_reduce_async(self.memory, self._op).wait

    def state(self, _member: int) -> CompressionState:
        """Return a copy of the compression state of `member`, which is empty."""
        return CompressionState()

    def load_state(self, _member: int, _state: CompressionState) -> None:
        """Do nothing: there is no compression state."""

    def twin(self) -> "Plain":
        """See `Reduction.twin`."""
        return Plain(self._group, self._op, *self._form)


class Predivided:
    """An average with a split divisor: `factor` is applied before the sum, and the rest after it."""

    def __init__(self, summed: Reduction, factor: float, ranks: int) -> None:
        """Wrap `summed`, a reduction that sums."""
        self._summed = summed
        self._parts = factor, ranks
        self._before = 1.0 / factor
        self._after = factor / ranks
        self.places = summed.places
        self.flags = summed.flags

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction sends, as encoded between hosts."""
        return self._summed.sent_bytes

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits for the result, or raises."""
        self._scale(self._before)
        summed = self._summed.start()

        def wait() -> None:
            summed()
            self._scale(self._after)

        return wait

    def _scale(self, factor: float) -> None:
        for place in self.places:  # NumPy's or torch's arrays; 16-bit arrays keep their type
            part = place
            part *= place.dtype.type(factor) if isinstance(place, np.ndarray) else factor

    def state(self, member: int) -> CompressionState:
        """Return a copy of `member`'s compression state; call this only while no reduction runs."""
        return self._summed.state(member)

    def load_state(self, member: int, state: CompressionState) -> None:
        """Load the parts of `state` that this reduction uses, for `member`."""
        self._summed.load_state(member, state)

    def twin(self) -> "Predivided":
        """See `Reduction.twin`."""
        return Predivided(self._summed.twin(), *self._parts)


def zeros_in_arena(group: Group, count: int, dtype: str) -> NDArray[Any]:
    """Return `count` zeros of `dtype` in the arena.

    Raises:
        ArgumentError: multiring does not support `dtype`, or the rank's segment is full.
    """
    array = group.allocate(count, dtype)
    array.view(np.uint8).fill(0)
    return array


def zeros_of_rank(_group: Group, count: int, dtype: str) -> NDArray[Any]:
    """Return `count` zeros of `dtype` in memory that no other rank reads."""
    return np.zeros(count, numpy_dtype(dtype))
