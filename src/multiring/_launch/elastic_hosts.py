"""Jobs on several hosts whose ranks go on without lost ones, and in which newcomers replace them.

The ranks vote and wait for newcomers through the agents of their hosts (client_relay.py). A host whose agent is lost
counts as lost with all its ranks: what they say is not heard any more, so they can neither vote nor come in again, and
their agent ends them when it finds that the launcher is lost. So of two parts of a job, the one that the launcher
reaches goes on.
"""

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiring._launch.client_relay import INTAKE, ProcessRelay, name_of_newcomer, votes_of
from multiring._launch.control_link import secret_of_start, silence_of
from multiring._launch.control_tcp import ControlListener
from multiring._launch.growing_job import Growing
from multiring._launch.host_agent import PORTS
from multiring._launch.host_discovery import HostDiscovery
from multiring._launch.host_health import HostHealth
from multiring._launch.host_sessions import HostSession, HostSessions
from multiring._launch.hosts_job import HostsJob
from multiring._launch.hosts_loop import HostsTask
from multiring._launch.intake_point import FormationAddresses, FormationOpening, IntakePoint
from multiring._launch.job import JobOptions
from multiring._launch.job_process import JobProcess, text_of
from multiring._launch.local import refuse_too_few_places, refuse_wrong_numbers
from multiring._launch.shrinking_job import LEFT_CODE, Shrinking
from multiring._launch.vote_point import VotePoint
from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._runtime.bootstrap.handshake import Message
from multiring._runtime.failures.formation_place import FormationPlace
from multiring.errors import LaunchError

END_S = 0.3  # how long what ranks have left behind may take to end

if TYPE_CHECKING:
    from multiring._launch.local_point import LocalClient, LocalPoint


class _RelayingJob(Shrinking, HostsJob):
    """The part that hears the processes of all hosts, through the hosts' agents."""

    def __init__(
        self,
        sessions: HostSessions,
        task: HostsTask,
        options: JobOptions,
        number: int,
        listener: ControlListener | None = None,
    ) -> None:
        super().__init__(sessions, task, options, number, listener)
        self._prepare_to_go_on(options)
        self._points: dict[str, LocalPoint[Any]] = {}
        self._relayed: dict[tuple[HostSession, int], tuple[LocalPoint[Any], LocalClient]] = {}
        self._name = ""  # this start's, once it has begun
        self._told: Message = {}  # what the agents of all hosts are told at the beginning
        self._leaving: set[HostSession] = set()  # hosts that got SIGTERM

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        self._votes = VotePoint(None, b"", "", (), self._say)  # until there are ranks

    def _wait_until_ready(self) -> bool:
        are_ready = super()._wait_until_ready()
        if are_ready and any(each.shows_itself for each in self._sessions.all):  # the nodes have told their numbers
            refuse_wrong_numbers(self._options, sum(each.ranks for each in self._sessions.all))
            refuse_too_few_places(self._options, [(each.name, each.slots) for each in self._sessions.all])
        return are_ready

    def _prepare_start(self, told: Message) -> None:
        super()._prepare_start(told)
        told["min_ranks"], told["max_ranks"] = self._options.min_ranks, self._options.max_ranks
        self._told, self._name = told, told["job"]
        self._take_votes(votes_of(0), self._secret_of(self._name), self._name, self._members)

    def _take_votes(self, name: str, secret: str, job: str, members: Sequence[JobProcess]) -> None:
        """Have these ranks vote from now on, and no others."""
        former, self._votes = (
            self._votes,
            VotePoint(None, secret.encode(), job, [each.name for each in members], self._say),
        )
        self._relayed = {key: found for key, found in self._relayed.items() if found[0] is not former}
        self._points = {
            **{each: point for each, point in self._points.items() if point is not former},
            name: self._votes,
        }

    def _secret_of(self, job: str) -> str:
        return secret_of_start(self._task.secret, job)

    @property
    def _silence_s(self) -> float:
        return silence_of(self._task.wire_timeout_s)

    def _handlers(self) -> dict[str, Callable[[HostSession, Message], None]]:
        return {**super()._handlers(), "relay": self._on_relay}

    def _on_relay(self, session: HostSession, message: Message) -> None:
        """Hear what an agent says of a process of its host; see `client_relay`."""
        key = session, message["relay"]
        if "point" in message:
            point = self._points.get(message["point"])
            if point is not None and session.link is not None:
                relay = ProcessRelay(session.link, message["relay"], self._number)
                self._relayed[key] = point, point.meet(relay, message["pid"])
            return
        if key not in self._relayed:
            return  # it belongs to a formation that has ended
        point, client = self._relayed[key]
        if "line" in message:
            point.hear(client, message["line"].encode("latin-1"))
        elif "used" in message:
            client.told_used = message["used"]
        elif "closed" in message:
            point.lose(client, has_ended=False, is_unsure=message["closed"])
        else:
            point.lose(client, has_ended=True, is_unsure=False)

    def _on_signal_elsewhere(self, session: HostSession, message: Message) -> None:
        """Have the ranks of a host leave that is asked to end, such as a machine that its cloud takes back.

        Slurm asks all nodes: where it has started the agents, the job ends.
        """
        if message["signal"] != signal.SIGTERM or not (session.is_opened_here or session.shows_itself):
            super()._on_signal_elsewhere(session, message)
            return
        self._leaving.add(session)
        ranks = [
            rank
            for rank, (member, host) in enumerate(zip(self._members, self._host_of, strict=True))
            if host is session and member.code is None
        ]
        who = text_of([self._members[rank] for rank in ranks]) if ranks else "no rank"
        self._say(f"{session.name} got SIGTERM: {who} {'are' if len(ranks) > 1 else 'is'} to leave")
        session.send(signal=signal.SIGTERM, ranks=ranks)

    def _on_lost_host(self, session: HostSession) -> None:
        super()._on_lost_host(session)
        self._leaving.discard(session)
        self._forget_processes(session)

    def _do_more(self) -> None:
        super()._do_more()
        running = {host for member, host in zip(self._members, self._host_of, strict=True) if member.code is None}
        for session in () if self._is_ending else self._leaving - running:
            if not session.shows_itself or not session.is_open:
                continue
            # The user has asked the command of this node to end, and its ranks have left.
            self._leaving.discard(session)
            session.send(end=END_S, start=self._number)
            self._sessions.send_away(session, "the ranks of this node have left, as SIGTERM has asked for", LEFT_CODE)
            self._forget_processes(session)

    def _forget_processes(self, session: HostSession) -> None:
        """Take all processes of a host as ended."""
        for key in [key for key in self._relayed if key[0] is session]:
            point, client = self._relayed.pop(key)
            # No vote is lost: the host's ranks went by none that is not here, and nobody heard of one.
            point.lose(client, has_ended=True, is_unsure=False)


class ShrinkingHostsJob(_RelayingJob):
    """A job on several hosts that does not end because ranks or hosts are lost. The arguments are those of HostsJob."""

    def _on_ready(self, session: HostSession, message: Message) -> None:
        super()._on_ready(session, message)
        if not self._is_waiting:
            self._sessions.send_away(session, "the job goes on without this node: only --max-ranks lets newcomers in")


@dataclass(frozen=True, slots=True)
class HostSource:
    """Where a job finds more hosts.

    - session_of: makes the session of a host with its places, by its number in the job.
    - places: the hosts that are known, with their places.
    - discovery: names the hosts from now on.
    """

    session_of: Callable[[tuple[str, int], int], HostSession]
    places: tuple[tuple[str, int], ...]
    discovery: HostDiscovery | None = None


class GrowingHostsJob(Growing, _RelayingJob):
    """A job on several hosts whose lost ranks are replaced by newcomers, on hosts with free places.

    The arguments are those of HostsJob, and more:

    Args:
        sessions: as in HostsJob.
        task: as in HostsJob.
        options: as in HostsJob.
        number: as in HostsJob.
        listener: as in HostsJob.
        source: the hosts without ranks at the start.
    """

    def __init__(
        self,
        sessions: HostSessions,
        task: HostsTask,
        options: JobOptions,
        number: int,
        listener: ControlListener | None = None,
        source: "HostSource | None" = None,
    ) -> None:
        super().__init__(sessions, task, options, number, listener)
        self._source = source
        self._discovery = None if source is None else source.discovery
        known = {session.name for session in sessions.all}
        self._spares = [] if source is None else [place for place in source.places if place[0] not in known]
        self._health = HostHealth(options.cooldown_s)
        self._local: dict[int, int] = {}  # process -> the number of its place on its host
        self._late: dict[HostSession, float] = {}  # hosts that are to come -> when they must have
        self._token = ""
        self._prepare_to_grow(options, 0)

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        self._intake = IntakePoint(None, "", (), 0, FormationOpening(self._open_votes, self._addresses_of), self._say)

    def _prepare_start(self, told: Message) -> None:
        super()._prepare_start(told)
        size = len(self._members)
        self._prepare_to_grow(self._options, size)
        own = self._secret_of(self._name), self._name
        self._intake = IntakePoint(
            None,
            self._name,
            [own] * size,
            self._most,
            FormationOpening(self._open_votes, self._addresses_of),
            self._say,
        )
        self._points[INTAKE] = self._intake
        for session in self._sessions.all:
            ranks = [rank for rank, host in enumerate(self._host_of) if host is session]
            self._local.update({rank: local for local, rank in enumerate(ranks)})

    def _goes_on(self) -> bool:
        return bool(self._ended) or super()._goes_on()

    # ---- formations ----

    def _addresses_of(self, job: str, numbers: Sequence[int]) -> FormationAddresses:
        self._token = secrets.token_hex(8)
        hosts = [self._host_of[number] for number in numbers]
        rendezvous = f"@multiring-{self._token}"
        if any(host is not hosts[0] for host in hosts):
            ready = hosts[0].ready or {}
            first, last = self._task.ports or PORTS
            spare = ready.get("spare_ports")
            # A port that is taken meanwhile costs a second: the ranks meet again.
            port = spare.pop() if spare else first + secrets.randbelow(last - first + 1)
            rendezvous = str(TcpAddress(ready["address"], port))
        return FormationAddresses(rendezvous, self._secret_of(job), tuple(self._votes_at(host) for host in hosts))

    def _votes_at(self, session: HostSession) -> str:
        return f"\0multiring-{self._token}-vote-{session.index}"

    def _open_votes(self, place: FormationPlace, numbers: Sequence[int]) -> None:
        name = votes_of(place.formation)
        for session in self._sessions.all:
            session.send(relay=-1, open=name, address=self._votes_at(session))
        self._take_votes(name, place.secret, place.job, [self._members[each] for each in numbers])

    # ---- newcomers ----

    def _begin_newcomer(self, number: int) -> bool:
        session = self._host_for_newcomer()
        if session is None:
            return False
        taken = {self._local[each] for each in self._running_on(session)}
        self._local[number] = min(set(range(self._slots_of(session))) - taken)
        job = name_of_newcomer(self._name, number)
        self._members.append(self._member(session, number, number + 1))
        self._host_of.append(session)
        self._intake.expect(number, self._secret_of(job), job)
        self._recorder.add_newcomer(number, session.host)
        session.send(newcomer=number, local=self._local[number], slots=self._slots_of(session), start=self._number)
        self._say(f"rank {number} is started as a newcomer on {session.name}")
        return True

    def _slots_of(self, session: HostSession) -> int:
        """Return how many places a host has for ranks now."""
        return session.slots

    def _running_on(self, session: HostSession) -> list[int]:
        pairs = enumerate(zip(self._members, self._host_of, strict=True))
        return [number for number, (member, host) in pairs if host is session and member.code is None]

    def _host_for_newcomer(self) -> HostSession | None:
        """Return a host with a free place; have one come if there is none."""
        usable = [
            each for each in self._sessions.all if self._health.may_be_used(each.host) and each not in self._leaving
        ]
        for session in usable:
            if session.is_open and not session.is_over and len(self._running_on(session)) < self._slots_of(session):
                return session
        if not self._late:
            # A host that was lost may not answer for a minute, so hosts that were not used yet come first.
            if self._spares and self._source is not None:
                self._sessions.all.append(self._source.session_of(self._spares.pop(0), len(self._sessions.all)))
                self._have_come(self._sessions.all[-1])
                return None
            wanted = [each for each in usable if each.is_opened_here and self._slots_of(each)]
            gone = next((each for each in wanted if each.link is None), None)
            if gone is not None:
                self._have_come(gone)
        return None

    def _have_come(self, session: HostSession) -> None:
        """Start the agent of a host that has none."""
        self._late[session] = time.monotonic() + self._task.patience_s
        try:
            session.open()
        except LaunchError as error:
            self._miss(session, str(error))

    def _miss(self, session: HostSession, why: str) -> None:
        """Go on without a host that was to come."""
        self._late.pop(session, None)
        self._sessions.send_away(session, f"the job goes on without this node: {why}")
        self._note_failure(session, f"{session.name} does not come: {why}")

    def _note_failure(self, session: HostSession, told: str = "") -> None:
        pause_s = self._health.note_failure(session.host)
        if told:
            self._say(told)
        if pause_s is not None:
            self._say(f"{session.name} has failed twice: no newcomers are started there for {pause_s:g} s")

    # ---- hosts ----

    def _wake_at(self) -> float | None:
        return min((at for at in (super()._wake_at(), *self._late.values()) if at is not None), default=None)

    def _do_more(self) -> None:
        super()._do_more()
        for session, until in list(self._late.items()):
            if time.monotonic() >= until:
                self._miss(session, f"it has not answered within {self._task.patience_s:g} s")

    def _greet(self, session: HostSession, message: Message) -> None:
        try:
            super()._greet(session, message)
        except LaunchError as error:
            if self._is_waiting:
                raise
            self._miss(session, str(error))

    def _on_ready(self, session: HostSession, message: Message) -> None:
        try:
            super()._on_ready(session, message)
        except LaunchError as error:
            if self._is_waiting:
                raise
            self._miss(session, str(error))
            return
        if not self._is_waiting and session.is_over:
            self._late.pop(session, None)
            session.is_over = False
            hosts = [*self._told["hosts"], (session.host, 0)]
            session.send(begin={**self._told, "hosts": hosts, "index": len(hosts) - 1}, start=self._number)

    def _on_error(self, session: HostSession, message: Message) -> None:
        if session in self._late:
            self._miss(session, message["error"])
        else:
            super()._on_error(session, message)

    def _on_lost_host(self, session: HostSession) -> None:
        if session in self._late:
            self._miss(session, session.reason())
            return
        was_over = session.is_over
        super()._on_lost_host(session)
        if not was_over:
            self._note_failure(session)

    def _go_on_without(self, member: JobProcess) -> None:
        super()._go_on_without(member)
        session = self._host_of[self._members.index(member)]
        if member.code != LEFT_CODE and session.is_open:
            self._note_failure(session)
