"""All-reduces of tensors on a device by NCCL, or by NCCL inside each host, if all ranks can; else in host memory.

The caller's thread copies the tensors to a buffer that NCCL will reduce, or to host memory if this rank knows that NCCL
is out of the question. The tensors themselves stay as they are until the caller waits, and an operation that the ranks
have to start again finds them intact. Then the ranks agree (`_frontend/follow_ups.py`), and a thread gives the device
the operation, or starts the host's reduction.

When the ranks expect to agree on NCCL, a thread gives the device the operation before. If they disagree, NCCL's
communicator is aborted, and the tensors are reduced on the host. When the ranks expect that NCCL stays out of the
question, they do not agree any more. docs/decisions/0121-nccl-in-torch.md has the reasons.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.errors import internal
from multiring._frontend.follow_ups import DEVICE_PATH, LATER, NEVER, NO, YES
from multiring._frontend.handles import Name, Pending, Submitted, submit
from multiring._frontend.process_sets import Members
from multiring._frontend.reduce_ops import Average, Combination, name_of
from multiring._frontend.signatures import ALLREDUCE, OPERATION
from multiring._runtime import Group, Handle
from multiring._runtime.group.declining import declining
from multiring.errors import CollectiveError, MultiringError, Signature
from multiring.planner import LEAST_NCCL_BYTES
from multiring.torch.collectives.dtype_conversion import conversion_of
from multiring.torch.collectives.staged import Staging, host_memory, to_device
from multiring.torch.device_staging import staging_of
from multiring.torch.fusion_buffer import BufferLayout, layout_of
from multiring.torch.hierarchical_path import HierarchicalHandle, ShareMemory
from multiring.torch.interop import array_of, in_one_piece
from multiring.torch.path_agreement import (
    FORCED,
    NCCL_TYPES,
    DevicePath,
    PathChoice,
    agree_on_choice,
    path_by,
    takes_nccl,
)

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool})
LEAST_BYTES = LEAST_NCCL_BYTES
"""Smaller operations are staged, unless the program wants NCCL: the host reduces them in the time of an agreement."""
_FURTHER = ((DEVICE_PATH, "nccl if all ranks can"),)


class SetPath:
    """The way of one process set's collectives of tensors on devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: torch.device | None = None
        self._choice: Future[PathChoice] = Future()
        self._decided: Future[DevicePath] = Future()
        self._streams: dict[torch.device, Any] = {}
        self.last_ahead: Callable[[], Any] = _none
        """Returns the last operation of NCCL that this rank has started ahead; None if nobody needs it any more."""

    def begin(self, group: Group, device: torch.device) -> None:
        """Begin to decide with the other ranks. The first call starts a thread; collectives are staged until it ends.

        All ranks of the set call it, for their first collective of tensors on a device. They do not wait: a rank may
        wait for another operation of the program meanwhile.
        """
        with self._lock:
            if self._device is not None:
                return
            self._device = device
        over = group.twin_for("collectives of device tensors")
        threading.Thread(
            target=_decide, args=(self._choice, self._decided, over, device), name="multiring device path", daemon=True
        ).start()

    def ready(self) -> tuple[DevicePath, torch.device] | None:
        """Return the way by NCCL, and the device on which it reduces, if the ranks have agreed on it."""
        if not self._decided.done() or self._decided.exception() is not None:
            return None
        path, device = self._decided.result(), self._device
        return (path, device) if path.uses_nccl and device is not None else None

    @property
    def is_impossible(self) -> bool:
        """Whether the ranks have decided that NCCL is out of the question, without an error."""
        return self._decided.done() and self._decided.exception() is None and not self._decided.result().uses_nccl

    def require_possible(self) -> None:
        """Raise if NCCL cannot be used and the program wants it. All ranks of the set have called `begin`.

        Raises:
            UnsupportedError: on all ranks: MULTIRING_DEVICE_PATH asks for NCCL, and NCCL cannot be used on some rank.
            CollectiveError: the ranks could not decide.
        """
        self._choice.result()
        if self._decided.done():
            self._decided.result()

    def decline(self, error: Exception) -> None:
        """Take part in NCCL's next operation so that it fails on all ranks, because of `error`."""
        self._decided.result().decline(error)

    def await_refusals(self) -> None:
        """Wait until the ranks know which operations that started ahead they take back.

        If a rank started another operation before, they might take that one back, too.
        """
        last = self.last_ahead()
        if last is not None:
            last.is_refused()

    def make_up(self) -> None:
        """Take part in an operation that other ranks have started ahead, so that it fails on all ranks."""
        self.decline(CollectiveError("this rank has started another operation in its place, or none"))

    def stream_of(self, device: torch.device) -> Any:
        """Return a stream on which the thread of the follow-ups orders its work."""
        found = self._streams.get(device)
        if found is None:
            found = self._streams[device] = torch.get_device_module(device).Stream(device)
        return found


def _none() -> None:
    """Return no operation."""


def _decide(choice: "Future[PathChoice]", decided: "Future[DevicePath]", group: Group, device: torch.device) -> None:
    try:
        choice.set_result(agree_on_choice(group, device))
        decided.set_result(path_by(group, device, "collectives", choice.result()))
    except BaseException as error:  # noqa: BLE001 -- collectives are staged, or raise it
        if not choice.done():
            choice.set_exception(error)
        decided.set_exception(error)


def may_serve(members: Members, tensors: Sequence[Tensor], how: Combination) -> bool:
    """Return whether the ranks must agree on the way of this reduction: the same on all ranks for equal signatures.

    Args:
        members: the ranks of the set.
        tensors: dense tensors.
        how: the way to combine them.
    """
    dtype = tensors[0].dtype
    if how.prescale != 1.0 or how.wire is not None or members.size == 1:
        return False
    if dtype not in (NCCL_TYPES if how.op == Average else NCCL_TYPES | _INTEGERS):
        return False
    if any(tensor.is_cpu or tensor.dtype != dtype or not tensor.numel() for tensor in tensors):
        return False
    if name_of(how.op) == "adasum" or not conversion_of(dtype, how.op, how.postscale, members.size).is_plain:
        return False
    return members.kept(_Served).serves(
        members.group, sum(tensor.numel() for tensor in tensors), dtype, name_of(how.op)
    )


class _Served:
    """Which reductions of a process set take the path by NCCL. The planner is asked once for each size."""

    MOST = 4096  # sizes that are kept

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, str, int], bool] = {}

    def serves(self, group: Group, elements: int, dtype: torch.dtype, op: str) -> bool:
        """Return whether a reduction of `elements` takes the path by NCCL, if the ranks have one."""
        key = elements, dtype, op, LEAST_BYTES
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self.MOST:
                self._known.clear()
            found = self._known[key] = takes_nccl(group, *key)
        return found


class Agreed:
    """A submitted operation on whose way the ranks agree."""

    __slots__ = ("_pending", "_reduction")

    def __init__(self, pending: Submitted, reduction: "_Reduction") -> None:
        self._pending = pending
        self._reduction = reduction

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._pending.done() and self._reduction.done()

    def wait(self) -> Any:
        """Wait for the other ranks, order the caller's stream behind the result, and return the result."""
        return self._pending.wait()

    def forget(self) -> None:
        """Make the name usable again. The caller will not wait for the operation."""
        self._pending.forget()


class _Copies(Staging):
    """The copies to the host of one operation's tensors, for a thread that waits for them."""

    def await_copies(self) -> None:
        """Wait until the copies have ended."""
        while self._events:
            self._events.pop(0).synchronize()


class _Reduction:
    """One all-reduce of tensors of one type, as one buffer."""

    def __init__(
        self, members: Members, staging: _Copies, tensors: Sequence[Tensor], how: Combination, *, is_group: bool
    ) -> None:
        self._members, self._staging = members, staging
        self._layout: BufferLayout = layout_of(tensors[0].dtype, tuple(tensor.shape for tensor in tensors))
        self._shape = (self._layout.total,) if is_group else tensors[0].shape  # on which the ranks agree
        self._op = name_of(how.op)
        self._device = tensors[0].device
        self._module = torch.get_device_module(self._device)
        self._set_path = members.kept(SetPath)
        self._set_path.begin(members.group, self._device)
        self._label = ""
        self._outcome: Future[Any] = Future()
        self._buffer: Tensor | None = None  # on the device
        self._shares: ShareMemory | None = None
        self._host: Tensor | None = None
        self._sources: Sequence[Tensor] = ()  # what the buffer has a copy of, until NCCL's result is certain
        self._ahead: Any = None  # NCCL's operation that started before the agreement; an error if it could not
        self._is_direct = self._is_ahead = False  # what the ranks expected when it was posted
        self._path = None
        if (ready := self._set_path.ready()) is not None:
            # Tensors of another device are copied to this one. Staging them would end NCCL's operations on all ranks.
            self._path, self._device = ready
            self._copy_on_device(tensors)
        if self._buffer is None:
            self._path = None
            self._host = self._host_memory()
            staging.copied_to(self._layout.views(self._host), tensors)
        self.answer = self._own_answer()

    def _own_answer(self) -> int:
        if self._path is not None:
            return YES if self._path.starts_ahead else LATER
        return NEVER if self._set_path.is_impossible else NO

    def _copy_on_device(self, tensors: Sequence[Tensor]) -> None:
        layout = self._layout
        assert self._path is not None  # noqa: S101
        count = self._path.padded(layout.total, layout.dtype)
        make = torch.zeros if layout.has_gaps or count > layout.total else torch.empty
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                buffer = make(count, dtype=layout.dtype, device=self._device)
                self._shares = self._path.memory(count, layout.dtype, self._device)
                torch._foreach_copy_(layout.views(buffer), [in_one_piece(each) for each in tensors])
        except torch.OutOfMemoryError:  # this reduction takes no memory of the device if it is staged
            return
        self._written = self._module.Event()
        self._written.record(self._module.current_stream(self._device))
        self._buffer = buffer
        self._sources = [each.detach() for each in tensors]

    def _host_memory(self) -> Tensor:
        return host_memory(self._members.group, (self._layout.total,), self._layout.dtype, self._device)

    def start(self, group: Group, label: str) -> Handle:
        """Post the agreement. What follows has the same label, so that timelines and errors name the operation."""
        self._label = label
        named, follow_ups = self._members.named, self._members.follow_ups
        in_order = named.has_order_of(group)
        expected = follow_ups.expected(named.next_in_order()) if in_order else NO
        self._is_direct, self._is_ahead = expected == NEVER, expected == YES
        if self._is_direct:
            self._staging.await_copies()
            assert self._host is not None  # noqa: S101
            return group.all_reduce_async(self._array(self._host), self._op, label=label)
        self.answer = self._own_answer()  # an agreement that failed may have changed it
        if self._path is not None:
            follow_ups.make_up = self._set_path.make_up
        return follow_ups.agree(group, label, self, is_tracked=in_order, is_ahead=self._is_ahead)

    def begin(self) -> None:
        """Start ahead of the agreement; see FollowUp."""
        if self._path is None:
            self._ahead = CollectiveError("this rank cannot reduce this tensor by NCCL")
            self._set_path.decline(self._ahead)
            return
        before = self._path.posted
        try:
            self._ahead = self._begun_by_nccl()
            self._set_path.last_ahead = weakref.ref(self._ahead)
        except Exception as error:  # noqa: BLE001 -- the ranks reduce on the host, or their next operation raises it
            self._ahead = error
            if self._path.posted == before:
                self._path.decline(error)

    def follow(self) -> None:
        """Start what follows from the agreement; see FollowUp."""
        try:
            self._outcome.set_result(self._followed())
        except BaseException as error:  # noqa: BLE001 -- `wait` raises it
            self._outcome.set_exception(error)
        self._sources = ()

    def _followed(self) -> Any:
        ahead, self._ahead = self._ahead, None
        is_refused = isinstance(ahead, Exception) or (ahead is not None and ahead.is_refused())
        if ahead is not None and self._is_ahead and self.answer == YES and not is_refused:
            return ahead
        if self._is_ahead or self.answer not in (YES, LATER):
            staged = self._members.follow_ups.staged
            with declining(staged, label=self._label):
                self._restore_after(ahead, is_refused=is_refused)
                array = self._brought_to_host()
            return staged.all_reduce_async(array, self._op, label=self._label)
        assert self._path is not None  # noqa: S101
        with self._path.declining():
            self._restore_after(ahead, is_refused=is_refused)
            self._set_path.await_refusals()
            return self._begun_by_nccl()

    def _restore_after(self, ahead: Any, *, is_refused: bool) -> None:
        """Make the buffer hold the tensors again if NCCL's operation `ahead` may have changed it."""
        if ahead is None:
            return
        if not is_refused:  # of an order that the ranks have given up
            ahead.wait()
        self._restore()

    def _restore(self) -> None:
        """Copy the tensors to the buffer again. They are intact, and NCCL does not use the buffer any more."""
        if self._buffer is None:
            return
        stream = self._behind_copy()
        with self._module.stream(stream), torch.inference_mode(mode=False), torch.no_grad():
            torch._foreach_copy_(self._layout.views(self._buffer), [in_one_piece(each) for each in self._sources])
        stream.synchronize()  # this is rare, and the sources may be deleted now

    def _begun_by_nccl(self) -> Any:
        assert self._path is not None and self._buffer is not None  # noqa: S101, PT018
        with self._module.stream(self._behind_copy()):
            return self._path.all_reduce(self._buffer, self._op, self._label, self._shares)

    def _brought_to_host(self) -> Any:
        """Return the array that the ranks reduce in host memory."""
        if self._buffer is not None:  # another rank cannot use NCCL
            self._host = self._host_memory()
            with self._module.stream(self._behind_copy()):
                staging_of(self._device).to_host(self._buffer[: self._layout.total], self._host).synchronize()
            self._buffer, self._shares = None, None
        self._path = None
        assert self._host is not None  # noqa: S101
        self._staging.await_copies()
        return self._array(self._host)

    def _array(self, host: Tensor) -> Any:
        self._layout.zero_gaps(host)
        return array_of(host.view(self._shape))

    def _behind_copy(self) -> Any:
        stream = self._set_path.stream_of(self._device)
        stream.wait_event(self._written)
        return stream

    def done(self) -> bool:
        """Return whether `finish` would return or raise at once."""
        if self._is_direct:
            return True
        if not self._outcome.done():
            return False
        if self._outcome.exception() is not None:
            return True
        # A caller does not wait for the device, but the hierarchical path has to wait for other hosts.
        begun = self._outcome.result()
        return (self._path is not None and not isinstance(begun, HierarchicalHandle)) or bool(begun.done())

    def finish(self, places: Sequence[Tensor | torch.device], what: str) -> list[Tensor]:
        """Order the caller's current stream behind the result, and return the result for each place.

        Args:
            places: a tensor that gets the result, or the device of a new one.
            what: the operation, for errors.
        """
        try:
            begun = None if self._is_direct else self._outcome.result()
            if self._path is None:
                if begun is not None:
                    begun.wait()
                if self._members.group.calls.services.device_path in FORCED:
                    self._set_path.require_possible()
                assert self._host is not None  # noqa: S101
                return self._to_places(self._layout.views(self._host), places)
            self._order(begun)
        except MultiringError as error:
            raise internal(error, what) from error
        assert self._buffer is not None  # noqa: S101
        found = self._layout.views(self._buffer)
        for place, each in zip(places, found, strict=True):
            if isinstance(place, Tensor):
                with torch.inference_mode(place.is_inference()):
                    place.detach().copy_(each)
        return [
            place if isinstance(place, Tensor) else each.to(place, non_blocking=True)
            for place, each in zip(places, found, strict=True)
        ]

    def _order(self, begun: Any) -> None:
        """Make the caller's current stream wait for NCCL, and keep the buffer for it."""
        stream = self._module.current_stream(self._device)
        with self._module.device(self._device):
            begun.order(stream.cuda_stream)
        if self._buffer is not None:
            self._buffer.record_stream(stream)
        # A rank that could not start after the agreement has declined. The result then has undefined values.
        if not self._is_ahead and not isinstance(begun, HierarchicalHandle) and begun.is_refused():
            begun.wait()

    def _to_places(self, found: Sequence[Tensor], places: Sequence[Tensor | torch.device]) -> list[Tensor]:
        members = self._members
        return [
            to_device(members, each, place.device, place)
            if isinstance(place, Tensor)
            else to_device(members, each, place)
            for each, place in zip(found, places, strict=True)
        ]


def submit_agreed(
    members: Members, name: Name, tensors: Sequence[Tensor], how: Combination, signature: Signature, *, in_place: bool
) -> Agreed:
    """Start to combine tensors that `may_serve` accepts; the result is a list of tensors.

    Args:
        members: the ranks of the set.
        name: the operation's name.
        tensors: dense tensors of one type, on devices.
        how: the way to combine them.
        signature: the arguments that must be equal on all ranks.
        in_place: whether the results replace the tensors.

    Raises:
        UnsupportedError: the current stream is capturing a graph; or the program asks for NCCL, and it cannot be used.
    """
    operation = signature[0][1]
    assert signature[0][0] == OPERATION  # noqa: S101
    staging = _Copies(members, operation, name, tensors)
    with staging.preparing(tensors):
        reduction = _Reduction(members, staging, tensors, how, is_group=operation != ALLREDUCE)
    # A device tensor that is not changed may be freed as soon as its copy is on the way.
    places: list[Tensor | torch.device] = [each if in_place else each.device for each in tensors]
    placed = staging.name._replace(more=_FURTHER)

    def finish(_agreed: Any) -> list[Tensor]:
        return reduction.finish(places, f"{operation}.{placed.name}")

    # Here the lock of the named operations is free. Inside, the agreements have ended.
    expected = members.follow_ups.expected(members.named.next_in_order())

    def start(_name: Name) -> Pending:
        return submit(members, placed, signature, reduction.start, finish)

    if expected == NEVER:  # then the line waits for the copies, and not the caller's thread
        return Agreed(staging.submit(start, _as_it_is), reduction)
    return Agreed(start(None), reduction)


def _as_it_is(found: Any) -> Any:
    return found
