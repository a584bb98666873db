"""Tensors that are reduced again and again get memory of the arena behind them, and keep their address.

torch allocates the buckets of DistributedDataParallel itself, and asks only backends in C++ for their memory. So the
second time that a large tensor is reduced in place, its pages are exchanged for pages of the arena with the same
contents. Its address stays, and with it every view and alias that anybody holds; from then on the ranks of the host
reduce it where it lies. When the group ends, or nobody else holds its storage any more, it gets ordinary pages again.
"""

import os
import select
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from multiring._native import Backing, Context
from multiring.errors import MultiringError
from multiring.runtime import Group
from multiring.runtime.arrays import Buffer

# Ordinary memory below this costs about as much as memory of the arena: what it takes is agreeing.
_LEAST_BYTES = 1 << 20
# How many tensors that came once are remembered.
_REMEMBERED = 256
# A forked child has its copies in milliseconds; one that dies before is not waited for longer.
_COPIED_WITHIN_S = 10.0
_torch_c: Any = torch._C  # noqa: SLF001 -- the only way to know
_CAN_TELL = hasattr(_torch_c, "_storage_Use_Count") and hasattr(_torch_c, "_is_cow_tensor")


@dataclass(slots=True)
class _Backed:
    backing: Backing
    size_bytes: int
    storage: torch.UntypedStorage = field(repr=False)
    start: int  # of the storage
    is_busy: bool = False  # an operation works on it, and has not been settled

    def is_left(self, others: int) -> bool:
        """Return whether nobody but this and `others` like it can reach the memory, which is the storage's still."""
        is_own = self.storage.data_ptr() == self.start and _torch_c._storage_Use_Count(self.storage._cdata) <= 1  # noqa: SLF001
        return is_own and self.references() <= _OWN_REFERENCES + others

    def references(self) -> int:
        """Return Python's count of the storage."""
        return sys.getrefcount(self.storage)


@dataclass(frozen=True, slots=True)
class _Seen:
    storage: StorageWeakRef
    size_bytes: int
    is_refused: bool = False


# Of a storage that nobody else holds, as this Python counts.
_NOTHING: Any = None
_OWN_REFERENCES = _Backed(_NOTHING, 0, torch.empty(1).untyped_storage(), 0).references()


class Backings:
    """The tensors of one process group that have memory of the arena behind them."""

    def __init__(self, group: Group) -> None:
        hosts = group.topology.host_of()
        membership = group.calls.membership
        self._context: Context = membership.context
        shares = hosts.count(hosts[group.rank]) > 1
        self._helps = membership.back_tensors and shares and _CAN_TELL
        self._backed: dict[int, _Backed] = {}
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._is_over = False
        self._lock = threading.RLock()  # a signal's handler may end the group
        _all.add(self)

    def behind(self, tensor: Tensor, memory: Buffer) -> tuple[Buffer, Callable[[], None] | None]:
        """Return where an operation that overwrites `tensor` is to work, and what is to be called when it has ended.

        Args:
            tensor: in one piece; nobody but the operation uses it from now on.
            memory: its elements, which are returned where there is nothing behind them.
        """
        with self._lock:
            known = self._find(tensor)
            if known is None:
                return memory, None
            known.is_busy = True
            known.backing.fill()
            return replace(memory, address=known.backing.place, owner=(tensor, known.backing)), partial(
                self._settle, known
            )

    def lift(self) -> None:
        """Give all of them ordinary memory again, with the same contents: those in use when they are settled."""
        with self._lock:
            self._is_over = True
            self._seen.clear()
            for address, each in list(self._backed.items()):
                if not each.is_busy:
                    self._lift(address, each)

    def part(self) -> None:
        """In a forked child: keep from the parent what is written to them."""
        for each in list(self._backed.values()):
            with suppress(MultiringError):
                each.backing.part()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._backed)

    def hold(self) -> None:
        """Let nothing change until `let_go`: the process forks."""
        self._lock.acquire()

    def let_go(self) -> None:
        """Go on."""
        self._lock.release()

    def _settle(self, known: _Backed) -> None:
        with self._lock:
            known.backing.empty()
            known.is_busy = False
            if self._is_over:
                known.backing.lift(keep=True)
                self._backed = {address: each for address, each in self._backed.items() if each is not known}

    def _find(self, tensor: Tensor) -> _Backed | None:
        """Return what is behind `tensor`, if it came before and no operation works on it; else None."""
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes < _LEAST_BYTES or not self._helps or self._is_over:
            return None
        address = tensor.data_ptr()
        known = self._backed.get(address)
        if known is None:
            return self._come(tensor, address, size_bytes)
        if known.size_bytes != size_bytes or known.is_busy:
            return None
        if known.backing.stands():
            return known
        del self._backed[address]  # its storage was resized, and has the same address again
        return None

    def _come(self, tensor: Tensor, address: int, size_bytes: int) -> _Backed | None:
        if self._context.holds(address, size_bytes):
            return None
        self._forget_left()
        storage = tensor.untyped_storage()
        now = _Seen(StorageWeakRef(storage), size_bytes)  # type: ignore[no-untyped-call] # of torch
        before = self._seen.pop(address, None)
        is_again = before is not None and before.storage == now.storage and before.size_bytes == size_bytes
        if not is_again or before is None or before.is_refused:
            self._remember(address, before if is_again and before is not None else now)
            return None
        try:
            backing = Backing(self._context, address, size_bytes) if _is_torchs_own(tensor, storage) else None
        except MultiringError:  # a file's, shared already, or no room: it is reduced as it is
            backing = None
        if backing is None:
            self._remember(address, _Seen(now.storage, size_bytes, is_refused=True))
            return None
        found = self._backed[address] = _Backed(backing, size_bytes, storage, storage.data_ptr())
        return found

    def _remember(self, address: int, seen: _Seen) -> None:
        self._seen[address] = seen
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _forget_left(self) -> None:
        """Give back those that nobody else holds; they are to be freed with the last mention of them here."""
        for address, each in list(self._backed.items()):
            if each.is_busy:
                continue
            if each.storage.data_ptr() != each.start or each.is_left(self._others(each)):
                self._lift(address, each)

    def _lift(self, address: int, each: _Backed) -> None:
        """Give one ordinary pages; where that fails it stays as it is, and is right all the same."""
        with suppress(MultiringError):
            each.backing.lift(keep=not each.is_left(self._others(each)))
        del self._backed[address]

    def _others(self, one: _Backed) -> int:
        return sum(each.storage is one.storage for each in self._backed.values()) - 1


def _is_torchs_own(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether nobody else has the memory of `tensor`: NumPy, a driver, or a copy that was not made yet."""
    return storage.resizable() and not tensor.is_pinned() and not _torch_c._is_cow_tensor(tensor)  # noqa: SLF001


_all: "weakref.WeakSet[Backings]" = weakref.WeakSet()
_forking: list[tuple[list[Backings], tuple[int, int] | None]] = []


def _before_fork() -> None:
    held = list(_all)
    for each in held:
        each.hold()
    pipe = None
    if any(each.count for each in held):
        with suppress(OSError):  # without one, nobody waits
            pipe = os.pipe()
    _forking.append((held, pipe))


def _after_fork_in_parent() -> None:
    """Wait until the child has copied what it sees of this process's memory."""
    held, pipe = _forking.pop()
    if pipe is not None:
        os.close(pipe[1])
        ended = select.poll()  # which takes descriptors of any number
        ended.register(pipe[0], select.POLLIN)
        ended.poll(1000 * _COPIED_WITHIN_S)
        os.close(pipe[0])
    for each in held:
        each.let_go()


def _after_fork_in_child() -> None:
    held, pipe = _forking.pop()
    for each in held:
        each.part()
        each.let_go()
    if pipe is not None:
        os.close(pipe[0])
        os.close(pipe[1])  # which the parent sees


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
