"""Aborts: how a rank that aborts a process group has the others stop waiting for it there.

What it has in flight fails on all ranks by itself. Others may wait for it in operations that it has not come to, or in
messages: so they are told, outside any operation, and each passes it on, as two ranks that never had to do with each
other have no connection.
"""

import struct
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

from multiring._native import ControlMessage, ControlMessageKind
from multiring.errors import StateError
from multiring.runtime import Group

_RANK = struct.Struct("<q")


class Aborts:
    """The aborts of one group on this rank.

    Args:
        group: the ranks; every one of them makes its own Aborts.
        on_abort: a bound method, held weakly: called once on the control thread with the rank of the world that has
            aborted.
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
        """Tell the other ranks that this one aborts."""
        self._pass_on(self._own)

    def close(self) -> None:
        """Hear of no more."""
        if self._control is not None:
            self._control.remove(self._id)

    def _pass_on(self, rank: int) -> None:
        if self._has_told or self._control is None:
            return
        self._has_told = True
        for other in self._others:
            with suppress(StateError):  # it takes nothing, or this rank has left: the end of which they hear
                self._control.send(other, self._id, 0, _RANK.pack(rank))

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Pass on that a rank has aborted, and act on it."""
        if notice.kind is not ControlMessageKind.MESSAGE or self._has_told:
            return
        (rank,) = _RANK.unpack(notice.payload)
        self._pass_on(rank)
        call = self._on_abort()
        if call is not None:
            call(rank)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- there are none
        """Return False: there are no named operations here."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Do nothing: operations fail by themselves."""

    def end(self) -> None:
        """Do nothing: operations fail by themselves."""
