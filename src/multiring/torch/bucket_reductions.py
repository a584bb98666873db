"""How one bucket's gradients become those of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring.runtime import Group
from multiring.torch.buckets import BucketLayout, places_in
from multiring.torch.interop import allocate


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What is carried from one step to the next for one parameter; None where nothing is."""

    residual: Tensor | None = None  # this rank's own: what it has not sent yet of its gradients so far
    query: Tensor | None = None  # PowerSGD's Q, the same on all ranks


class Reduction(Protocol):
    """One bucket, in whatever way its gradients travel.

    Members of the bucket are numbered as in its layout. Gradients are put into `places`, and for each a 1 into `flags`,
    or zeros and a 0 where this rank has no such gradient; then comes `start`. Flags that are not a member's are reduced
    with the others.
    """

    @property
    def places(self) -> list[Tensor]:
        """Where each member's gradient goes, and comes out; of the parameter's shape and strides."""

    @property
    def flags(self) -> NDArray[Any]:
        """Whether this rank has such a gradient, by member, and the others; reduced, above zero where any is."""

    @property
    def sent_bytes(self) -> int:
        """How much one reduction gives to collectives, as it travels between hosts."""

    def start(self) -> Callable[[], object]:
        """Start to reduce; return what waits until `places` and `flags` are those of all ranks, or raises."""

    def kept(self, member: int) -> Kept:
        """Return a copy of what is carried on for `member`; not while a reduction is going on."""

    def restore(self, member: int, kept: Kept) -> None:
        """Carry `kept` on, as far as this reduction has use for it, in place of its own; of fitting shapes."""


class Plain:
    """Gradients in their own type, with the flags behind them in one array of the arena."""

    def __init__(self, group: Group, op: str, layout: BucketLayout, parameters: list[Tensor]) -> None:
        self._group = group
        self._op = op
        self._memory = allocate(group, layout.count, layout.dtype)
        self.places = places_in(self._memory.tensor, layout, parameters)
        self.flags = self._memory.array[layout.flags_offset :]

    @property
    def sent_bytes(self) -> int:
        """As in Reduction."""
        return int(self._memory.array.nbytes)

    def start(self) -> Callable[[], object]:
        """As in Reduction."""
        return self._group.all_reduce_async(self._memory.array, self._op).wait

    def kept(self, _member: int) -> Kept:
        """As in Reduction."""
        return Kept()

    def restore(self, _member: int, _kept: Kept) -> None:
        """As in Reduction."""


class Translated:
    """Gradients in the form that a compressor of the caller's gives them; see `Reduction`."""

    def __init__(self, group: Group, op: str, compressor: Any, layout: BucketLayout, parameters: list[Tensor]) -> None:
        self._group = group
        self._op = op
        self._compressor = compressor
        self.places = places_in(torch.zeros(layout.flags_offset, dtype=layout.dtype), layout, parameters)
        self._flags = allocate(group, layout.flags, torch.uint8)
        self.flags = self._flags.array
        self.sent_bytes = int(self.flags.nbytes) + sum(place.nbytes for place in self.places)

    def start(self) -> Callable[[], object]:
        """As in Reduction."""
        with torch.no_grad():
            pairs = [self._compressor.compress(place) for place in self.places]
            # The caller's tensor may be the place itself, or a view of it.
            sent = [compressed.contiguous() for compressed, _ in pairs]
        self.sent_bytes = int(self.flags.nbytes) + sum(each.nbytes for each in sent)
        handles = [self._group.all_reduce_async(each, self._op) for each in sent]
        handles.append(self._group.all_reduce_async(self.flags, "max"))

        def wait() -> None:
            for handle in handles:
                handle.wait()
            with torch.no_grad():
                for place, each, (_, context) in zip(self.places, sent, pairs, strict=True):
                    place.copy_(self._compressor.decompress(each, context))

        return wait

    def kept(self, _member: int) -> Kept:
        """As in Reduction."""
        return Kept()

    def restore(self, _member: int, _kept: Kept) -> None:
        """As in Reduction."""


class Predivided:
    """A reduction whose average is divided in two parts: by `factor` before the sum, and by the rest after it."""

    def __init__(self, summed: Reduction, factor: float, ranks: int) -> None:
        """Divide what `summed`, a reduction that sums, is given and gives."""
        self._summed = summed
        self._before = 1.0 / factor
        self._after = factor / ranks
        self.places = summed.places
        self.flags = summed.flags

    @property
    def sent_bytes(self) -> int:
        """As in Reduction."""
        return self._summed.sent_bytes

    def start(self) -> Callable[[], object]:
        """As in Reduction."""
        self._scale(self._before)
        summed = self._summed.start()

        def wait() -> None:
            summed()
            self._scale(self._after)

        return wait

    def _scale(self, factor: float) -> None:
        with torch.no_grad():
            torch._foreach_mul_(self.places, factor)

    def kept(self, member: int) -> Kept:
        """As in Reduction."""
        return self._summed.kept(member)

    def restore(self, member: int, kept: Kept) -> None:
        """As in Reduction."""
        self._summed.restore(member, kept)
