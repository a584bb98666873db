"""Aborts: a rank that aborts a process group informs the other ranks, so that they do not wait for it.

The aborting rank's operations in flight fail on all ranks by themselves. Other ranks may wait for this rank in
operations that it has not started, or in messages. The aborting rank therefore sends them a control message outside any
operation. Each rank forwards the message, because two ranks that never communicated have no connection.
"""

import struct
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime import Group
from multiring.errors import StateError

_RANK = struct.Struct("<q")
_HEAR_S = 1.0  # how long an error waits for the control thread


class Aborts:
    """Send and receive abort messages of one group on this rank.

    Args:
        group: the ranks; every rank creates an Aborts for the group.
        on_abort: a bound method, kept as a weak reference. The control thread calls it once, with the world rank of
            the aborting rank.
    """

    def __init__(self, group: Group, on_abort: Callable[[int], None]) -> None:
        services = group.calls.services
        self._others = [rank for rank in group.calls.ranks if rank != services.world_rank]
        self._own = services.world_rank
        self._on_abort = WeakMethod(on_abort)
        self._has_told = False
        self._id = group.calls.purpose_id("abort")
        self._control = services.control if self._others else None
        if self._control is not None:
            self._control.add(self._id, self)

    def tell(self) -> None:
        """Inform the other ranks that this rank aborts."""
        self._pass_on(self._own)

    def hear_all(self) -> None:
        """Wait until the control thread has handled the abort messages that have come, but not for long."""
        if self._control is not None:
            self._control.wait_until_handled(_HEAR_S)

    def close(self) -> None:
        """Stop receiving abort messages."""
        if self._control is not None:
            self._control.remove(self._id)

    def _pass_on(self, rank: int) -> None:
        if self._has_told or self._control is None:
            return
        self._has_told = True
        for other in self._others:
            with suppress(StateError):  # the other rank accepts no messages, or this rank has left
                self._control.send(other, self._id, 0, _RANK.pack(rank))

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Forward the message that a rank has aborted, and call `on_abort`."""
        if notice.kind is not ControlMessageKind.MESSAGE or self._has_told:
            return
        (rank,) = _RANK.unpack(notice.payload)
        self._pass_on(rank)
        call = self._on_abort()
        if call is not None:
            call(rank)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: abort messages have no named operations."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Do nothing: the operations in flight fail by themselves."""

    def end(self) -> None:
        """Do nothing: the operations in flight fail by themselves."""
