"""Passes lines on between the processes of one host and the launcher on another host.

The agent opens the local sockets at which the processes would meet a launcher of their host. It watches the processes:
it tells their ends after all that they have said. The launcher's points decide, as if the processes were on its host.

Each message about a process has the number that the agent gave it, in "relay":

    agent to launcher  point, pid    a process has come to a point, by the point's name
                       line          it says this
                       used          the CPU time that it has used, told with each question whether it lives
                       closed        its connection is closed; the value says whether a line may be lost
                       ended         it has ended, and all that it has said was told
    launcher to agent  tell          tell it this
                       kill          kill it
                       close         close its connection

A formation's secret does not travel: both sides compute it from the job's secret.
"""

import itertools
import selectors
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from multiring._launch.control_link import secret_of_start
from multiring._launch.local_point import LocalClient, LocalPoint
from multiring._runtime.bootstrap.handshake import Message
from multiring._runtime.failures.computing_processes import cpu_time
from multiring._runtime.failures.formation_place import FormationPlace
from multiring._runtime.failures.intake_channel import ADMITTED, PING
from multiring._runtime.failures.launcher_channel import LauncherMessage

INTAKE = "intake"
_VOTES = "votes "
_CODE = "latin-1"  # each byte is a character


def votes_of(formation: int) -> str:
    """Return the name of the point at which a formation's ranks meet the launcher for votes."""
    return f"{_VOTES}{formation}"


def name_of_newcomer(job: str, number: int) -> str:
    """Return the job's name that a newcomer is given."""
    return f"{job}/newcomer-{number}"


class _Sender(Protocol):
    def send(self, **message: object) -> None: ...


class ProcessRelay:
    """The launcher's way to a process of another host.

    Args:
        link: the connection to the agent of that host.
        number: the agent's number of the process.
        start: the number of the ranks' start.
    """

    def __init__(self, link: _Sender, number: int, start: int) -> None:
        self._link, self._number, self._start = link, number, start
        self._is_closed = False

    def send(self, line: bytes) -> None:
        """Pass a line on to the process."""
        self._link.send(relay=self._number, tell=_with_secret(line, lambda _: "").decode(_CODE))

    def kill(self) -> None:
        """Have the process killed."""
        self._link.send(relay=self._number, kill=True)

    def close(self) -> None:
        """Have the process's connection closed. A further call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._link.send(relay=self._number, close=True)


@dataclass(eq=False, slots=True)
class _Client(LocalClient):
    """A process of this host."""


class _RelayPoint(LocalPoint[_Client]):
    """One local socket of the agent.

    Args:
        name: the point's name.
        address: the address of an abstract socket.
        report: sends a message to the launcher.
        numbers: gives each process a number.
    """

    def __init__(self, name: str, address: str, report: Callable[..., None], numbers: "itertools.count[int]") -> None:
        super().__init__(address, _Client)
        self.name, self._report, self._next = name, report, numbers
        self.by_number: dict[int, _Client] = {}

    def say(self, client: _Client, line: bytes) -> None:
        """Pass a line of the launcher on."""
        self._send(client, line)
        if line.startswith(PING.encode()):
            self._report(relay=client.number, used=cpu_time(client.pid))

    def kill(self, client: _Client) -> None:
        """Kill a process."""
        self._kill(client)

    def drop(self, client: _Client) -> None:
        """Close a process's connection."""
        self._drop(client)

    def _take_line(self, caller: _Client, line: bytes) -> None:
        if caller.number is None:
            number = next(self._next)
            self._know(caller, number)
            self.by_number[number] = caller
            self._report(relay=number, point=self.name, pid=caller.pid)
        self._report(relay=caller.number, line=line.decode(_CODE))

    def _take(self, caller: _Client, line: LauncherMessage) -> None:
        """Do nothing: the launcher takes the lines."""

    def _see_end(self, caller: _Client) -> None:
        self._report(relay=caller.number, ended=True)

    def _drop(self, caller: _Client) -> None:
        was_open = not caller.is_closed
        super()._drop(caller)
        if was_open and caller.number is not None and not caller.has_ended:
            self._report(relay=caller.number, closed=caller.is_unsure)


class ClientRelays:
    """All local sockets of one agent, in one start of the ranks.

    Args:
        report: sends a message about this start to the launcher.
        secret: the job's secret.
    """

    def __init__(self, report: Callable[..., None], secret: bytes) -> None:
        self._report, self._secret = report, secret
        self._numbers = itertools.count()
        self._points: list[_RelayPoint] = []

    def open(self, name: str, address: str) -> None:
        """Open a point.

        Raises:
            OSError: the address is in use.
        """
        if name.startswith(_VOTES):  # the formation before has ended
            for point in [each for each in self._points if each.name.startswith(_VOTES)]:
                self._points.remove(point)
                point.close()
        self._points.append(_RelayPoint(name, address, self._report, self._numbers))

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register all descriptors with `poll`, each with what to do as its data."""
        for point in self._points:
            point.watch(poll)

    def obey(self, message: Message) -> None:
        """Do what the launcher says about a process, or open a point that it names."""
        if "open" in message:
            self.open(message["open"], message["address"])
            return
        for point in self._points:
            client = point.by_number.get(message["relay"])
            if client is None:
                continue
            if "tell" in message:
                point.say(client, _with_secret(message["tell"].encode(_CODE), self._secret_of))
            elif "kill" in message:
                point.kill(client)
            else:
                point.drop(client)

    def _secret_of(self, job: str) -> str:
        return secret_of_start(self._secret, job)

    def close(self) -> None:
        """Close all points: the processes find that the launcher is lost."""
        points, self._points = self._points, []
        for point in points:
            point.close()


def _with_secret(line: bytes, secret_of: Callable[[str], str]) -> bytes:
    """Return a line, with another secret if it is a place in a formation."""
    begin = f"{ADMITTED} ".encode()
    if not line.startswith(begin):
        return line
    place = FormationPlace.decode(line[len(begin) :])
    return begin + replace(place, secret=secret_of(place.job)).encode()
