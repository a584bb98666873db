"""The World: one process's part in its job, from `init` to `shutdown`."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from multiring._native import Context
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rank_process import RankPosition, RankProcess
from multiring._runtime.engines.mpi import MpiEngine
from multiring._runtime.engines.mpi_library import end_despite_mpi
from multiring._runtime.events import Event, event_of
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.failures.generation_vote import GenerationVote
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.group.group import Group
from multiring._runtime.group.posting import ProcessServices
from multiring._runtime.job.launcher_news import LauncherNews
from multiring._runtime.job.membership import Membership
from multiring._runtime.rails.select import RailWatch
from multiring._runtime.tracing.clocks import MessageTimeLimit
from multiring._runtime.tracing.event_log import EventLog, EventReader
from multiring._runtime.tracing.step_reporter import StepReporter
from multiring._runtime.tracing.timeline import Timelines
from multiring._settings import Settings

_SIGNAL_CHECK_S = 0.2  # the longest time between two checks for Ctrl-C
_FILE_S = 2.0  # how long `shutdown` waits for the other ranks of this host to leave
_MOST_TIMELINE_S = 60.0  # how long to wait at most for the timeline parts of ranks on other hosts

Kind = TypeVar("Kind")


class JobObjects:
    """Objects of other modules that live as long as this generation, by class.

    Examples are process sets and an adapter's groups.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[type, Any] = {}

    def get(self, kind: type[Kind]) -> Kind | None:
        """Return the object of this class, or None."""
        found: Kind | None = self._things.get(kind)
        return found

    def made(self, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
        """Return the object of this class; create it with `make` if there is none."""
        found: Kind | None = self._things.get(kind)
        if found is None:
            with self._lock:
                found = self._things.get(kind)
                if found is None:
                    found = self._things[kind] = make()
        return found

    def take(self, kind: type[Kind]) -> Kind | None:
        """Remove and return the object of this class, or None."""
        with self._lock:
            found: Kind | None = self._things.pop(kind, None)
            return found


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's view of its job: its ranks, and the objects that reach them."""

    identity: Identity  # the rank's identity, from the launcher's variables
    settings: Settings
    membership: Membership  # the current ranks of the job
    services: ProcessServices
    context: Context
    engine: MpiEngine | None  # set if MPI carries data between hosts
    group: Group  # the group of all ranks
    pid: int
    rail_watch: RailWatch | None  # set if there are several rails
    control: Control | None  # set if there are other ranks
    vote: GenerationVote | None  # set if the ranks go on without lost ones
    reporter: StepReporter | None  # set if the launcher keeps a record of the job
    timelines: Timelines
    events: EventLog
    news: LauncherNews
    job_objects: JobObjects = field(default_factory=JobObjects)
    whole: "World | None" = None  # the World of all ranks, if this one is of some of them; see `part`

    @property
    def local_rank(self) -> int:
        """This process's rank among the ranks of its host, in the whole job: it numbers the host's devices."""
        membership = (self.whole or self).membership
        return membership.local_ranks.index(membership.rank)

    @property
    def local_size(self) -> int:
        """The number of ranks of the whole job on this host."""
        return len((self.whole or self).membership.local_ranks)

    @property
    def place(self) -> RankPosition:
        """The values of `rank()`, `size()`, `local_rank()` and `local_size()`."""
        return RankPosition(self.membership.rank, self.membership.size, self.local_rank, self.local_size)

    @property
    def rank_process(self) -> RankProcess:
        """The process that is this rank. In a fork it is the parent process."""
        return RankProcess(self.pid, self.place)

    def in_generation(self, membership: Membership) -> "World":
        """Return the World of the next generation, with the same connections and memory.

        Every rank of the new generation must make the same call. The previous generation's groups and objects stay
        open; their creators must close them.
        """
        end = GenerationEnd(self.services.world_rank, may_end=self.vote is not None)
        if self.vote is not None:
            self.vote.watch(end, membership.number)
        if self.reporter is not None:
            self.reporter.membership = membership
        return self._with_ranks(membership, end, None)

    def part(self, membership: Membership, end: GenerationEnd) -> "World":
        """Return the World of some ranks of this one, which work by themselves for a time.

        It has the same connections and memory. Every rank of the part must make the same call.

        Args:
            membership: the ranks of the part, under a job's name that no other part has.
            end: its `finish` makes the part's operations fail on this rank.
        """
        return self._with_ranks(membership, end, self.whole or self)

    def _with_ranks(self, membership: Membership, end: GenerationEnd, whole: "World | None") -> "World":
        numbers = {number: rank for rank, number in enumerate(membership.ids)}
        services = replace(self.services, rank_of_id=numbers, generation=end)
        return replace(
            self,
            membership=membership,
            services=services,
            group=group_named("world", services, membership),
            timelines=Timelines(
                membership,
                self.context,
                services.glossary,
                lambda name: group_named(name, services, membership),
            ),
            job_objects=JobObjects(),
            whole=whole,
        )

    def drain_events(self) -> list[Event]:
        """Return the events since the last call, oldest first.

        At most 65,536 events are kept between calls.
        """
        return [event_of(raw, self.membership.rank) for raw in self.events.take()]

    def event_reader(self) -> EventReader:
        """Return a reader of the events recorded from now on.

        `drain_events` still returns all events.
        """
        return self.events.reader()

    def end(self, grace_s: float, *, announce: bool) -> None:
        """Leave the job at the end of the process.

        The method works like `close`, but does not wait for timelines on one host.
        """
        self._close(grace_s, announce=announce, file_s=0.0)

    def close(self, grace_s: float, *, announce: bool) -> None:
        """Leave the job when all operations have ended, or after `grace_s` seconds.

        Ctrl-C ends the wait. If all ranks are on one host, each leaves its part of the timeline on disk, and the last
        rank merges the parts. A short wait for the other ranks makes sure that the file exists if all ranks leave
        together.
        """
        self._close(grace_s, announce=announce, file_s=_FILE_S)

    def _close(self, grace_s: float, *, announce: bool, file_s: float) -> None:
        # If this rank fails by itself, the other ranks have not detected the failure yet and do not wait for its
        # timeline.
        is_wanted = announce or self.context.has_failed()
        if self.reporter is not None:
            self.reporter.stop()
        if len(self.membership.topology.hosts) > 1 and self.timelines.path is not None:
            most_s = min(self.settings.stall_warn_s, _MOST_TIMELINE_S) if announce else grace_s
            patience = MessageTimeLimit(most_s, self.services.rank_status.leave())
            try:
                self.timelines.close(patience, is_wanted=is_wanted)
            finally:
                self._leave(grace_s, announce=announce)
            return
        make_file = self.timelines.leave_part(is_wanted=is_wanted)
        try:
            self._leave(grace_s, announce=announce)
        finally:
            make_file(file_s)

    def _leave(self, grace_s: float, *, announce: bool) -> None:
        deadline = time.monotonic() + grace_s
        if self.rail_watch is not None:
            self.rail_watch.stop()
        try:
            while not self.context.settled(_SIGNAL_CHECK_S) and time.monotonic() < deadline:
                pass
        finally:
            self.context.close(0.5, announce)
            if self.vote is not None:
                self.vote.leave(in_order=announce)
            if self.control is not None:
                self.control.stop()
            has_ended = self.engine is None or self.engine.stop()
            if not has_ended or not announce or self.context.has_failed():
                end_despite_mpi()


def group_named(name: str, services: ProcessServices, membership: Membership) -> Group:
    """Return the group of all ranks of a generation with the name `name`.

    The same name gives the same group on all ranks.
    """
    key = hashlib.blake2b(f"{name}|{membership.key}".encode(), digest_size=16).digest()
    return Group(services, membership.ids, membership.topology, key)
