"""Collectives of tensors on devices: copy to pinned host memory, run the host's collective, copy the result back.

The caller's thread queues the copy to the host and goes on. The process set's submission line waits for the copy and
starts the host's collective on the copy. `wait` waits for the collective, which is the network's time, queues the copy
back and orders the caller's stream behind it. docs/gpu.md describes it for users.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.handles import (
    CallName,
    Name,
    Placed,
    Submitted,
    Unnamed,
    full_name_of,
    refuse_in_flight,
    submit_failure,
    with_ending,
)
from multiring._frontend.process_sets import Members
from multiring._frontend.submission_line import OwnSubmission, Submission
from multiring._runtime import Group, Handle
from multiring._runtime.group.declining import UNTOLD
from multiring.errors import MultiringError
from multiring.torch.device_staging import exhausted, is_pinned_here, staging_of
from multiring.torch.interop import array_of, at_place, in_one_piece


def is_on_device(tensor: Any) -> bool:
    """Return whether `tensor`, which may be any object, is a tensor on a device."""
    return isinstance(tensor, Tensor) and not tensor.is_cpu


class Staged:
    """A submitted operation of device tensors."""

    __slots__ = ("_finish", "_key", "_members", "_submission")

    def __init__(
        self, members: Members, key: str, submission: Submission | OwnSubmission, finish: Callable[[Any], Any]
    ) -> None:
        self._members = members
        self._key = key
        self._submission = submission
        self._finish = finish

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        if not self._submission.done():
            return False
        self._members.in_flight.discard(self._key)
        return True

    def wait(self) -> Any:
        """Wait for the host's collective, queue the copy back, and return the result on the device."""
        try:
            found = self._submission.wait()
        finally:
            self._members.in_flight.discard(self._key)
        return self._finish(found)

    def forget(self) -> None:
        """Make the name usable again. The caller will not wait for the operation."""
        self._members.in_flight.discard(self._key)
        self._submission.forget()


class Staging:
    """The copies to the host of one operation's tensors.

    Args:
        members: the ranks of the set.
        operation: the operation's kind.
        name: the name that the program gave, or None.
        tensors: the operation's tensors, of which at least one is on a device.
        ending: what the operation's first host collective adds to a name that the program gave.

    Raises:
        ArgumentError: an operation of this name was submitted and has not been synchronized.
        UnsupportedError: multiring does not serve the device, or the current stream is capturing a graph.
    """

    def __init__(
        self, members: Members, operation: str, name: Name, tensors: Sequence[Tensor], ending: str = ""
    ) -> None:
        self._members = members
        self._operation = operation
        self._ending = ending
        kinds = [tensor.device.type for tensor in tensors]
        devices = kinds[0] if len(set(kinds)) == 1 else " ".join(kinds)
        if isinstance(name, Placed):
            name = name.name
        self._plain: CallName = Unnamed(members.next_number(), "") if name is None else name
        self.name = Placed(self._plain, devices)
        self._key = ""
        if not isinstance(self._plain, Unnamed):
            self._key = full_name_of(with_ending(self._plain, ending), operation)
            refuse_in_flight(members, self._key, self._key)
        self._events: list[Any] = []
        with self.preparing(tensors):
            for tensor in tensors:
                if not tensor.is_cpu:
                    staging_of(tensor.device).require_no_capture()
        if self._key:
            members.in_flight.add(self._key)

    def copied(self, tensor: Tensor, *, waits: bool = False) -> Tensor:
        """Start to copy a device tensor, and return the row-major pinned copy. A host tensor is returned unchanged.

        With `waits`, the operation is submitted with `waits`, and the caller keeps `tensor`.
        """
        if tensor.is_cpu:
            return tensor
        own = in_one_piece(tensor)
        host = host_memory(self._members.group, own.shape, own.dtype, own.device)
        self._events.append(staging_of(own.device).to_host(own, host, waits=waits))
        return host

    def copied_to(self, targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Start to copy several device tensors to pinned memory of their shapes and types."""
        by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(place)
        for device, places in by_device.items():
            sources = [in_one_piece(tensors[place]) for place in places]
            self._events.append(staging_of(device).all_to_host(sources, [targets[place] for place in places]))

    def submit(
        self, start: Callable[[Name], Submitted], finish: Callable[[Any], Any], *, waits: bool = False
    ) -> Staged:
        """Put the operation on the line.

        Args:
            start: starts the host's collectives under the given name, once the copies have ended.
            finish: turns their result into the result on the device.
            waits: no operation is on the line, and this thread waits for this one next: then it submits it itself.
        """
        steps, events = partial(start, self.name), self._events
        if waits:
            submission: Submission | OwnSubmission = OwnSubmission(steps, events, self._report)
        else:
            submission = self._members.line.put(steps, events, decline=self._report)
        return Staged(self._members, self._key, submission, finish)

    def preparing(self, tensors: Sequence[Tensor]) -> "Preparing":
        """Prepare the operation. An error is reported to all ranks; they raise an error, too."""
        return Preparing(self, tensors)

    def fail(self, error: BaseException, tensors: Sequence[Tensor]) -> None:
        """Give up the operation after an error of its preparation, and tell the other ranks."""
        members, rank = self._members, self._members.group.calls.services.world_rank
        members.in_flight.discard(self._key)
        if isinstance(error, torch.OutOfMemoryError):
            device = next(tensor.device for tensor in tensors if not tensor.is_cpu)
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            named = exhausted(error, rank, size_bytes, device, "a copy in row-major order")
            self._report(named)
            raise named from error
        if isinstance(error, Exception):
            self._report(error)

    def _report(self, error: Exception) -> None:
        report_failure(self._members, self._operation, with_ending(self._plain, self._ending), error)


def report_failure(members: Members, operation: str, plain: CallName, error: Exception) -> None:
    """Submit an operation of the same name that differs from the other ranks' operation, so that they raise, too."""
    if isinstance(error, UNTOLD):
        return
    what = f"{operation} that failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    with suppress(MultiringError):  # this rank raises `error`
        submit_failure(members, full_name_of(plain, operation), what)


class Preparing:
    """The context in which an operation is prepared. It is a class because one of a generator takes longer."""

    __slots__ = ("_staging", "_tensors")

    def __init__(self, staging: Staging, tensors: Sequence[Tensor]) -> None:
        self._staging = staging
        self._tensors = tensors

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Give up the operation after an error."""
        if error is not None:
            self._staging.fail(error, self._tensors)


def host_memory(group: Group, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a row-major tensor in pinned memory, with undefined contents, for copies from and to `device`."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return host_memory(group, shape, dtype, device)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = staging_of(device).pinned_tensor(group, count, dtype)
    return flat if len(shape) == 1 else at_place(flat, dtype, 0, shape)


def on_line(members: Members, group: Group, source: Tensor, start: Callable[[Any], Handle]) -> tuple[Tensor, Any]:
    """Copy a device tensor to the host, run a collective of a group on the copy, and wait for it.

    Args:
        members: the ranks of the set, on whose line the collective starts.
        group: the group of the collective.
        source: the tensor, of a type that NumPy has.
        start: starts the collective on the copy, which is an array.

    Returns:
        The pinned copy, which the collective may have overwritten, and the collective's result.
    """
    decline = partial(group.calls.decline, "")
    with declining_on_line(members, group):
        staging = staging_of(source.device)
        host = host_memory(members.group, source.shape, source.dtype, source.device)
        event = staging.to_host(in_one_piece(source), host)
    return host, members.line.put(lambda: start(array_of(host)), [event], decline=decline).wait()


@contextmanager
def declining_on_line(members: Members, group: Group) -> Iterator[None]:
    """Decline the group's next collective, behind the operations on the set's line, if the block raises an error."""
    try:
        yield
    except UNTOLD:
        raise
    except Exception as error:
        members.line.put(partial(group.calls.decline, "", error))
        raise


def to_device(members: Members, found: Tensor, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Copy a host tensor to `device`, in the order of the caller's current stream, and return the copy.

    The copy is `into`, or a new tensor.
    """
    staging, rank = staging_of(device), members.group.calls.services.world_rank
    if not is_pinned_here(found):
        source = host_memory(members.group, found.shape, found.dtype, device)
        with torch.inference_mode(mode=False), torch.no_grad():
            source.copy_(found)
        found = source
    if into is None:
        try:
            into = torch.empty(found.shape, dtype=found.dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise exhausted(error, rank, found.numel() * found.element_size(), device, "the result") from error
    staging.to_device(found, into.detach())
    return into
