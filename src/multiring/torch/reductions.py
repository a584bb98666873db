"""How one bucket's gradients become those of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from multiring.runtime import Group
from multiring.torch.buckets import BucketLayout, places_in
from multiring.torch.tensors import allocate


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What is carried from one step to the next for one parameter; None where nothing is."""

    residual: Tensor | None = None  # this rank's own: what it has not sent yet of its gradients so far
    query: Tensor | None = None  # PowerSGD's Q, the same on all ranks


class Reduction(Protocol):
    """One bucket, in whatever way its gradients travel.

    Members of the bucket are numbered as in its layout. Gradients are put into `places`, and for each a 1 into `flags`,
    or zeros and a 0 where this rank has no such gradient; then comes `start`.
    """

    @property
    def places(self) -> list[Tensor]:
        """Where each member's gradient goes, and comes out; of the parameter's shape and strides."""

    @property
    def flags(self) -> NDArray[Any]:
        """By member, whether this rank has such a gradient; reduced, it is above zero where any rank had one."""

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
