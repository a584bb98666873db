"""The mpi engine's hands: one thread that makes all our MPI calls.

What is to be carried, and where to, is the native core's business (native/core/mpi_link.h): here messages are only
posted and waited for. The thread sleeps between two looks, the longer the less happens, so that training and other
ranks have the cores; it sleeps until it is woken while nothing is on its way.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from multiring._native import Context
from multiring.errors import LaunchError
from multiring.runtime.bootstrap.launchers import Identity
from multiring.runtime.bootstrap.rendezvous import Rendezvous
from multiring.runtime.engines.mpi_library import mpi_for_engine

_log = logging.getLogger("multiring")
# Nanoseconds between two looks while messages are on their way: a socket's buffer holds what a wire of 10 Gbit/s brings
# within the longest (1.25 MB), and an eighth of what passed since anything moved is a delay that nobody notices.
_SHORTEST_NS = 20_000
_LONGEST_NS = 1_000_000
_SHARE = 8
_DUPLICATE_PAUSE_S = 0.001


class _Message(NamedTuple):
    """A bounce buffer, as the Context hands it over."""

    number: int
    peer: int
    tag: int
    is_outgoing: bool
    address: int
    size_bytes: int


class MpiEngine:
    """Carries a Context's messages over `communicator`, whose ranks are the job's, until the Context is closed."""

    def __init__(self, mpi: Any, communicator: Any, context: Context) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._context = context
        self._requests: list[Any] = []  # as Testsome wants them
        self._messages: list[_Message] = []  # of the same places
        self._is_clean = True
        # A daemon: the interpreter joins others before it runs the handlers that close the Context.
        self._thread = threading.Thread(target=self._run, name="multiring-mpi", daemon=True)
        self._thread.start()

    @property
    def serves_threads(self) -> bool:
        """Whether the program may call MPI itself, from any thread, beside this one."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def stop(self) -> None:
        """Return once no call of ours is in MPI; the Context has been closed."""
        self._thread.join()
        if self._is_clean:
            _Copy.communicator = self._communicator

    def _run(self) -> None:
        moved = time.monotonic_ns()
        while True:
            quiet = (time.monotonic_ns() - moved) // _SHARE
            bounces, gone, pending, closed = self._context.collect(max(_SHORTEST_NS, min(quiet, _LONGEST_NS)))
            for peer in gone:
                self._set_aside([place for place, each in enumerate(self._messages) if each.peer == peer])
            if closed:
                self._set_aside(range(len(self._messages)))
                return
            for bounce in bounces:
                self._post(_Message(*bounce))
            done = self._look() if pending else []
            if done:
                self._context.carried(done)
            if done or bounces:
                moved = time.monotonic_ns()

    def _post(self, message: _Message) -> None:
        start = self._communicator.Isend if message.is_outgoing else self._communicator.Irecv
        memory = self._mpi.buffer.fromaddress(message.address, message.size_bytes)
        try:
            self._requests.append(start([memory, self._mpi.BYTE], message.peer, message.tag))
        except self._mpi.Exception as error:
            self._lose(message.peer, error)
        else:
            self._messages.append(message)

    def _look(self) -> list[int]:
        """Return the numbers of the messages that are done; lets MPI move the others along."""
        try:
            if not self._requests:
                self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
                return []
            return self._remove(self._mpi.Request.Testsome(self._requests) or [])
        except self._mpi.Exception:
            return self._look_at_each()

    def _look_at_each(self) -> list[int]:
        """As `_look`, after an error: finds out whose messages fail."""
        done = []
        for place, request in enumerate(self._requests):
            try:
                if request.Test():
                    done.append(place)
            except self._mpi.Exception as error:
                self._lose(self._messages[place].peer, error)
        return self._remove(done)

    def _remove(self, places: Sequence[int]) -> list[int]:
        """Drop what is at `places` and return the messages' numbers."""
        numbers = [self._messages[place].number for place in places]
        for place in sorted(places, reverse=True):
            del self._requests[place], self._messages[place]
        return numbers

    def _lose(self, peer: int, error: Exception) -> None:
        self._is_clean = False
        self._context.cannot_reach(peer, f"MPI reports: {error}")  # its messages come back as those of one who is gone

    def _set_aside(self, places: Sequence[int]) -> None:
        """Give up messages of which nobody wants to hear again; nothing waits for them, whatever MPI does."""
        for place in places:
            self._is_clean = False
            request = self._requests[place]
            try:
                if not self._messages[place].is_outgoing:  # sending cannot be taken back: MPI 4.0, section 3.8.4
                    request.Cancel()
                request.Free()
            except self._mpi.Exception as error:
                _log.debug("giving up a message: %s", error)
        self._remove(places)


class _Copy:
    """Our copy of COMM_WORLD, kept from one init to the next unless something was left in it."""

    communicator: ClassVar[Any] = None


class MpiHere:
    """What this rank can say of MPI before it knows of the others."""

    def __init__(self, mpi: Any, problem: str | None) -> None:
        self._mpi = mpi
        self._problem = problem

    @classmethod
    def find(cls, identity: Identity) -> "MpiHere":
        """Look for the MPI that started this rank; what is wrong with it this rank tells the others."""
        try:
            return cls(mpi_for_engine(identity.rank, identity.size, identity.source), None)
        except LaunchError as error:
            return cls(None, str(error))

    @property
    def peer_info(self) -> dict[str, Any]:
        """What the other ranks are to know."""
        return {"problem": self._problem, "has_copy": _Copy.communicator is not None}

    def start(
        self, context: Context, rendezvous: Rendezvous, peer_infos: Sequence[dict[str, Any]], timeout_s: float
    ) -> MpiEngine:
        """Return the engine at work; all ranks do this together.

        Raises:
            RendezvousError: some rank failed; the same words on all.
        """
        communicator, _Copy.communicator = _Copy.communicator, None
        error, began = None, time.monotonic()
        if not all(peer_info["has_copy"] for peer_info in peer_infos):
            try:
                communicator = self._duplicate(rendezvous, began + timeout_s)
            except (self._mpi.Exception, TimeoutError) as failure:
                error = f"copying MPI's COMM_WORLD failed: {failure}"
            else:
                error = None if communicator else "it gave up copying MPI's COMM_WORLD because another rank had failed"
        rendezvous.agree(error, began)
        return MpiEngine(self._mpi, communicator, context)

    def _duplicate(self, rendezvous: Rendezvous, deadline: float) -> Any:
        """Return a copy of COMM_WORLD for us alone; None where another rank failed first."""
        # Not Dup: that would wait for ever for a rank that has died.
        copy, request = self._mpi.COMM_WORLD.Idup()
        while not request.Test():
            if rendezvous.disturbed():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError("some rank did not come to it in time")
            time.sleep(_DUPLICATE_PAUSE_S)
        return copy


def check_engines(peer_infos: Sequence[dict[str, Any]]) -> None:
    """Raise LaunchError, the same on all ranks, where the engine differs or some rank cannot use the one it is to."""
    engines = [peer_info["engine"] for peer_info in peer_infos]
    if "mpi" in engines and len(set(engines)) > 1:
        first = {engine: engines.index(engine) for engine in sorted(set(engines))}
        raise LaunchError(
            f"MULTIRING_ENGINE differs, by the first rank that has it: {first}; mpi has to be set on all ranks"
        )
    for rank, peer_info in enumerate(peer_infos):
        if peer_info["mpi"] and peer_info["mpi"]["problem"] is not None:
            raise LaunchError(f"rank {rank}: {peer_info['mpi']['problem']}")
