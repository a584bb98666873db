"""A vigil: what a thread does that waits for the ranks to agree on an operation's place.

It is woken when they have. Meanwhile it asks who is missing when others are long in coming, says so in a warning, and
gives up in the end. No wait is longer than a moment, so that Ctrl-C is served.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from multiring.errors import StallError
from multiring.runtime.accord import Accord
from multiring.runtime.handles import Lookout
from multiring.runtime.named_handle import NamedHandle
from multiring.runtime.terms import named

_log = logging.getLogger("multiring")
_MOMENT_S = 0.2


class Owner(Protocol):
    """The named operations of the set."""

    ranks: tuple[int, ...]  # in the world
    changed: threading.Condition  # of the lock that guards all

    def give_up(self, handle: NamedHandle, error: StallError) -> None:
        """Have everything fail because of `error`, on all ranks."""


class Vigil:
    """One thread's wait for one handle.

    Args:
        owner: whose operations they are.
        accord: what the ranks come to.
        handle: what is waited for.
        patience_s: seconds after which to warn, and to give up.
        lookout: says where other ranks are.
    """

    def __init__(
        self, owner: Owner, accord: Accord, handle: NamedHandle, patience_s: tuple[float, float], lookout: Lookout
    ) -> None:
        self._owner = owner
        self._accord = accord
        self._handle = handle
        self._warn_s, self._timeout_s = patience_s
        self._lookout = lookout
        self._ask_s = min(self._warn_s, self._timeout_s / 2)
        self._started_s = self._asked_s = time.monotonic()
        self._before = accord.missing
        self._warned = False

    def keep(self, timeout: float | None) -> bool:
        """Return True once the handle is posted or over, False after `timeout` seconds."""
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
                self._accord.wait_for(None)

    def stalled_on(self) -> tuple[list[int], float]:
        """Return the ranks of the world that have not come, and for how many seconds they have not."""
        return self._of_world(self._absent()), time.monotonic() - self._since_s()

    def _is_decided(self, until_s: float) -> bool:
        handle = self._handle
        wake_s = min(until_s, self._asked_s + self._ask_s, self._since_s() + self._timeout_s)
        with self._owner.changed:
            if handle.posted is None and not handle.is_over:
                self._accord.wait_for(handle)
                self._owner.changed.wait(min(_MOMENT_S, max(0.0, wake_s - time.monotonic())))
            return handle.posted is not None or handle.is_over

    def _since_s(self) -> float:
        # Who has joined waits for as long as the others go on.
        return self._started_s if self._handle.start is not None else max(self._started_s, self._accord.moved_s)

    def _look(self) -> None:
        now = time.monotonic()
        quiet_s = now - self._since_s()
        if quiet_s >= self._timeout_s:
            self._owner.give_up(self._handle, self._stall(quiet_s))
        elif now - self._asked_s >= self._ask_s:
            self._asked_s = now
            with self._owner.changed:
                self._accord.inquire()
        absent = self._absent()
        if absent and not self._warned and quiet_s >= self._warn_s:
            self._warned = True
            who, sight = named(absent, self._owner.ranks), self._lookout.look(self._of_world(absent))
            _log.warning("%s: %s has not come to it for %.0f s%s", self._handle.title, who, quiet_s, sight.text)
            if sight.waiting_back:  # in another set: each waits for the other
                error = self._stall(quiet_s)
                # First: it may leave at once, for which the others do not give up yet; they might as well.
                self._lookout.release(sight.waiting_back[0])
                self._owner.give_up(self._handle, error)

    def _absent(self) -> Sequence[int]:
        missing = self._accord.missing
        if missing is self._before or missing is None:
            return () if self._accord.silent is None else (self._accord.silent,)
        return missing.names.get(self._handle.name, ()) if self._handle.start is not None else missing.unjoined

    def _of_world(self, ranks: Sequence[int]) -> list[int]:
        return [self._owner.ranks[rank] for rank in ranks]

    def _stall(self, quiet_s: float) -> StallError:
        title, absent = self._handle.title, self._absent()
        if absent:
            who, verb = named(absent, self._owner.ranks), "has" if len(absent) == 1 else "have"
            where = self._lookout.look(self._of_world(absent)).text
            return StallError(f"{title}: {who} {verb} not come to it for {quiet_s:.0f} s{where}; it has not run")
        where = self._lookout.look(self._owner.ranks).text
        return StallError(f"{title}: the ranks have not agreed on its place for {quiet_s:.0f} s{where}; it has not run")
