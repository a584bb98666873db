"""Quantized gradients: fewer bytes between hosts, with optional error feedback.

With error feedback, each rank rounds its gradients to values that the wire type represents exactly, before it sends
them:

    x = gradient + residual        for the gradients that this rank has
    sent = quantize_dequantize(x)           reduced over the ranks
    residual = x - sent            added to the next gradient

So this rank contributes exactly `sent` to all sums on every path, because encoding `sent` again does not change it.
Rounding errors in sums of several ranks are not fed back, because they belong to no single rank.

Source: Seide, Fu, Droppo, Li & Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs", Interspeech 2014; Karimireddy, Rebjock, Stich & Jaggi, "Error feedback fixes SignSGD and other
gradient compression schemes", ICML 2019, arXiv 1901.09847.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._gradients.buckets import BucketLayout, GradientSpec, places_in
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import CompressionState, Zeros, zeros_in_arena
from multiring._runtime import Group, quantize_dequantize
from multiring._schedule import encoded_bytes, wire_of


class Coded:
    """A bucket of float32 gradients that are sent in a wire type; see `Reduction`.

    The flags are sent separately, because they must not be rounded.
    """

    def __init__(
        self,
        group: Group,
        op: str,
        options: GradientOptions,
        layout: BucketLayout,
        specs: Sequence[GradientSpec],
        zeros: Zeros,
    ) -> None:
        self._group = group
        self._op = op
        self._wire = options.wire
        # The residuals have the layout of the gradients. They are None without error feedback.
        owed = np.zeros(layout.flags_offset, layout.dtype) if options.error_feedback else None
        self._owed: NDArray[Any] | None = owed
        self._owed_places = [] if owed is None else places_in(owed, layout, specs)
        self._zeros = zeros
        self._form = layout, specs
        self._take_places()

    def _take_places(self) -> None:
        layout, specs = self._form
        group = self._group
        self.memory = self._zeros(group, layout.flags_offset, layout.dtype)
        self.flags = zeros_in_arena(group, layout.flags, "uint8")
        self.places = places_in(self.memory, layout, specs)
        ends = [at + spec.count for at, spec in zip(layout.offsets, specs, strict=True)]
        self._gaps = [slice(end, at) for end, at in zip(ends, [*layout.offsets[1:], self.memory.size], strict=True)]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction sends, as encoded between hosts."""
        return encoded_bytes(wire_of(self._wire), self.memory.size) + int(self.flags.nbytes)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits for the result, or raises."""
        # An infinity in a gap between gradients would make its whole block NaN, and no other code overwrites the gaps.
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
        """Add the residuals to the gradients, round the sums to the wire type, and keep the rest as residuals."""
        absent = np.flatnonzero(self.flags[: len(self.places)] == 0)
        waiting = [(member, self._owed_places[member].copy()) for member in absent]
        for member in absent:  # if this rank does not have the gradient, the residual waits for the next gradient
            self._owed_places[member][...] = 0.0
        with np.errstate(all="ignore"):  # an overflow becomes an infinity, like one in the gradients
            self.memory += owed
            sent = quantize_dequantize(self.memory, self._wire)
            np.subtract(self.memory, sent, out=owed)
        self.memory[...] = sent
        if not np.isfinite(owed).all():
            # Values that became an infinity or NaN must not stay in the residual forever.
            np.nan_to_num(owed, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        for member, residual in waiting:
            self._owed_places[member][...] = residual

    def state(self, member: int) -> CompressionState:
        """Return a copy of `member`'s compression state; call this only while no reduction runs."""
        return CompressionState(residual=self._owed_places[member].copy("K") if self._owed_places else None)

    def load_state(self, member: int, state: CompressionState) -> None:
        """Load the parts of `state` that this reduction uses, for `member`."""
        if self._owed_places and state.residual is not None:
            self._owed_places[member][...] = state.residual

    def twin(self) -> "Coded":
        """See `Reduction.twin`; the shared residual is final once a reduction starts."""
        found = copy(self)
        found._take_places()  # noqa: SLF001 -- an attribute of the same class
        return found
