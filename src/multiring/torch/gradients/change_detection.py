"""Detect gradients that the program changed after a backward and before their reduction.

Clipping such gradients, for example, would clip each rank's own gradients and not the combined ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from multiring.torch.autograd import version_of
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.gradients.parameter_gradient import ParameterGradient, TensorBucket

_IN_PLACE = "changed in place"
_LOOKED_AT = 64  # the number of elements to compare in a gradient


class GradientRecords:
    """A record of the gradients of some buckets, which detects later changes."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def see(self, buckets: Iterable[TensorBucket]) -> None:
        """Record the current gradients of `buckets`; from now on, only the gradient reducer may change them."""
        for bucket in buckets:
            largest = max(bucket.gradients, key=lambda entry: entry.view.numel())
            self._seen += [
                _Seen(entry, gradient, is_looked_at=entry is largest)
                for entry in bucket.gradients
                if (gradient := entry.parameter.grad) is not None
            ]

    def clear(self) -> None:
        """Discard all records."""
        self._seen.clear()

    def changed(self, *, waits: bool) -> str:
        """Return a text that says how recorded gradients were changed, or "" if none was.

        A dropped gradient (`.grad` is None) does not count as changed.

        Args:
            waits: whether the call may wait for a device, to compare elements of gradients on it.
        """
        for each in self._seen:
            how = each.changed(waits=waits)
            if how:
                return _described(each.entry, how)
        return ""

    def compare_later(self) -> "LateComparison | None":
        """Let the devices of recorded gradients copy elements for a later comparison, without a wait of the caller.

        Returns None if no gradient on a device has recorded elements.
        """
        pairs = [(each.entry, *pair) for each in self._seen if (pair := each.elements_on_device()) is not None]
        return LateComparison(pairs) if pairs else None


class LateComparison:
    """Elements of gradients on devices, recorded and current, on their way to the host.

    The number of operations does not depend on the number of gradients.
    """

    def __init__(self, pairs: Sequence[tuple[ParameterGradient, Tensor, Tensor]]) -> None:
        """Queue the copies, on the current stream of each device.

        Args:
            pairs: gradients, with their recorded and their current elements.
        """
        groups: defaultdict[Any, list[tuple[ParameterGradient, Tensor, Tensor]]] = defaultdict(list)
        for pair in pairs:
            groups[pair[1].device, pair[1].dtype].append(pair)
        self._copied = [_CopiedElements(group) for group in groups.values()]

    def changed(self) -> str:
        """Wait for the copies, and return a text that says which gradients were changed, or "" if none was."""
        for each in self._copied:
            entry = each.changed()
            if entry is not None:
                return _described(entry, _IN_PLACE)
        return ""


class _CopiedElements:
    """A part of a comparison: gradients of one device and type."""

    def __init__(self, pairs: Sequence[tuple[ParameterGradient, Tensor, Tensor]]) -> None:
        device = pairs[0][1].device
        module = torch.get_device_module(device)
        stream = module.current_stream(device)
        self._entries = [(entry, len(recorded)) for entry, recorded, _ in pairs]
        with torch.no_grad():
            both = torch.cat([recorded for _, recorded, _ in pairs] + [current for *_, current in pairs])
            self._host = torch.empty_like(both, device="cpu", pin_memory=True).copy_(both, non_blocking=True)
        for _, recorded, current in pairs:  # other streams may have made them, and nobody may keep them
            recorded.record_stream(stream)
            current.record_stream(stream)
        self._event = module.Event()
        self._event.record(stream)

    def changed(self) -> ParameterGradient | None:
        """Wait for the copies; return a gradient whose elements differ, or None."""
        if not self._event.query():
            self._event.synchronize()
        recorded, current = self._host.view(2, -1)
        start = 0
        for entry, length in self._entries:
            part = slice(start, start + length)
            if _bytes_of(recorded[part]) != _bytes_of(current[part]):
                return entry
            start += length
        return None


class _Seen:
    """The record of one gradient.

    Some operations, such as a loss scaler's `unscale_`, change gradients without increasing torch's version counter.
    These operations change all gradients. It is therefore enough to compare some elements of a few gradients. On a
    device, the elements are compared at once only where the caller waits for the device anyway, and otherwise later.
    """

    __slots__ = ("_address", "_elements", "_gradient", "_in_place", "_version", "entry")

    def __init__(self, entry: ParameterGradient, gradient: Tensor, *, is_looked_at: bool) -> None:
        self.entry = entry
        self._gradient = gradient
        self._version = version_of(gradient)
        self._address = gradient.data_ptr() if gradient.layout is torch.strided else None
        self._in_place = self._address is not None and entry.lies_in_place(gradient)
        # Compare elements only if the strides are those of the bucket: otherwise the memory may have another extent.
        is_dense = gradient.layout is torch.strided and gradient.stride() == entry.view.stride()
        self._elements = _elements_of(gradient) if is_looked_at and is_dense else None

    def changed(self, *, waits: bool) -> str:
        now = self.entry.parameter.grad
        if now is None:
            return ""
        if now is not self._gradient:
            return "replaced"
        if self._in_place and not self.entry.lies_in_place(now):
            # The program gave the tensor other memory, perhaps with equal contents, as share_memory_() does. The
            # place in the bucket still has the recorded gradient.
            place = self.entry.view
            return "" if now.dtype is place.dtype and torch.equal(now, place) else "replaced"
        if self._address is not None and not self._in_place and now.data_ptr() != self._address:
            return "replaced"
        is_other = version_of(now) != self._version or self._has_other_elements(now, waits=waits)
        return _IN_PLACE if is_other else ""

    def elements_on_device(self) -> tuple[Tensor, Tensor] | None:
        """Return the recorded and the current elements, if this compares elements on a device."""
        now = self.entry.parameter.grad
        if self._elements is None or now is None or now.device.type == "cpu":
            return None
        # Where the program gave the tensor other memory, `changed` has compared all of it.
        is_same = now is self._gradient and now.data_ptr() == self._address
        return (self._elements, _some_of(now)) if is_same else None

    def _has_other_elements(self, now: Tensor, *, waits: bool) -> bool:
        if self._elements is None or (now.device.type != "cpu" and not waits):
            return False
        return _bytes_of(_elements_of(now)) != _bytes_of(self._elements)


def _elements_of(gradient: Tensor) -> Tensor:
    """Return copies of a few evenly spaced elements of a dense gradient, on its device."""
    return _some_of(gradient).clone()


def _some_of(gradient: Tensor) -> Tensor:
    """Return a view of a few evenly spaced elements of a dense gradient."""
    flat = gradient.detach().as_strided((gradient.numel(),), (1,))
    return flat[:: max(1, len(flat) // _LOOKED_AT)]


def _described(entry: ParameterGradient, how: str) -> str:
    return f"gradients (that of {entry.name} among them) were {how}"


def _bytes_of(elements: Tensor) -> bytes:
    return on_host([elements])[0].view(torch.uint8).numpy().tobytes()
