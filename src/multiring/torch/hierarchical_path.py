"""All-reduces of CUDA tensors of several hosts: NCCL inside each host, and the host's collectives between the hosts.

A reduction takes five steps (docs/decisions/0122-nccl-inside-hosts.md has the reasons):

    device    NCCL reduces the tensor among the ranks of the host, and leaves each of them a share of the sum
    copy      the share goes to pinned memory
    network   the ranks that own the same share, one of each host, reduce it in host memory
    copy      the share comes back
    device    NCCL gathers the shares among the ranks of the host

The caller's thread starts the first step and goes on. Two threads do the rest: one waits for the copies to the host and
starts the reductions between the hosts; the other waits for these, and starts the last two steps. Both take the tensors
in the order in which the caller started them, which is the same on all ranks.

Verified without GPUs only.
"""

import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from multiring._native import ControlMessage
from multiring._runtime import Group, Handle
from multiring._runtime.engines.device_choice import group_by_nccl
from multiring._topology.device_paths import HostShares
from multiring.errors import CollectiveError, MismatchError, MultiringError, PeerLostError, StallError
from multiring.torch.device_staging import staging_of
from multiring.torch.interop import Shared

_ALIGNMENT_BYTES = 16  # of shares, for the widest loads of a GPU
_NEWS_S = 0.5  # the news of a death comes before that of a rank that left because of it, or soon after
_TOLD = re.compile(r" failed with (\w+): (.*)", re.DOTALL)  # the title of a rank that declines an operation
_NAMED = re.compile(r"rank \d+ could not go on: ")
_KINDS = {each.__name__: each for each in (PeerLostError, StallError)}


@dataclass(frozen=True, slots=True)
class ShareMemory:
    """Memory for a rank's share of a reduction.

    on_device: empty if the rank owns no share.
    on_host: pinned memory; None if the rank owns no share.
    """

    on_device: Tensor
    on_host: Shared | None


@dataclass(slots=True, eq=False)
class _Trip:
    """One reduction in flight.

    wire: the wire type between the hosts.
    scattered: the handle of the first step.
    failure: why this rank does not take the next step.
    returned: the event of the copy back to the device.
    gathered: the handle of the last step.
    """

    tensor: Tensor
    memory: ShareMemory
    op: str
    label: str
    wire: str | None = None
    scattered: Any = None
    failure: BaseException | None = None
    returned: Any = None
    gathered: "Future[Any]" = field(default_factory=Future)


class HierarchicalHandle:
    """The handle of a reduction by `HierarchicalReduction`."""

    __slots__ = ("__weakref__", "_deaths", "_group", "_trip")

    def __init__(self, trip: _Trip, group: Group, deaths: "_Deaths") -> None:
        """Make the handle of a reduction whose last step is an operation of `group`."""
        self._trip, self._group, self._deaths = trip, group, deaths

    def done(self) -> bool:
        """Return whether the hosts have exchanged the data, so that `order` waits for ranks of this host only."""
        return self._trip.gathered.done()

    def order(self, stream: int) -> None:
        """Make a stream of the caller wait for the result. The host waits for the network, and not for the device.

        Raises:
            CollectiveError: the reduction has failed, on this rank or on another one.
        """
        with self._quiet_after_failure():
            gathered = self._trip.gathered.result()
            gathered.order(stream)

    def wait(self) -> None:
        """Wait until the device has the result.

        Raises:
            CollectiveError: as for `order`.
        """
        with self._quiet_after_failure():
            self._trip.gathered.result().wait()

    @contextmanager
    def _quiet_after_failure(self) -> Iterator[None]:
        """Name the cause of a failure. Nothing writes to the share any more, which the next reduction uses again."""
        try:
            with _named_cause(self._group, self._deaths):
                yield
        except BaseException:
            if self._trip.returned is not None:
                self._trip.returned.synchronize()
            raise


class HierarchicalReduction:
    """One rank's end of the reductions of a group whose ranks are on several hosts."""

    def __init__(self, group: Group, inside: tuple[Group, Group], part: HostShares, device: torch.device) -> None:
        """Start the threads.

        Args:
            group: all ranks, in host memory.
            inside: groups of the ranks of this host by NCCL, for the first and for the last step. They are two, because
                ranks may start a reduction before or after the last step of an earlier one.
            part: this rank's part.
            device: this rank's CUDA device.
        """
        self._scatter, self._gather = inside
        self._between = group.subgroup_named(part.between, "owners of one share") if part.between else None
        self._part, self._deaths = part, _Deaths(group)
        self.posted = 0  # how many reductions this rank has started or declined
        self._posted: SimpleQueue[_Trip | None] = SimpleQueue()
        onward: SimpleQueue[tuple[_Trip, Handle | None] | None] = SimpleQueue()
        # The threads hold no reference to this object, so that they end when it is deleted.
        first = _ToHosts(self._scatter, self._between, part, self._deaths, device)
        second = _FromHosts(self._gather, self._between, part, self._deaths, device)
        for name, work in (("to", (_bring_all, self._posted, onward, first)), ("from", (_fetch_all, onward, second))):
            threading.Thread(target=work[0], args=work[1:], name=f"multiring {name} other hosts", daemon=True).start()
        weakref.finalize(self, self._posted.put, None)
        weakref.finalize(self, self._deaths.close)

    @classmethod
    def open(cls, group: Group, device: torch.device) -> "HierarchicalReduction":
        """Make the communicators of this rank's host. All ranks of `group` call it, once for each group.

        Args:
            group: the ranks, in host memory.
            device: this rank's CUDA device.

        Raises:
            MultiringError: NCCL refuses on a rank of this host; the ranks of other hosts do not notice.
        """
        part = HostShares.of(group.topology.hosts, group.rank)
        inside = group.subgroup_named(part.own, "NCCL inside their host")
        return cls(group, (group_by_nccl(inside, device.index), group_by_nccl(inside, device.index)), part, device)

    @property
    def groups(self) -> tuple[Group, Group]:
        """The groups by NCCL."""
        return self._scatter, self._gather

    def padded(self, count: int, dtype: torch.dtype) -> int:
        """Return how many elements the memory of a tensor of `count` elements must have."""
        return self._part.padded(count, max(1, _ALIGNMENT_BYTES // dtype.itemsize))

    def memory(self, padded: int, dtype: torch.dtype, device: torch.device) -> ShareMemory:
        """Return memory for the share of a tensor of `padded` elements, on the device for the current stream.

        Raises:
            torch.OutOfMemoryError: the device has no memory.
            ArgumentError: the rank's segment is full, or CUDA cannot pin the memory.
        """
        count = self._part.counts(padded)[self._part.place]
        share = torch.empty(count, dtype=dtype, device=device)
        if self._between is None:
            return ShareMemory(share, None)
        return ShareMemory(share, staging_of(device).pinned(self._between, count, dtype))

    def all_reduce(
        self, tensor: Tensor, op: str, label: str, memory: ShareMemory, *, wire: str | None = None
    ) -> HierarchicalHandle:
        """Start to reduce a tensor of the device in place, behind the caller's current stream; return the handle.

        Args:
            tensor: flat, with as many elements as `padded` returns.
            op: the operation.
            label: the operation's name in errors and timelines.
            memory: what `memory` returned for this size and type; no other reduction in flight may use it.
            wire: the wire type between the hosts, for float32; None for the tensor's own.
        """
        trip = _Trip(tensor, memory, op, label, wire)
        self.posted += 1
        try:
            trip.scattered = self._begun(trip)
        except BaseException as error:  # the other ranks wait for the next steps
            trip.failure = error
            raise
        finally:
            self._posted.put(trip)
        return HierarchicalHandle(trip, self._gather, self._deaths)

    def decline(self, error: Exception) -> None:
        """Take part in the next reduction so that it fails on all ranks, because of `error`."""
        self.posted += 1
        _decline(self._scatter, "", error)
        nothing = torch.empty(0, device="cpu")
        self._posted.put(_Trip(nothing, ShareMemory(nothing, None), "", "", failure=error))

    def _begun(self, trip: _Trip) -> Any:
        """Start the first step."""
        calls, count = self._scatter.calls, trip.tensor.numel()
        try:
            buffers = calls.buffer_of(trip.tensor, writes=True), calls.buffer_of(trip.memory.on_device, writes=True)
        except BaseException as error:
            _decline(self._scatter, trip.label, error)
            raise
        title = f"reduce_scatter {trip.op} of {count} elements of {trip.tensor.dtype}"
        return self._scatter.known_sizes.reduce_scatter(
            buffers, self._part.counts(count), trip.op, title, waits=False, label=trip.label
        )


class _ToHosts:
    """The second and the third step: the share goes to pinned memory, and its owners begin to reduce it."""

    def __init__(
        self, scatter: Group, between: Group | None, part: HostShares, deaths: "_Deaths", device: torch.device
    ) -> None:
        self._scatter, self._between, self._weight, self._deaths = scatter, between, part.weight, deaths
        self._staging, self._module = staging_of(device), torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def bring(self, trip: _Trip) -> Handle | None:
        """Take the steps; return the handle of the third, or None if this rank takes no part or has failed."""
        shared = trip.memory.on_host
        if self._between is None or (shared is None and trip.failure is None):
            return None
        try:
            self._copy(trip, shared)
        except BaseException as error:  # noqa: BLE001 -- the handle raises it
            trip.failure = error
            _decline(self._between, trip.label, error)
            return None
        assert shared is not None  # noqa: S101
        try:
            return self._between.all_reduce_async(shared.array, trip.op, wire=trip.wire, label=trip.label)
        except BaseException as error:  # noqa: BLE001 -- the handle raises it; the other owners know
            trip.failure = error
            return None

    def _copy(self, trip: _Trip, host: Shared | None) -> None:
        """Copy the share to the host, and wait for the copy."""
        if trip.failure is not None or host is None:
            raise trip.failure or AssertionError(trip)
        share = trip.memory.on_device
        with _named_cause(self._scatter, self._deaths), self._module.stream(self._stream):
            trip.scattered.order(self._stream.cuda_stream)
            if trip.op == "average" and self._weight != 1.0:
                share.mul_(self._weight)
            self._staging.to_host(share, host.tensor, waits=True).synchronize()
            # If a rank of this host has died, the stream went on, and the share is undefined. It must not travel.
            trip.scattered.wait()


class _FromHosts:
    """The last two steps: the share comes back to the device, and NCCL gathers the shares of the host."""

    def __init__(
        self, gather: Group, between: Group | None, part: HostShares, deaths: "_Deaths", device: torch.device
    ) -> None:
        self._gather, self._between, self._part, self._deaths = gather, between, part, deaths
        self._staging, self._module = staging_of(device), torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def fetch(self, trip: _Trip, reduced: Handle | None) -> None:
        """Take the steps, after the third has ended."""
        calls = self._gather.calls
        try:
            self._await(trip, reduced)
            with self._module.stream(self._stream):
                if trip.memory.on_host is not None:
                    trip.returned = self._staging.to_device(trip.memory.on_host.tensor, trip.memory.on_device)
                share = calls.buffer_of(trip.memory.on_device.view(torch.uint8), writes=False)
                whole = calls.buffer_of(trip.tensor.view(torch.uint8), writes=True)
        except BaseException as error:  # noqa: BLE001 -- the handle raises it
            _decline(self._gather, trip.label, error)
            trip.gathered.set_exception(error)
            return
        sizes = self._part.counts(trip.tensor.nbytes)
        try:
            trip.gathered.set_result(
                self._gather.known_sizes.all_gather(
                    share, whole, sizes, f"all_gather of {trip.tensor.nbytes} bytes", waits=False, label=trip.label
                )
            )
        except BaseException as error:  # noqa: BLE001 -- the handle raises it; the other ranks know
            trip.gathered.set_exception(error)

    def _await(self, trip: _Trip, reduced: Handle | None) -> None:
        """Wait for the third step."""
        if trip.failure is not None:
            raise trip.failure
        if reduced is not None and self._between is not None:
            with _named_cause(self._between, self._deaths):
                reduced.wait()


def _bring_all(posted: "SimpleQueue[_Trip | None]", onward: "SimpleQueue[Any]", steps: _ToHosts) -> None:
    while (trip := posted.get()) is not None:
        onward.put((trip, steps.bring(trip)))
        del trip  # otherwise its memory would live until the next one comes
    onward.put(None)


def _fetch_all(onward: "SimpleQueue[tuple[_Trip, Handle | None] | None]", steps: _FromHosts) -> None:
    while (item := onward.get()) is not None:
        steps.fetch(*item)
        del item


def _decline(group: Group, label: str, error: BaseException) -> None:
    """Make the group's next operation fail on the other ranks, with this rank's error."""
    told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    with suppress(MultiringError):
        group.calls.decline(label, told)


class _Deaths:
    """Hears which rank of a job's group has died first."""

    def __init__(self, group: Group) -> None:
        calls = group.calls
        self._ranks = dict(zip(calls.ranks, group.ranks, strict=True))
        self._first, self._id = "", calls.purpose_id("deaths")
        self._control = calls.services.control
        if self._control is not None:
            self._control.add(self._id, self)

    def close(self) -> None:
        """Hear no more."""
        if self._control is not None:
            self._control.remove(self._id)

    def cause_of(self, error: PeerLostError) -> PeerLostError | None:
        """Return an error with the death for which another rank left; None if `error` names it, or none has died."""
        if self._control is not None:
            self._control.wait_until_handled(_NEWS_S)
        return PeerLostError(f"{self._first}; so {error}") if self._first and self._first not in str(error) else None

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Note the death of a rank of the group."""
        if died and rank in self._ranks and not self._first:
            self._first = f"rank {self._ranks[rank]} died: {why}"

    def hear(self, notice: ControlMessage) -> None:
        """Ignore a message."""

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: this listener has no operations."""
        return False

    def end(self) -> None:
        """Do nothing: this rank leaves."""


@contextmanager
def _named_cause(group: Group, deaths: _Deaths) -> Iterator[None]:
    """Name the cause if an operation of `group`, a part of the ranks, fails because of another rank's failure.

    Raises:
        CollectiveError: with the rank that declined the operation, and its error; or with the rank that died.
    """
    try:
        yield
    except CollectiveError as error:
        if _NAMED.match(str(error)):  # by another step, whose group has other ranks
            raise
        for each in _with_contexts(error):
            for rank, title in each.titles.items() if isinstance(each, MismatchError) else ():
                if (told := _TOLD.search(title)) is not None:
                    kind = _KINDS.get(told[1], CollectiveError)
                    raise kind(f"rank {group.ranks[rank]} could not go on: {told[2]}") from error
        if isinstance(error, PeerLostError) and (cause := deaths.cause_of(error)) is not None:
            raise cause from error
        raise


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    """Return `error` and the errors that came before it: the rank that declined may have left the job since then."""
    found: BaseException | None = error
    known: set[int] = set()
    while found is not None and id(found) not in known:  # an error that several threads raise may be its own context
        known.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
