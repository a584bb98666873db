"""The mpi engine: one thread that makes all MPI calls of multiring.

The native core decides which data goes where (native/core/links/mpi_link.h); this module only posts messages and waits
for them. Between two polls the thread sleeps, and longer if nothing happens, so that training and other ranks can use
the cores. While no message is in flight, the thread sleeps until it is woken.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from multiring._limits.processes import start_thread
from multiring._native import Context
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous import Rendezvous
from multiring._runtime.engines.mpi_library import mpi_for_engine
from multiring.errors import LaunchError

_log = logging.getLogger("multiring")
# Nanoseconds between two polls while messages are in flight. A wire of 10 Gbit/s brings 1.25 MB in the longest pause,
# and a socket's buffer can hold this much. The pause is an eighth of the time since the last progress, which delays a
# message only slightly.
_SHORTEST_NS = 20_000
_LONGEST_NS = 1_000_000
_SHARE = 8
_DUPLICATE_PAUSE_S = 0.001
_END_S = 10.0


class _Message(NamedTuple):
    """A bounce buffer of the Context, to be sent or received."""

    number: int
    peer: int
    tag: int
    is_outgoing: bool
    address: int
    size_bytes: int


class MpiEngine:
    """Transfers a Context's messages over MPI until the Context is closed.

    `communicator` has the job's ranks.
    """

    def __init__(self, mpi: Any, communicator: Any, context: Context) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._context = context
        self._requests: list[Any] = []  # the argument of Testsome
        self._messages: list[_Message] = []  # the message of each request
        self._is_clean = True
        # The thread is a daemon, because the interpreter joins other threads before it closes the Context.
        self._thread = threading.Thread(target=self._run, name="multiring-mpi", daemon=True)
        start_thread(self._thread, "this rank cannot start the thread that calls MPI")

    @property
    def serves_threads(self) -> bool:
        """Whether the program may call MPI from any thread while this thread also does."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def stop(self) -> bool:
        """Wait until the thread has made its last MPI call, and return whether it has.

        The Context must be closed already. MPI's calls that do not wait may do so all the same, for a peer that is
        gone. Then the thread is left to itself, and the copy of COMM_WORLD is not used again.
        """
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning("MPI has not returned from a call within %g s; the process ends without MPI_Finalize", _END_S)
            return False
        if self._is_clean:
            _Copy.communicator = self._communicator
        return True

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
        """Let MPI make progress; return the numbers of the finished messages."""
        try:
            if not self._requests:
                self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
                return []
            return self._remove(self._mpi.Request.Testsome(self._requests) or [])
        except self._mpi.Exception:
            return self._look_at_each()

    def _look_at_each(self) -> list[int]:
        """Do the same as `_look` after an error, and find the peers whose messages fail."""
        done = []
        for place, request in enumerate(self._requests):
            try:
                if request.Test():
                    done.append(place)
            except self._mpi.Exception as error:
                self._lose(self._messages[place].peer, error)
        return self._remove(done)

    def _remove(self, places: Sequence[int]) -> list[int]:
        """Drop the requests and messages at `places`, and return the messages' numbers."""
        numbers = [self._messages[place].number for place in places]
        for place in sorted(places, reverse=True):
            del self._requests[place], self._messages[place]
        return numbers

    def _lose(self, peer: int, error: Exception) -> None:
        self._is_clean = False
        self._context.cannot_reach(peer, f"MPI reports: {error}")  # the Context then returns the peer's messages

    def _set_aside(self, places: Sequence[int]) -> None:
        """Abandon messages when the job no longer needs their results.

        No thread waits for such a message any more.
        """
        for place in places:
            self._is_clean = False
            request = self._requests[place]
            try:
                if not self._messages[place].is_outgoing:  # a send cannot be cancelled: MPI 4.0, section 3.8.4
                    request.Cancel()
                request.Free()
            except self._mpi.Exception as error:
                _log.debug("giving up a message: %s", error)
        self._remove(places)


class _Copy:
    """multiring's copy of COMM_WORLD.

    The next `init` uses the same copy, unless the copy has abandoned messages.
    """

    communicator: ClassVar[Any] = None


class MpiHere:
    """This rank's MPI, before the ranks have met."""

    def __init__(self, mpi: Any, problem: str | None) -> None:
        self._mpi = mpi
        self._problem = problem

    @classmethod
    def find(cls, identity: Identity) -> "MpiHere":
        """Load the MPI that started this rank.

        An error is kept and reported to the other ranks later.
        """
        try:
            return cls(mpi_for_engine(identity.rank, identity.size, identity.source), None)
        except LaunchError as error:
            return cls(None, str(error))

    @property
    def peer_info(self) -> dict[str, Any]:
        """This rank's information for the other ranks."""
        return {"problem": self._problem, "has_copy": _Copy.communicator is not None}

    def start(self, context: Context, rendezvous: Rendezvous, peer_infos: Sequence[dict[str, Any]]) -> MpiEngine:
        """Start the engine. All ranks must call this method together.

        Raises:
            RendezvousError: a rank failed; all ranks raise the same text.
        """
        communicator, _Copy.communicator = _Copy.communicator, None
        error = None
        if not all(peer_info["has_copy"] for peer_info in peer_infos):
            try:
                communicator = self._duplicate(rendezvous, time.monotonic() + rendezvous.left_s)
            except (self._mpi.Exception, TimeoutError) as failure:
                error = f"copying MPI's COMM_WORLD failed: {failure}"
            else:
                error = None if communicator else "it gave up copying MPI's COMM_WORLD because another rank had failed"
        rendezvous.agree(error)
        return MpiEngine(self._mpi, communicator, context)

    def _duplicate(self, rendezvous: Rendezvous, deadline: float) -> Any:
        """Return a copy of COMM_WORLD for multiring; None if another rank failed first."""
        # Dup would wait forever for a dead rank.
        copy, request = self._mpi.COMM_WORLD.Idup()
        while not request.Test():
            if rendezvous.disturbed():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError("a rank did not take part in time")
            time.sleep(_DUPLICATE_PAUSE_S)
        return copy


def check_engines(peer_infos: Sequence[dict[str, Any]]) -> None:
    """Raise LaunchError if the engine differs between ranks or a rank cannot use it.

    All ranks raise the same text.
    """
    engines = [peer_info["engine"] for peer_info in peer_infos]
    if "mpi" in engines and len(set(engines)) > 1:
        first = {engine: engines.index(engine) for engine in sorted(set(engines))}
        raise LaunchError(
            f"MULTIRING_ENGINE differs; the first rank with each value is {first}; set mpi on all ranks, or on none"
        )
    for rank, peer_info in enumerate(peer_infos):
        if peer_info["mpi"] and peer_info["mpi"]["problem"] is not None:
            raise LaunchError(f"rank {rank}: {peer_info['mpi']['problem']}")
