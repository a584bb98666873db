"""The backend "multiring" for tensors of CUDA devices: each operation runs on copies in pinned host memory.

The copies are made by side streams (device_staging.py). Two threads stand between the caller and the ranks:

    caller       starts the copies of the inputs to the host
    "issuing"    waits for the copies of one operation after the other, and starts the operation on the host
    "returning"  waits for each operation, and starts the copies of its outputs to the device

All ranks call the collectives of a process group in the same order. The first thread keeps this order, and an operation
on tensors in host memory waits until it has issued all earlier ones. A message gets a thread of its own in place of the
second, because the ranks may wait for their messages in any order.

`wait` of an operation's Work stops the caller until the operation has ended on the host. It does not wait for the
device: the caller's current stream waits for the copies of the outputs.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from multiring._runtime import Group
from multiring.errors import MultiringError
from multiring.torch.c10d.buffers import contents, require_places
from multiring.torch.c10d.errors import RefusedError, torch_error
from multiring.torch.c10d.work import WorkOwner
from multiring.torch.device_staging import DeviceStaging, record_use, staging_of
from multiring.torch.interop import described

_NO_TIMEOUT = timedelta(0)  # torch's value for "no timeout"
_INPUT, _OUTPUT, _BOTH = "in", "out", "in and out"
# What a method does with the tensors of its first arguments.
_ROLES: dict[str, tuple[str, ...]] = {
    "allreduce": (_BOTH,),
    "allreduce_coalesced": (_BOTH,),
    "reduce": (_BOTH,),
    "reduce_scatter": (_OUTPUT, _INPUT),
    "reduce_scatter_single": (_OUTPUT, _INPUT),
    "_reduce_scatter_base": (_OUTPUT, _INPUT),
    "reduce_scatter_single_coalesced": (_OUTPUT, _INPUT),
    "reduce_scatter_tensor_coalesced": (_OUTPUT, _INPUT),
    "broadcast": (_BOTH,),
    "allgather": (_OUTPUT, _INPUT),
    "allgather_coalesced": (_OUTPUT, _INPUT),
    "all_gather_single": (_OUTPUT, _INPUT),
    "_allgather_base": (_OUTPUT, _INPUT),
    "all_gather_single_coalesced": (_OUTPUT, _INPUT),
    "allgather_into_tensor_coalesced": (_OUTPUT, _INPUT),
    "all_to_all_single": (_OUTPUT, _INPUT),
    "alltoall_base": (_OUTPUT, _INPUT),
    "alltoall": (_OUTPUT, _INPUT),
    "gather": (_OUTPUT, _INPUT),
    "scatter": (_OUTPUT, _INPUT),
    "send": (_INPUT,),
    "recv": (_OUTPUT,),
    "recv_anysource": (_OUTPUT,),
}
# The operations, as errors name them, of the methods that have another name.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
}
_MESSAGES = {"send", "recv", "recv_anysource"}


class _Return(NamedTuple):
    """An output tensor of the device, and its place in pinned host memory."""

    tensor: Tensor
    host: Tensor
    dense: Tensor  # the tensor itself, or memory of the device in row-major order if the tensor has gaps


class StagedWork(dist.Work):
    """An operation on tensors of a device.

    `wait` returns once the operation has ended on the host. The caller's current stream then waits for the outputs.
    """

    in_order = True

    def __init__(self, owner: WorkOwner, what: str, outputs: Sequence[Tensor], where: tuple[torch.device, Any]) -> None:
        """Create the Work of an operation that is not yet issued.

        Args:
            owner: the process group.
            what: the name of the operation, for errors.
            outputs: the tensors that receive the result.
            where: their device, and a stream of it that waits for the outputs of all operations.
        """
        super().__init__()
        self._owner = owner
        self._what = what
        self.device, self.stream = where
        self.outputs = outputs
        self._on_host: Any = None  # the Work of the operation on the host
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        self._event: Any = None  # behind it, the outputs are complete
        self._is_ordered = False  # whether a stream of the caller comes after the outputs
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the operation has ended on the host, and return True.

        Args:
            timeout: raise an error after this time, while the operation continues. By default, wait until the
                operation's own timeout.

        Raises:
            DistBackendError: the operation failed, or it is still in flight after `timeout`.
            RefusedError: the arguments are invalid.
        """
        limit_s = timeout.total_seconds() if timeout else None
        if not self._has_ended.wait(limit_s):
            raise dist.DistBackendError(
                f"{self._what} is still in flight after {limit_s:g} s; it continues, and wait() may be called again"
            )
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self._event)
        self._is_ordered = True
        return True

    def is_completed(self) -> bool:
        """Return whether the program may use the outputs, or the operation has failed.

        That is so when the device has the outputs, or after a `wait`.
        """
        if not self._has_ended.is_set():
            return False
        return self._is_ordered or self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Return whether the operation is completed and succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error that `wait` raises, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the output tensors.

        Raises:
            RuntimeError: the operation has not ended.
        """
        if not self._has_ended.is_set():
            raise RuntimeError(f"{self._what}: work needs to be completed before calling result(); call wait() first")
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait for the operation as `wait` does."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """Return a future of the list of output tensors; it fails if `wait` raises an error."""
        with self._lock:
            if self._future is None:
                ended: Future[Any] = Future(devices=[self.device])
                # torch's C++ code sees only errors raised by a callback; an exception set from Python is a mere value.
                self._future = ended.then(self._outcome)
                setter = _OnStream(ended, self.device, self.stream)
                if self._has_ended.is_set():
                    setter.set_result(None)
                else:  # a callback may wait for another operation, so neither thread of StagedTensors may run it
                    self._owner.complete(self, setter)
            return self._future

    def _outcome(self, _ended: "Future[Any]") -> list[Tensor]:
        self.wait()
        return list(self.outputs)

    def _source_rank(self) -> int:
        """Return the sender's rank in the group; for a receive from any source, only after the message has arrived."""
        if self._on_host is None:
            raise RuntimeError(f"{self._what}: only a receive has a source, and only after its wait()")
        return int(self._on_host._source_rank())  # noqa: SLF001 -- torch's name

    source_rank = _source_rank

    def wait_on_host(self) -> None:
        """Wait until the operation has ended on the host; raise its error."""
        if self._on_host is not None:
            self._on_host.wait()

    def issued(self, work: Any) -> None:
        """Record that the operation runs on the host as `work`."""
        self._on_host = work

    def end(self, event: Any, error: Exception | None) -> None:
        """Let `wait` return or raise `error`. The outputs are complete behind `event`."""
        # The frames of a traceback lead back to this object, and would keep the group's memory until a collection.
        self._event, self._error = event, None if error is None else error.with_traceback(None)
        self._has_ended.set()


class _OnStream(NamedTuple):
    """A future for a device. torch takes the stream that is current when the future is set as the one to wait for."""

    future: "Future[Any]"
    device: torch.device
    stream: Any

    def set_result(self, value: None) -> None:
        """Set the future on a stream that waits for nothing but the outputs of operations."""
        module = torch.get_device_module(self.device)
        with module.device(self.device), module.stream(self.stream):
            self.future.set_result(value)


class _Item(NamedTuple):
    """An operation on its way."""

    work: StagedWork
    start: Callable[[], Any]  # starts the operation on the host
    refuse: Callable[[Exception], None]  # makes the other ranks raise, too
    staging: DeviceStaging
    copied: Sequence[Any]  # behind these events, the host has all inputs
    returns: Sequence[_Return]
    ready: Any  # behind this event, the device may overwrite the outputs


class StagedTensors:
    """The operations of one process group on tensors of CUDA devices."""

    def __init__(self, owner: WorkOwner, group: Group) -> None:
        """Create the threads for the operations of `owner` on `group`, whose memory holds the copies."""
        self._owner = owner
        self._group = group
        self._streams: dict[torch.device, Any] = {}
        self._issuing: SimpleQueue[_Item | Callable[[], None] | None] = SimpleQueue()
        self._returning: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.Lock()  # nothing is put behind the end of the queue, where nobody would take it
        self._has_pending = self._is_closed = False
        # The threads hold no reference to this object, so that they stop when it is deleted.
        queues = self._issuing, self._returning
        threading.Thread(target=_issue, args=queues, name="multiring issuing", daemon=True).start()
        threading.Thread(target=_return, args=queues[1:], name="multiring returning", daemon=True).start()
        weakref.finalize(self, self._issuing.put, None).atexit = False

    def call(
        self,
        name: str,
        method: Callable[..., Any],
        refuse: Callable[[Exception], None],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> StagedWork:
        """Start an operation.

        Args:
            name: the name of the process group's method.
            method: the method for tensors in host memory, bound to the process group.
            refuse: called with an error that this rank raises in place of the operation.
            arguments: the arguments, with tensors of a device.
            options: keyword arguments without tensors.

        Raises:
            RefusedError: tensors are on several devices or sparse, or an output has several elements at one address.
            DistBackendError: the current stream captures a graph, or host memory cannot be pinned.
        """
        # The thread that starts the operation must not wait for it, so the caller waits in its place.
        waits = [each for each in (*arguments, *options.values()) if getattr(each, "asyncOp", True) is False]
        for each in waits:
            each.asyncOp = True
        try:
            item = self._prepared(name, method, refuse, arguments, options)
        except Exception as error:
            self._put(partial(refuse, error))  # behind the earlier operations
            if isinstance(error, MultiringError):
                raise torch_error(_operation_of(name), error) from error
            raise
        if not self._put(item):
            raise dist.DistBackendError(f"{_operation_of(name)}: the process group has ended; make it anew")
        if waits:
            try:
                item.work.wait()
            finally:
                for each in waits:
                    each.asyncOp = False
        return item.work

    def wait_until_issued(self) -> None:
        """Wait until the operations so far are issued, so that the next operation on the host comes after them."""
        if not self._has_pending:
            return
        is_issued = threading.Event()
        with self._lock:
            self._has_pending = False
            if self._is_closed:
                return
            self._issuing.put(is_issued.set)
        is_issued.wait()

    def close(self) -> None:
        """End the threads after the operations so far."""
        with self._lock:
            self._is_closed = True
            self._issuing.put(None)

    def _put(self, item: "_Item | Callable[[], None]") -> bool:
        """Queue an operation; return False if the threads end."""
        with self._lock:
            if self._is_closed:
                return False
            self._has_pending = True
            self._issuing.put(item)
            return True

    def _prepared(
        self,
        name: str,
        method: Callable[..., Any],
        refuse: Callable[[Exception], None],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> _Item:
        roles = _ROLES[name]
        device = _device_of(_operation_of(name), _tensors_in(arguments[: len(roles)]))
        staging = staging_of(device)
        copied: list[Any] = []
        returns: list[_Return] = []

        def copy(tensor: Tensor, role: str) -> Tensor:
            source = tensor.detach()
            if role != _INPUT:
                require_places(source)
            host = staging.pinned(self._group, source.numel(), source.dtype).tensor.view(source.shape)
            dense = contents(source)
            if not source.numel():
                return host
            if role != _OUTPUT:
                copied.append(staging.to_host(dense, host))
            if role != _INPUT:
                returns.append(_Return(source, host, dense))
            return host

        moved = [_replaced(argument, role, copy) for argument, role in zip(arguments, roles, strict=False)]
        moved += arguments[len(moved) :]
        outputs = [
            tensor
            for argument, role in zip(arguments, roles, strict=False)
            if role != _INPUT
            for tensor in _tensors_in(argument)
        ]
        ready = torch.get_device_module(device).Event()
        ready.record(torch.get_device_module(device).current_stream(device))
        work = StagedWork(self._owner, _operation_of(name), outputs, (device, self._stream_of(device)))
        work.in_order = name not in _MESSAGES
        start = partial(method, *moved, **options)
        return _Item(work, start, refuse, staging, copied, returns, ready)

    def _stream_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]


def _issue(issuing: "SimpleQueue[_Item | Callable[[], None] | None]", returning: "SimpleQueue[_Item | None]") -> None:
    """Start the operations on the host, in the order of the calls."""
    while (item := issuing.get()) is not None:
        if not isinstance(item, _Item):
            item()
            continue
        try:
            for event in item.copied:
                event.synchronize()
            item.work.issued(item.start())
        except Exception as error:  # noqa: BLE001 -- `wait` raises it
            if not has_started(error):
                item.refuse(error)
            item.work.end(None, error)
        else:
            if not item.work.in_order:
                threading.Thread(target=_finish, args=(item,), name="multiring message", daemon=True).start()
            else:
                returning.put(item)
        del item  # its tensors must not live until the next item comes
    returning.put(None)


def _return(returning: "SimpleQueue[_Item | None]") -> None:
    while (item := returning.get()) is not None:
        _finish(item)
        del item


def _finish(item: _Item) -> None:
    """Wait for an operation, and start the copies of its outputs."""
    try:
        item.work.wait_on_host()
        event = _brought_back(item)
    except Exception as error:  # noqa: BLE001 -- `wait` raises it
        item.work.end(None, error)
    else:
        item.work.end(event, None)


def _brought_back(item: _Item) -> Any:
    """Start the copies of the outputs, and return the event behind which all are complete."""
    if not item.returns:
        return None
    device, stream = item.work.device, item.work.stream
    module = torch.get_device_module(device)
    with module.device(device), module.stream(stream):
        for tensor, host, dense in item.returns:
            stream.wait_event(item.staging.to_device(host, dense, after=item.ready))
            if dense is not tensor:
                tensor.copy_(dense)
                record_use(tensor, stream)
                record_use(dense, stream)
        event = module.Event()
        event.record(stream)
    return event


def has_started(error: Exception) -> bool:
    """Return whether an error of a method for tensors in host memory comes from an operation that has started.

    Such an error is caused by a MultiringError. The other ranks then get an error anyway.
    """
    return not isinstance(error, MultiringError) and isinstance(error.__cause__, MultiringError)


def _operation_of(name: str) -> str:
    """Return the name of the operation of the method `name`, for errors."""
    return _OPERATIONS.get(name, name)


def _device_of(name: str, tensors: Sequence[Tensor]) -> torch.device:
    devices = {each.device for each in tensors}
    if len(devices) != 1:
        shown = " and ".join(sorted(map(str, devices)))
        raise RefusedError(f"{name}: tensors are on {shown}; want all tensors of a call on one device")
    for each in tensors:
        if each.layout is not torch.strided:
            raise RefusedError(f"{name}: {described(each)} is sparse; want a dense tensor, or .cpu()")
    return devices.pop()


def _replaced(argument: Any, role: str, copy: Callable[[Tensor, str], Tensor]) -> Any:
    """Return `argument`, a tensor or a nested list of tensors, with the copy of each tensor."""
    if isinstance(argument, Tensor):
        return copy(argument, role)
    if isinstance(argument, list | tuple):
        return [_replaced(each, role, copy) for each in argument]
    return argument


def _tensors_in(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [each for item in argument for each in _tensors_in(item)] if isinstance(argument, list | tuple) else []


def is_on_device(arguments: Sequence[Any]) -> bool:
    """Return whether the first tensor of a call is in the memory of a CUDA device."""
    tensors = _tensors_in(arguments)
    return bool(tensors) and tensors[0].is_cuda
