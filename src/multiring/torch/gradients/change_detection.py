"""Were gradients changed since a backward left them? Whoever clips what is not reduced yet clips each rank's own."""

from collections.abc import Iterable

import torch
from torch import Tensor

from multiring.torch.autograd import version_of
from multiring.torch.gradients.parameter_gradient import Bucket, ParameterGradient

_LOOKED_AT = 64  # elements of a gradient


class Witnesses:
    """What the gradients of some buckets were like when they were seen last."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def see(self, buckets: Iterable[Bucket]) -> None:
        """Take note of the gradients as they are; nobody but their owner may write to them from then on."""
        for bucket in buckets:
            largest = max(bucket.gradients, key=lambda entry: entry.view.numel())
            self._seen += [
                _Seen(entry, gradient, is_looked_at=entry is largest)
                for entry in bucket.gradients
                if (gradient := entry.parameter.grad) is not None
            ]

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()

    def changed(self) -> str:
        """Return that, and how, gradients were changed since; "" where none was. One that was dropped was not."""
        for each in self._seen:
            how = each.changed()
            if how:
                return f"gradients (that of {each.entry.name} among them) were {how}"
        return ""


class _Seen:
    """One gradient.

    Some ways of changing gradients count no version, such as a loss scaler's `unscale_`; they change all of them, so
    that it does to look at some elements of a few.
    """

    __slots__ = ("_address", "_elements", "_gradient", "_in_place", "_version", "entry")

    def __init__(self, entry: ParameterGradient, gradient: Tensor, *, is_looked_at: bool) -> None:
        self.entry = entry
        self._gradient = gradient
        self._version = version_of(gradient)
        self._address = gradient.data_ptr() if gradient.layout is torch.strided else None
        self._in_place = self._address is not None and entry.lies_in_place(gradient)
        # Only where elements lie as in the bucket: else their memory may be of another extent.
        is_dense = gradient.layout is torch.strided and gradient.stride() == entry.view.stride()
        self._elements = _elements_of(gradient) if is_looked_at and is_dense else None

    def changed(self) -> str:
        now = self.entry.parameter.grad
        if now is None:
            return ""
        if now is not self._gradient:
            return "replaced"
        if self._in_place and not self.entry.lies_in_place(now):
            # It got other memory, perhaps with the same contents, as by share_memory_(): the place kept what it was.
            place = self.entry.view
            return "" if now.dtype is place.dtype and torch.equal(now, place) else "replaced"
        if self._address is not None and not self._in_place and now.data_ptr() != self._address:
            return "replaced"
        is_other = self._elements is not None and _elements_of(now) != self._elements
        return "changed in place" if is_other or version_of(now) != self._version else ""


def _elements_of(gradient: Tensor) -> bytes:
    """Return a few elements, evenly spaced, of a gradient that lies densely."""
    flat = gradient.as_strided((gradient.numel(),), (1,))
    return flat[:: max(1, len(flat) // _LOOKED_AT)].contiguous().view(torch.uint8).numpy().tobytes()
