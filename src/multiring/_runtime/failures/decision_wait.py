"""Decision wait: a thread's wait until the ranks agree on an operation's place.

The decision wakes the thread. If it takes long, the thread asks which ranks are missing, logs a warning and finally
gives up. The thread waits in short intervals, so that it reacts to Ctrl-C.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from multiring._runtime.group.handles import StatusSource
from multiring._runtime.named.disagreement import named
from multiring._runtime.named.handle import NamedHandle
from multiring._runtime.named.negotiation import Negotiation
from multiring.errors import StallError

_log = logging.getLogger("multiring")
_MOMENT_S = 0.2


class DecisionWaitOwner(Protocol):
    """The set of named operations to which the waiting handle belongs."""

    ranks: tuple[int, ...]  # the world ranks of the set
    changed: threading.Condition  # the condition of the set's lock

    def give_up(self, handle: NamedHandle, error: StallError) -> None:
        """Make all operations of the set fail with `error`, on all ranks."""


class DecisionWait:
    """One thread's wait for one handle.

    Args:
        owner: the set of named operations.
        negotiation: the ranks' negotiation of the order.
        handle: the handle of the operation to wait for.
        patience_s: the seconds after which to warn, and after which to give up.
        rank_status: gives the status of other ranks.
    """

    def __init__(
        self,
        owner: DecisionWaitOwner,
        negotiation: Negotiation,
        handle: NamedHandle,
        patience_s: tuple[float, float],
        rank_status: StatusSource,
    ) -> None:
        self._owner = owner
        self._negotiation = negotiation
        self._handle = handle
        self._warn_s, self._timeout_s = patience_s
        self._rank_status = rank_status
        # The ranks first report which of them are missing. This rank then asks the missing ranks what they wait for.
        self._ask_s = min(rank_status.patience.ask_s, self._warn_s, self._timeout_s / 2)
        self._ask_at_s, self._seek_at_s = self._ask_s, math.inf  # seconds without progress
        self._started_s = time.monotonic()
        self._before = negotiation.missing
        self._warned = False

    def keep(self, timeout: float | None) -> bool:
        """Wait for the handle to be posted or to end.

        Return True then, and False after `timeout` seconds.
        """
        until_s = float("inf") if timeout is None else self._started_s + timeout
        self._handle.watch = self.stalled_on
        try:
            while not self._is_decided(until_s):
                if time.monotonic() >= until_s:
                    return False
                self._look()
            return True
        finally:
            self._handle.watch = None
            with self._owner.changed:
                self._negotiation.wait_for(None)

    def stalled_on(self) -> tuple[list[int], float]:
        """Return the missing world ranks, and the seconds without progress."""
        return self._of_world(self._absent()), time.monotonic() - self._since_s()

    def _is_decided(self, until_s: float) -> bool:
        handle = self._handle
        wake_s = min(until_s, self._since_s() + min(self._ask_at_s, self._seek_at_s, self._timeout_s))
        with self._owner.changed:
            if handle.posted is None and not handle.is_over:
                self._owner.changed.wait(min(_MOMENT_S, max(0.0, wake_s - time.monotonic())))
            return handle.posted is not None or handle.is_over

    def _quiet_s(self) -> float:
        return time.monotonic() - self._since_s()

    def _since_s(self) -> float:
        # A rank that has joined waits as long as the other ranks make progress.
        return self._started_s if self._handle.start is not None else max(self._started_s, self._negotiation.moved_s)

    def _look(self) -> None:
        quiet_s = self._quiet_s()
        if quiet_s >= self._timeout_s:
            self._owner.give_up(self._handle, self._stall(quiet_s))
        elif quiet_s >= self._seek_at_s:
            self._seek_at_s = math.inf
            self._rank_status.seek(self._handle)
        elif quiet_s >= self._ask_at_s:
            self._ask_at_s = self._rank_status.patience.after(quiet_s)
            self._seek_at_s = quiet_s + _MOMENT_S / 2
            # This rank is not blocked as long as another of its threads could announce the missing operation.
            is_blocked = quiet_s >= self._rank_status.patience.sure_s and self._rank_status.is_single()
            with self._owner.changed:
                if is_blocked and self._handle.posted is None and not self._handle.is_over:
                    self._negotiation.wait_for(self._handle)
                self._negotiation.inquire()
        absent = self._absent()
        if absent and not self._warned and quiet_s >= self._warn_s:
            self._warned = True
            who, where = named(absent, self._owner.ranks), self._rank_status.look(self._of_world(absent))
            _log.warning("%s: %s has not come to it for %.0f s%s", self._handle.title, who, quiet_s, where)

    def _absent(self) -> Sequence[int]:
        missing = self._negotiation.missing
        if missing is self._before or missing is None:
            return () if self._negotiation.silent is None else (self._negotiation.silent,)
        return missing.names.get(self._handle.name, ()) if self._handle.start is not None else missing.unjoined

    def _of_world(self, ranks: Sequence[int]) -> list[int]:
        return [self._owner.ranks[rank] for rank in ranks]

    def _stall(self, quiet_s: float) -> StallError:
        title, absent = self._handle.title, self._absent()
        if absent:
            who, verb = named(absent, self._owner.ranks), "has" if len(absent) == 1 else "have"
            where = self._rank_status.look(self._of_world(absent))
            return StallError(
                f"{title}: {who} {verb} not come to it for {quiet_s:.0f} s{where}; the operation has not run"
            )
        where = self._rank_status.look(self._owner.ranks)
        return StallError(
            f"{title}: the ranks have not agreed on its order for {quiet_s:.0f} s{where}; the operation has not run"
        )
