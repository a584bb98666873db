"""Buckets of gradients on a device, reduced through host memory.

A bucket of a device has a flat block of the device's memory and the reduction of a bucket of the host, whose memory the
device's copies reach (`device_staging`). A reduction takes four steps:

    the caller's thread   queues the copy to the host, behind the streams that wrote the gradients
    the starting thread   waits for this copy, and starts the host's reduction
    the ending thread     waits for the host's reduction, and queues the copy back
    the caller's thread   makes its stream wait for the copy back

The caller's thread therefore waits for the network, and never calls a function that waits for the device. Both threads
take the buckets in the order in which the caller started them. This order is the same on all ranks. Buckets of the host
are started by the caller's thread, so they belong to another group.

Flags, residuals and the factors of PowerSGD stay in host memory, with the host's reduction.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring._gradients.buckets import BucketLayout
from multiring._gradients.reductions import CompressionState, Reduction
from multiring._runtime import Group
from multiring.errors import MultiringError
from multiring.torch.device_staging import DeviceStaging, staging_of
from multiring.torch.gradients.sparse_rows import Gathered


@dataclass(frozen=True, slots=True, eq=False)
class _Trip:
    """One reduction through the host.

    copied: events of devices, behind the copies to the host.
    start: starts the host's reduction, and returns a function that waits for it.
    end: queues the copy back, and returns its event.
    """

    copied: Sequence[Any]
    start: Callable[[], Callable[[], object]]
    end: Callable[[], Any]
    outcome: "Future[Any]" = field(default_factory=Future)


class StagedOrder:
    """The two threads that take buckets through the host, in the order of the calls.

    Each gradient reducer has an order of its own, so that a slow device does not delay the buckets of another reducer.
    """

    def __init__(self, group: Group) -> None:
        """Make the order of buckets whose reductions begin with an operation of `group`."""
        self._group = group
        self._starting: SimpleQueue[_Trip | None] = SimpleQueue()
        self._is_running = False

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Fail the next bucket on all ranks if the block, which comes before its `post`, raises an error."""
        try:
            yield
        except Exception as error:

            def start() -> Callable[[], object]:
                raise failure

            failure = error
            self.post((), start, _nothing)
            raise

    def post(
        self, copied: Sequence[Any], start: Callable[[], Callable[[], object]], end: Callable[[], Any]
    ) -> "Future[Any]":
        """Take a bucket through the host after all earlier ones; return a future of the result of `end`.

        If a reduction cannot start, this rank declines it, so that it fails on all ranks, and the order stays the same.

        Args:
            copied: events of devices, behind the copies to the host.
            start: starts the host's reduction, and returns a function that waits for it.
            end: is called after the host's reduction.
        """
        if not self._is_running:
            self._run()
        trip = _Trip(copied, start, end)
        self._starting.put(trip)
        return trip.outcome

    def _run(self) -> None:
        ending: SimpleQueue[tuple[_Trip, Callable[[], object]] | None] = SimpleQueue()
        # The threads hold no reference to this object, so that they stop when it is deleted.
        starting = _start_all, self._group, self._starting, ending
        for name, work in (("start", starting), ("end", (_end_all, ending))):
            threading.Thread(target=work[0], args=work[1:], name=f"multiring bucket {name}", daemon=True).start()
        weakref.finalize(self, self._starting.put, None)
        self._is_running = True


def _wait_for(copied: Sequence[Any]) -> None:
    """Wait until the copies to the host have ended."""
    for event in copied:
        event.synchronize()


def _start_all(group: Group, starting: "SimpleQueue[_Trip | None]", ending: "SimpleQueue[Any]") -> None:
    while (trip := starting.get()) is not None:
        before = group.calls.last
        try:
            _wait_for(trip.copied)
            ending.put((trip, trip.start()))
        except Exception as error:  # noqa: BLE001 -- the future raises it
            if group.calls.last == before:
                with suppress(MultiringError):  # no other rank can be reached
                    group.calls.decline("", error)
            trip.outcome.set_exception(error)
        del trip  # otherwise the bucket would live until the next one arrives
    ending.put(None)


def _end_all(ending: "SimpleQueue[Any]") -> None:
    while (item := ending.get()) is not None:
        trip, wait = item
        try:
            wait()
            trip.outcome.set_result(trip.end())
        except BaseException as error:  # noqa: BLE001 -- the future raises it
            trip.outcome.set_exception(error)
        del item, trip, wait  # otherwise the bucket would live until the next one arrives


class DeviceBucket:
    """A bucket's flat memory on a device, and the order between its users and the streams that write gradients."""

    def __init__(self, count: int, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Make a bucket of zeros.

        Args:
            count: the elements of the memory.
            parameters: the bucket's members, on the device.
            dtype: the type of the memory.
        """
        self._device = parameters[0].device
        self._module = torch.get_device_module(self._device)
        self._memory = torch.zeros(count, dtype=dtype, device=self._device)
        self._made = self._module.Event()
        self._made.record(self._module.current_stream(self._device))
        self._seen = [self._module.current_stream(self._device)]  # streams that come after the zeros
        self._streams: list[Any] = []  # the streams that wrote the gradients of the next reduction

    def come_behind(self) -> None:
        """Record that the caller's current stream is about to write gradients."""
        stream = self._module.current_stream(self._device)
        if stream not in self._seen:
            stream.wait_event(self._made)
            self._seen.append(stream)
        if stream not in self._streams:
            self._streams.append(stream)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits until the flags are reduced.

        The caller's stream then waits until the places hold the reduced values.
        """
        posted = self.post()
        return lambda: self.come_after(posted.result())

    def post(self) -> "Reducing":
        """Start to reduce."""
        raise NotImplementedError

    def come_after(self, reduced: Any) -> None:
        """Make the caller's current stream wait for the result of `post`."""
        raise NotImplementedError

    def _await_writers(self) -> None:
        """Make the caller's current stream wait for all streams that wrote gradients."""
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
        self._streams.clear()


class Reducing(Protocol):
    """A reduction that was started."""

    def result(self) -> Any:
        """Wait until the flags are reduced; return what `come_after` makes a stream wait for."""


class OnDevice(DeviceBucket):
    """The reduction of a bucket of a device through host memory; see `Reduction`."""

    def __init__(
        self,
        inner: Reduction,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        staging: DeviceStaging,
        order: StagedOrder,
    ) -> None:
        """Make a bucket of the device for the bucket `inner` of the host.

        Args:
            inner: the reduction of the same gradients in the host's memory, which the device's copies reach.
            layout: the layout of both buckets.
            parameters: the bucket's members, on the device.
            staging: makes the copies.
            order: takes the buckets through the host.
        """
        self._inner = inner
        self._form = layout, parameters, staging, order
        self._staging = staging
        self._order = order
        self._host = inner.places[0].as_strided((layout.flags_offset,), (1,), 0)
        super().__init__(layout.flags_offset, parameters, self._host.dtype)
        self.places = [
            self._memory.as_strided(place.shape, place.stride(), place.storage_offset()) for place in inner.places
        ]

    @property
    def flags(self) -> NDArray[Any]:
        """The flags, in host memory."""
        return self._inner.flags

    @property
    def sent_bytes(self) -> int:
        """The bytes that one reduction passes to collectives, in the form that travels between hosts."""
        return self._inner.sent_bytes

    def come_after(self, reduced: Any) -> None:
        """Make the caller's current stream wait for the event of the copy back."""
        self._module.current_stream(self._device).wait_event(reduced)

    def post(self) -> "Future[Any]":
        """Start to reduce; return a future of an event, behind which `places` hold the reduced values."""
        with self._order.preparing():
            self.come_behind()
            self._await_writers()
            copied = self._staging.to_host(self._memory, self._host)
        return self._order.post([copied], self._inner.start, lambda: self._copy_back(copied))

    def _copy_back(self, copied: Any) -> Any:
        return self._staging.to_device(self._host, self._memory, after=copied)

    def state(self, member: int) -> CompressionState:
        """Return a copy of `member`'s compression state, in host memory; call this only while no reduction runs."""
        return self._inner.state(member)

    def load_state(self, member: int, state: CompressionState) -> None:
        """Replace `member`'s compression state by `state`, of any device."""
        self._inner.load_state(member, state)

    def twin(self) -> "OnDevice":
        """See `Reduction.twin`."""
        return OnDevice(self._inner.twin(), *self._form)


class GatheredOnDevice(Gathered):
    """The reduction of the rows of a device's gradient; see `Gathered`.

    The rows are added up in host memory, because torch's operation on the device makes the caller's thread wait.
    """

    def __init__(self, group: Group, op: str, parameter: Tensor, staging: DeviceStaging, order: StagedOrder) -> None:
        super().__init__(group, op, parameter)
        self._staging = staging
        self._order = order
        self._device = parameter.device
        self._module = torch.get_device_module(self._device)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits until `gradient` and `flags` hold the reduced values."""
        own, self._own = self._own, None
        parts: list[Tensor] = []
        with self._order.preparing():
            if own is not None:
                own = own.detach()
                parts = [own] if own.layout is torch.strided else [own._indices(), own._values()]  # noqa: SLF001 -- torch's
            copies = [self._copied(part) for part in parts]
        places = [place for place, _ in copies]
        outcome = self._order.post([event for _, event in copies], lambda: self._start_on_host(own, places), _nothing)

        def wait() -> None:
            outcome.result()
            if self.gradient is not None:
                self.gradient = self._on_device(self.gradient)

        return wait

    def _copied(self, part: Tensor) -> tuple[Tensor, Any]:
        flat = part.contiguous().view(-1)
        target = self._staging.pinned(self._group, flat.numel(), flat.dtype).tensor
        return target.view(part.shape), self._staging.to_host(flat, target)

    def _start_on_host(self, own: Tensor | None, parts: Sequence[Tensor]) -> Callable[[], object]:
        if own is not None:
            is_dense = own.layout is torch.strided
            self.bring(parts[0] if is_dense else _rows(parts, own.shape, is_coalesced=False))
        return super().start()

    def _on_device(self, rows: Tensor) -> Tensor:
        """Return a coalesced sparse tensor of the host on the device."""
        moved = []
        for part in (rows.indices(), rows.values()):
            source = self._staging.pinned(self._group, part.numel(), part.dtype).tensor
            source.copy_(part.contiguous().view(-1))
            target = torch.empty(part.shape, dtype=part.dtype, device=self._device)
            self._staging.to_device(source, target.view(-1))
            moved.append(target)
        return _rows(moved, rows.shape, is_coalesced=True)

    def twin(self) -> "GatheredOnDevice":
        """See `Reduction.twin`."""
        return GatheredOnDevice(self._group, self._op, self._parameter, self._staging, self._order)


def _rows(parts: Sequence[Tensor], shape: torch.Size, *, is_coalesced: bool) -> Tensor:
    indices, values = parts
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=is_coalesced)


def _nothing() -> None:
    """Return nothing: rows are copied back by the caller's thread, which knows how many there are."""


class HostCopies:
    """Copies of tensors in host memory, made and written back without waiting for a device on the caller's thread."""

    def __init__(self, tensors: Sequence[Tensor], group: Group) -> None:
        """Queue the copies. Tensors of the host are not copied.

        Args:
            tensors: dense tensors without gaps, of any devices.
            group: a group whose part of the arena is used.
        """
        self._tensors = tensors
        self.copied: list[Any] = []
        self.places: list[Tensor] = []
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self.places.append(tensor)
                continue
            staging = staging_of(tensor.device)
            place = staging.pinned(group, tensor.numel(), tensor.dtype).tensor
            self.places.append(place.as_strided(tensor.shape, tensor.stride()))
            self.copied.append(staging.to_host(tensor, self.places[-1]))

    def write_back(self) -> None:
        """Queue copies from the places to the tensors."""
        for tensor, place in zip(self._tensors, self.places, strict=True):
            if place is not tensor:
                staging_of(tensor.device).to_device(place, tensor)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return dense tensors in host memory.

    Tensors of the host are returned themselves. If there are others, the call waits until their devices have computed
    them. Do not call this in every step.
    """
    copies, last = [], {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            copies.append(tensor)
            continue
        module = torch.get_device_module(tensor.device)
        source = tensor.detach()
        copies.append(torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True))
        last[tensor.device] = module.Event()
        last[tensor.device].record(module.current_stream(tensor.device))
    for event in last.values():
        event.synchronize()
    return copies
