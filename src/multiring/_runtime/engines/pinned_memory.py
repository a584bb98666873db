"""Pinned host memory: blocks of the arena that CUDA knows, so that copies to and from them do not stop the host.

Each block is registered with CUDA once and used again. A block is not used again until its last array is deleted and
its last copy has ended.
"""

import threading
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from multiring.errors import ArgumentError

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group

_PIECE_BYTES = 512  # the smallest block
_SLAB_BYTES = 1 << 20  # small blocks are parts of larger ones, because CUDA registers whole pages
_LARGE_BYTES = 64 << 10  # blocks of at least this size are registered on their own; the arena aligns them to pages


class HostPinning(Protocol):
    """How CUDA is asked to pin memory, for all devices of the process."""

    def pin(self, address: int, size_bytes: int) -> str:
        """Pin memory; return what is wrong, or ""."""

    def unpin(self, address: int) -> None:
        """Undo `pin`. The call may wait for the device."""


class PinnedBlock:
    """Memory of the arena that is registered with CUDA."""

    def __init__(self, memory: "np.ndarray[Any, np.dtype[np.uint8]]", registration: object) -> None:
        """Create a block of `memory`, which `registration` keeps registered."""
        self.memory = memory
        self.address = int(memory.ctypes.data)
        self._copies: deque[Any] = deque()
        weakref.finalize(self, _end_copies, self._copies, registration).atexit = False

    def note(self, event: Any) -> None:
        """Remember the event of a copy that reads or writes the block."""
        self._copies.append(event)

    def is_quiet(self) -> bool:
        """Return whether all copies of the block have ended. The call does not wait for them."""
        while self._copies and self._copies[0].query():
            self._copies.popleft()
        return not self._copies


def _end_copies(copies: "deque[Any]", _registration: object) -> None:
    """Wait for the copies of a deleted block, so that its memory is not unregistered under them."""
    while copies:
        copies.popleft().synchronize()


class _Registration:
    """A registered part of the arena. It is unregistered when its last block is deleted."""

    def __init__(self, memory: "np.ndarray[Any, np.dtype[np.uint8]]", rank: int, pins: HostPinning) -> None:
        address, size_bytes = int(memory.ctypes.data), memory.nbytes
        problem = pins.pin(address, size_bytes)
        if problem:
            raise ArgumentError(
                f"rank {rank}: CUDA cannot pin {size_bytes} bytes of host memory ({problem}): "
                "want more free host memory, or a higher limit of locked memory (ulimit -l); the group is still usable"
            )
        self.memory = memory
        weakref.finalize(self, _unregister, pins, address, memory).atexit = False


def _unregister(pins: HostPinning, address: int, _memory: object) -> None:
    pins.unpin(address)


class PinnedMemory:
    """The pinned blocks of one group, in sizes that are used again."""

    def __init__(self, rank: int, pins: HostPinning) -> None:
        self._rank, self._pins = rank, pins
        self._lock = threading.RLock()
        self._free: defaultdict[int, list[PinnedBlock]] = defaultdict(list)  # by size
        self._returned: deque[PinnedBlock] = deque()  # appended by finalizers, which must not take the lock
        self.registrations = 0  # how many parts of the arena were registered so far

    def take(self, group: "Group", size_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return memory of the arena with undefined contents. The block is returned when nobody keeps the array.

        Raises:
            ArgumentError: the rank's segment is full, or CUDA cannot pin the memory.
        """
        size = _rounded(size_bytes)
        with self._lock:
            self._sort_returned()
            block = self._quiet(size) or self._new(group, size)
        # Every view of the array keeps `lease` itself alive.
        lease = block.memory[:size_bytes]
        weakref.finalize(lease, _give_back, block, self._returned).atexit = False
        _in_use[block.address] = block
        return lease

    def _sort_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free[block.memory.nbytes].append(block)

    def _quiet(self, size: int) -> PinnedBlock | None:
        """Return the free block of this size that was returned last and whose copies have ended, or None."""
        free = self._free[size]
        for place in range(len(free) - 1, -1, -1):
            if free[place].is_quiet():
                return free.pop(place)
        return None

    def _new(self, group: "Group", size: int) -> PinnedBlock:
        registration = self._registered(group, _SLAB_BYTES if size < _LARGE_BYTES else size)
        self.registrations += 1
        blocks = [
            PinnedBlock(registration.memory[start : start + size], registration)
            for start in range(0, registration.memory.nbytes, size)
        ]
        self._free[size][:0] = blocks[1:]
        return blocks[0]

    def _registered(self, group: "Group", size: int) -> _Registration:
        try:
            return self._new_registration(group, size)
        except ArgumentError:
            if not any(self._free.values()):
                raise
        self._free.clear()  # releases the free blocks of all sizes
        return self._new_registration(group, size)

    def _new_registration(self, group: "Group", size: int) -> _Registration:
        try:
            memory = group.allocate(size, np.uint8)
        except ArgumentError as error:
            raise ArgumentError(
                f"rank {self._rank}: no shared memory left for copies of device tensors: {error}; synchronize handles "
                "earlier, or set MULTIRING_SEGMENT_BYTES to more; the group is still usable"
            ) from error
        return _Registration(memory, self._rank, self._pins)


_in_use: dict[int, PinnedBlock] = {}  # the blocks that somebody can reach, by address


def _give_back(block: PinnedBlock, returned: "deque[PinnedBlock]") -> None:
    _in_use.pop(block.address, None)
    returned.append(block)


def block_at(address: int) -> PinnedBlock | None:
    """Return the block that begins at an address and that somebody can reach; None if there is none."""
    return _in_use.get(address)


def _rounded(size_bytes: int) -> int:
    """Return the size of the block for `size_bytes`: a power of two, or at most an eighth more than needed."""
    power = max(_PIECE_BYTES, 1 << (size_bytes - 1).bit_length())
    if power <= _LARGE_BYTES:
        return power
    step = power >> 4
    return -(-size_bytes // step) * step
