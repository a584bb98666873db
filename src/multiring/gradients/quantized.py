"""Coded gradients: a bucket that takes fewer bytes between hosts, and carries on what that loses.

With error feedback each rank rounds what it is about to send itself, to what a wire would make of it:

    x = gradient + residual        for the gradients that this rank has
    sent = round_trip(x)           reduced over the ranks
    residual = x - sent            goes along with the next gradient

so that this rank's part of all sums is what it sent, whichever way the bytes take: coding `sent` again changes nothing.
What the wires lose of sums of several ranks is not carried on: nobody in particular owes it.

Source: Seide, Fu, Droppo, Li & Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs", Interspeech 2014; Karimireddy, Rebjock, Stich & Jaggi, "Error feedback fixes SignSGD and other
gradient compression schemes", ICML 2019, arXiv 1901.09847.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.gradients.buckets import BucketLayout, GradientSpec, places_in
from multiring.gradients.options import Options
from multiring.gradients.reductions import CompressionState, zeros_in_arena
from multiring.runtime import Group, round_trip
from multiring.schedule import encoded_bytes, wire_of


class Coded:
    """A bucket of float32 gradients that wires code, and its flags, which they must not round; see `Reduction`."""

    def __init__(
        self, group: Group, op: str, options: Options, layout: BucketLayout, specs: Sequence[GradientSpec]
    ) -> None:
        self._group = group
        self._op = op
        self._wire = options.wire
        # The residuals, as gradients lie; None without error feedback.
        zeros = np.zeros(layout.flags_offset, layout.dtype) if options.error_feedback else None
        self._owed: NDArray[Any] | None = zeros
        self._owed_places = [] if zeros is None else places_in(zeros, layout, specs)
        self._form = layout, specs
        self._take_places()

    def _take_places(self) -> None:
        layout, specs = self._form
        group = self._group
        self.memory = zeros_in_arena(group, layout.flags_offset, layout.dtype)
        self.flags = zeros_in_arena(group, layout.flags, "uint8")
        self.places = places_in(self.memory, layout, specs)
        ends = [at + spec.count for at, spec in zip(layout.offsets, specs, strict=True)]
        self._gaps = [slice(end, at) for end, at in zip(ends, [*layout.offsets[1:], self.memory.size], strict=True)]

    @property
    def sent_bytes(self) -> int:
        """How much one reduction gives to collectives, as it travels between hosts."""
        return encoded_bytes(wire_of(self._wire), self.memory.size) + int(self.flags.nbytes)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return what waits until `places` and `flags` are those of all ranks, or raises."""
        # An infinity makes all of its block NaN, also where no gradient lies; nobody else would take that out again.
        for gap in self._gaps:
            self.memory[gap] = 0.0
        if self._owed is not None:
            self._round(self._owed)
        gradients = self._group.all_reduce_async(self.memory, self._op, wire=self._wire)
        flags = self._group.all_reduce_async(self.flags, "max")

        def wait() -> None:
            gradients.wait()
            flags.wait()

        return wait

    def _round(self, owed: NDArray[Any]) -> None:
        """Round gradients with what is owed of them to what travels, and owe the rest."""
        absent = np.flatnonzero(self.flags[: len(self.places)] == 0)
        waiting = [(member, self._owed_places[member].copy()) for member in absent]
        for member in absent:  # what is owed of a gradient that this rank has not is sent with the next one
            self._owed_places[member][...] = 0.0
        with np.errstate(all="ignore"):  # what overflows is an infinity, as in the gradients it comes from
            self.memory += owed
            sent = round_trip(self.memory, self._wire)
            np.subtract(self.memory, sent, out=owed)
        self.memory[...] = sent
        if not np.isfinite(owed).all():
            # What became an infinity or NaN is not owed for ever.
            np.nan_to_num(owed, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        for member, residual in waiting:
            self._owed_places[member][...] = residual

    def state(self, member: int) -> CompressionState:
        """Return a copy of what is carried on for `member`; not while a reduction is going on."""
        return CompressionState(residual=self._owed_places[member].copy("K") if self._owed_places else None)

    def load_state(self, member: int, state: CompressionState) -> None:
        """Carry `state` on, as far as this reduction has use for it, in place of its own; of fitting shapes."""
        if self._owed_places and state.residual is not None:
            self._owed_places[member][...] = state.residual

    def twin(self) -> "Coded":
        """See `Reduction.twin`; what is owed is known as soon as a reduction has started."""
        found = copy(self)
        found._take_places()  # noqa: SLF001 -- of this class
        return found
