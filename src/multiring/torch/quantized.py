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

from collections.abc import Callable

import torch
from torch import Tensor

from multiring.runtime import Group, round_trip
from multiring.schedule import encoded_bytes, wire_of
from multiring.torch.bucket_reductions import Kept
from multiring.torch.buckets import BucketLayout, places_in
from multiring.torch.interop import allocate
from multiring.torch.options import Options


class Coded:
    """A bucket of float32 gradients that wires code, and its flags, which they must not round; see `Reduction`."""

    def __init__(self, group: Group, op: str, options: Options, layout: BucketLayout, parameters: list[Tensor]) -> None:
        self._group = group
        self._op = op
        self._wire = options.wire
        self._memory = allocate(group, layout.flags_offset, layout.dtype)
        self._flags = allocate(group, layout.flags, torch.uint8)
        self.flags = self._flags.array
        self.places = places_in(self._memory.tensor, layout, parameters)
        self._layout = layout
        self._owed: list[Tensor] = []  # the residuals, as the places; empty without error feedback
        if options.error_feedback:
            self._owed = places_in(torch.zeros_like(self._memory.tensor), layout, parameters)

    @property
    def sent_bytes(self) -> int:
        """As in Reduction."""
        return encoded_bytes(wire_of(self._wire), self._memory.array.size) + int(self._flags.array.nbytes)

    def start(self) -> Callable[[], object]:
        """As in Reduction."""
        if self._owed:
            self._round()
        gradients = self._group.all_reduce_async(self._memory.array, self._op, wire=self._wire)
        flags = self._group.all_reduce_async(self._flags.array, "max")

        def wait() -> None:
            gradients.wait()
            flags.wait()

        return wait

    def _round(self) -> None:
        """Round gradients with what is owed of them to what travels, and owe the rest."""
        with torch.no_grad():
            present = [member for member in range(len(self.places)) if self.flags[member]]
            for member in present:
                self.places[member] += self._owed[member]
            rounded = torch.from_numpy(round_trip(self._memory.array, self._wire))
            sent = places_in(rounded, self._layout, self.places)
            for member in present:
                torch.sub(self.places[member], sent[member], out=self._owed[member])
                # What became an infinity or NaN is not owed for ever.
                self._owed[member].nan_to_num_(0.0, 0.0, 0.0)
            self._memory.tensor.copy_(rounded)

    def kept(self, member: int) -> Kept:
        """As in Reduction."""
        return Kept(residual=self._owed[member].clone() if self._owed else None)

    def restore(self, member: int, kept: Kept) -> None:
        """As in Reduction."""
        if self._owed and kept.residual is not None:
            self._owed[member].copy_(kept.residual)
