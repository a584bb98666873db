"""The end of a generation: once the ranks have gone on as a later one, its groups' operations fail.

The native core fails the operations that a lost rank takes part in. Others, of groups without that rank, would wait
without end for ranks that have gone on. Their threads look here, once a second at least.

In a process that was forked from a rank, every generation of that rank is over from the first instruction on. There, a
lock that another thread of the rank held at the fork is never released, so operations must be refused before they take
one.
"""

import threading
import weakref
from collections.abc import Callable

from multiring._forks import begun_in_forks
from multiring._native import Context, SharedSlots
from multiring.errors import MultiringError, PeerLostError, StateError


class GenerationEnd:
    """Whether a generation is over, and why.

    Args:
        rank: this process's number in the native core.
        may_end: whether the ranks go on without lost ones. Otherwise the generation lasts as long as the job.
        recycles: whether `recycle` will be called, so that the shared memory of its groups serves later ones.
    """

    def __init__(self, rank: int = 0, *, may_end: bool = False, recycles: bool = False) -> None:
        self.rank = rank
        self.may_end = may_end
        self._slots: list[SharedSlots] | None = [] if recycles else None
        self.is_over = False
        self.is_inherited = False  # whether this process was forked from the rank
        self._why = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        begun_in_forks(self)

    def when_over(self, listener: Callable[[], None]) -> None:
        """Call `listener`, a bound method, once the generation is over. The registration keeps no object alive.

        The method is called on a thread that must not block.
        """
        if not self.may_end:
            return
        with self._lock:
            self._listeners = [each for each in self._listeners if each() is not None]
            self._listeners.append(weakref.WeakMethod(listener))
            is_over = self.is_over
        if is_over:
            listener()

    def note_slots(self, slots: SharedSlots) -> None:
        """Keep the slots of one of the generation's groups for `recycle`."""
        with self._lock:
            if self._slots is not None:
                self._slots.append(slots)

    def recycle(self, context: Context) -> None:
        """Give the shared memory of the generation's groups to later groups.

        The caller knows that every rank has left the generation: otherwise another rank might still read it.
        """
        with self._lock:
            slots, self._slots = self._slots or [], None
        for each in slots:
            each.recycle(context)

    def finish(self, why: str) -> None:
        """End the generation; a second call does nothing."""
        with self._lock:
            if self.is_over:
                return
            self._why, self.is_over = why, True
            listeners = [each() for each in self._listeners]
        self._over.set()
        for listener in listeners:
            if listener is not None:
                listener()

    def wait(self, seconds: float) -> bool:
        """Wait until the generation is over, but at most `seconds`; return whether it is."""
        return self._over.wait(seconds)

    def refuse_fork(self, kind: str, name: str | None = None) -> None:
        """Raise StateError in a process that was forked from the rank. The arguments say what it called."""
        if self.is_inherited:
            raise self.error(kind if name is None else f"{kind} {name!r}")

    def error(self, title: str) -> MultiringError:
        """Return the error of the operation `title`, when the generation is over."""
        if self.is_inherited:
            return forked(title)
        return PeerLostError(f"{title}: {self._why}; the contents of its arrays are undefined")

    def begin_in_fork(self) -> None:
        """End the generation in a process that was forked from the rank."""
        self.is_over = self.is_inherited = True


def forked(title: str) -> StateError:
    """Return the error of the operation `title` in a process that was forked from a rank."""
    return StateError(f"{title}: this process was forked from a rank; only the rank may communicate")
