"""The world: one process's part in its job, from `init` to `shutdown`."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from multiring._native import Context
from multiring.runtime.bootstrap.launchers import Identity
from multiring.runtime.bootstrap.rank_process import RankPosition, RankProcess
from multiring.runtime.engines.mpi import MpiEngine
from multiring.runtime.engines.mpi_library import end_despite_mpi
from multiring.runtime.events import Event, event_of
from multiring.runtime.failures.control_thread import Control
from multiring.runtime.group.group import Group
from multiring.runtime.group.posting import ProcessServices
from multiring.runtime.job.launcher_news import LauncherNews
from multiring.runtime.job.membership import Membership
from multiring.runtime.rails.select import RailWatch
from multiring.runtime.tracing.clocks import Patience
from multiring.runtime.tracing.event_log import EventLog, EventReader
from multiring.runtime.tracing.timeline import Timelines
from multiring.settings import Settings

_SIGNAL_CHECK_S = 0.2  # longest time between two looks for Ctrl-C
_FILE_S = 2.0  # for the other ranks of this host to leave as well, after `shutdown`
_MOST_TIMELINE_S = 60.0  # for ranks of other hosts to hand their parts over, also where nobody is warned of stalls

Kind = TypeVar("Kind")


class Belongings:
    """What others keep for as long as the job has these ranks, by its class: process sets, an adapter's groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[type, Any] = {}

    def get(self, kind: type[Kind]) -> Kind | None:
        """Return the one of this class, if there is one."""
        found: Kind | None = self._things.get(kind)
        return found

    def made(self, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
        """Return the one of this class, which `make` makes where there is none."""
        found: Kind | None = self._things.get(kind)
        if found is None:
            with self._lock:
                found = self._things.get(kind)
                if found is None:
                    found = self._things[kind] = make()
        return found

    def take(self, kind: type[Kind]) -> Kind | None:
        """Return the one of this class, which does not belong here any more."""
        with self._lock:
            found: Kind | None = self._things.pop(kind, None)
            return found


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A job's ranks as this process sees them, and what carries its bytes."""

    identity: Identity  # who started this process, as what
    settings: Settings
    membership: Membership  # who is in the job now
    services: ProcessServices
    context: Context
    engine: MpiEngine | None  # where MPI carries bytes between hosts
    group: Group  # of all ranks
    pid: int
    rail_watch: RailWatch | None  # where there is more than one
    control: Control | None  # where there are other ranks
    timelines: Timelines
    events: EventLog
    news: LauncherNews
    belongings: Belongings = field(default_factory=Belongings)

    @property
    def local_rank(self) -> int:
        """This process's place among the ranks of its host."""
        return self.membership.local_ranks.index(self.membership.rank)

    @property
    def local_size(self) -> int:
        """How many ranks its host has."""
        return len(self.membership.local_ranks)

    @property
    def place(self) -> RankPosition:
        """Where this rank is, as `rank()` and the like return it."""
        return RankPosition(self.membership.rank, self.membership.size, self.local_rank, self.local_size)

    @property
    def rank_process(self) -> RankProcess:
        """The process that is this rank: another one than this, in a fork."""
        return RankProcess(self.pid, self.place)

    def in_generation(self, membership: Membership) -> "World":
        """Return the job with other ranks, on the same connections and memory; every one of them does the same.

        Nothing of the last generation ends here: its groups, and what belongs to it, are whoever's made them.
        """
        numbers = {number: rank for rank, number in enumerate(membership.ids)}
        services, glossary = replace(self.services, rank_of_id=numbers), self.services.glossary
        return replace(
            self,
            membership=membership,
            services=services,
            group=group_named("world", services, membership),
            timelines=Timelines(
                membership, self.context, glossary, lambda name: group_named(name, services, membership)
            ),
            belongings=Belongings(),
        )

    def take_events(self) -> list[Event]:
        """Return what was recorded since the last call, oldest first; at most 65,536 are kept in between."""
        return [event_of(raw, self.membership.rank) for raw in self.events.take()]

    def event_reader(self) -> EventReader:
        """Return a reader of what is recorded from now on, which takes nothing from `take_events`."""
        return self.events.reader()

    def end(self, grace_s: float, *, announce: bool) -> None:
        """Leave the job as the process ends: like `close`, but on one host nobody is waited for with the timeline."""
        self._close(grace_s, announce=announce, file_s=0.0)

    def close(self, grace_s: float, *, announce: bool) -> None:
        """Leave the job once what is in flight has ended, after `grace_s` in any case. Ctrl-C ends the waiting.

        On one host each rank leaves its part of the timeline, and the last one writes the file of all. The others are
        waited for only briefly, so that the file is there where all ranks leave together.
        """
        self._close(grace_s, announce=announce, file_s=_FILE_S)

    def _close(self, grace_s: float, *, announce: bool, file_s: float) -> None:
        # The others do not wait for the timeline of one that fails by itself: they do not know yet.
        is_wanted = announce or self.context.has_failed()
        if len(self.membership.topology.hosts) > 1 and self.timelines.path is not None:
            most_s = min(self.settings.stall_warn_s, _MOST_TIMELINE_S) if announce else grace_s
            patience = Patience(most_s, self.services.lookout.leave())
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
            if self.control is not None:
                self.control.stop()
            if self.engine is not None:
                self.engine.stop()
            if not announce or self.context.has_failed():
                end_despite_mpi()


def group_named(name: str, services: ProcessServices, membership: Membership) -> Group:
    """Return the group of all ranks of a generation that goes by `name`: one group on all of them."""
    key = hashlib.blake2b(f"{name}|{membership.key}".encode(), digest_size=16).digest()
    return Group(services, membership.ids, membership.topology, key)
