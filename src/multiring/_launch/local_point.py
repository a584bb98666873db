"""A local socket at which processes of one job meet their launcher, with one connection a process.

What a process has sent outlives it. Its end is told by the kernel (a pidfd), and all that it has sent is read first.
Processes of other hosts meet the agent of their host instead, which passes their lines on (client_relay.py).
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from multiring._runtime.failures.launcher_channel import MOST_BYTES, LauncherMessage, MessageCutter, message_in

_UCRED = struct.Struct("3i")
_MOST_PENDING = 64  # connections that have not said who they are
_NUMBERS = 1 << 16


class RelayedProcess(Protocol):
    """The way to a process of another host, through the agent there."""

    def send(self, line: bytes) -> None:
        """Pass a line on to the process."""

    def kill(self) -> None:
        """Have the process killed."""

    def close(self) -> None:
        """Have the process's connection closed."""


@dataclass(eq=False, slots=True)
class LocalClient:
    """A connection, and the process at its other end."""

    connection: socket.socket | None  # None: the process is on another host
    pid: int
    relay: RelayedProcess | None = None
    told_used: int | None = None  # the CPU time that the agent of its host has last told, in the kernel's unit
    cutter: MessageCutter = field(default_factory=MessageCutter)
    number: int | None = None  # set once the process has said who it is
    process: int | None = None  # a file descriptor of the process, which is readable once it has ended
    is_watched: bool = False  # `process` is surely the sender's
    has_ended: bool = False
    is_unsure: bool = False  # a later message may have been lost
    unsent: bytes = b""
    is_closed: bool = False


AnyClient = TypeVar("AnyClient", bound=LocalClient)


class LocalPoint(ABC, Generic[AnyClient]):
    """The launcher's end of the connections.

    Args:
        address: the address of an abstract socket; None if all processes come by the agents of their hosts.
        kind: the class of the callers.
    """

    def __init__(self, address: str | None, kind: type[AnyClient]) -> None:
        self._kind = kind
        self._listener: socket.socket | None = None
        if address is not None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listener.bind(address)
            self._listener.listen(_NUMBERS)
        self._callers: list[AnyClient] = []

    def close(self) -> None:
        """Close all connections."""
        for caller in self._callers:
            self._drop(caller)
            if caller.process is not None:
                os.close(caller.process)
                caller.process = None
        if self._listener is not None:
            self._listener.close()

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register all descriptors with `poll`, each with what to do as its data."""
        if self._listener is not None:
            poll.register(self._listener, selectors.EVENT_READ, self._accept)
        for caller in self._callers:
            if not caller.is_closed and caller.connection is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.unsent else 0)
                poll.register(caller.connection, events, lambda caller=caller: self._serve(caller))
            if caller.process is not None and not caller.has_ended:
                poll.register(caller.process, selectors.EVENT_READ, lambda caller=caller: self._note_end(caller))

    # ---- processes of other hosts ----

    def meet(self, relay: RelayedProcess, pid: int) -> AnyClient:
        """Take a process of another host, which its agent has met."""
        caller = self._kind(None, pid, relay)
        self._callers.append(caller)
        return caller

    def hear(self, caller: AnyClient, line: bytes) -> None:
        """Take a line of a process of another host. One that counts as ended is not heard any more."""
        if not caller.is_closed and not caller.has_ended:
            try:
                self._take_line(caller, line)
            except ValueError:
                self._give_up(caller)

    def lose(self, caller: AnyClient, *, has_ended: bool, is_unsure: bool) -> None:
        """Note that the connection of a process of another host was closed, or that the process has ended.

        Args:
            caller: the process.
            has_ended: it has ended, or counts as ended: its host was lost, and nothing that it says is heard.
            is_unsure: a line may have been lost.
        """
        caller.is_unsure |= is_unsure
        was_there = not caller.has_ended
        caller.has_ended |= has_ended
        self._drop(caller)
        if has_ended and was_there and caller.number is not None:
            self._see_end(caller)

    def _take_line(self, caller: AnyClient, line: bytes) -> None:
        self._take(caller, message_in(line))

    @abstractmethod
    def _take(self, caller: AnyClient, line: LauncherMessage) -> None:
        """Handle a message."""

    @abstractmethod
    def _see_end(self, caller: AnyClient) -> None:
        """React to the end of a process that has said who it is, and whose messages are read."""

    def _know(self, caller: AnyClient, number: int) -> None:
        """Note who a caller is. Its answer to a message proves that its process is the one that is watched."""
        if caller.relay is None:
            caller.process = os.pidfd_open(caller.pid)
        caller.number = number

    def _kill(self, caller: AnyClient) -> None:
        if caller.relay is not None and not caller.has_ended:
            caller.relay.kill()
        if caller.process is not None and not caller.has_ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(caller.process, signal.SIGKILL)

    # ---- what comes ----

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, user, _ = _UCRED.unpack(found)
            pending = sum(each.number is None and not each.is_closed for each in self._callers)
            if user != os.geteuid() or pending >= _MOST_PENDING:
                connection.close()
                return
            self._callers = [each for each in self._callers if each.number is not None or not each.is_closed]
            self._callers.append(self._kind(connection, pid))

    def _serve(self, caller: AnyClient) -> None:
        self._flush(caller)
        self._read(caller)

    def _read(self, caller: AnyClient) -> None:
        """Take all that has come from a process."""
        while not caller.is_closed and caller.connection is not None:
            try:
                data = caller.connection.recv(1 << 16)
                lines = caller.cutter.take(data)
                if not data:
                    self._drop(caller)
                for line in lines:
                    self._take_line(caller, line)
            except BlockingIOError:
                return
            except OSError:  # ECONNRESET: it died with lines unread. All that it has sent was read before.
                self._drop(caller)
            except ValueError:
                self._give_up(caller)

    def _note_end(self, caller: AnyClient) -> None:
        self._read(caller)  # a dead process sends nothing more, and this was all
        caller.has_ended = True
        self._drop(caller)
        if caller.process is not None:
            os.close(caller.process)
            caller.process = None
        self._see_end(caller)

    # ---- what goes ----

    def _send(self, caller: AnyClient, line: bytes) -> None:
        if caller.is_closed:
            return
        if caller.relay is not None:
            caller.relay.send(line)
            return
        caller.unsent += line + b"\n"
        self._flush(caller)
        if len(caller.unsent) > MOST_BYTES:  # a stopped process, which finds the channel closed when it goes on
            self._give_up(caller)

    def _flush(self, caller: AnyClient) -> None:
        if not caller.unsent or caller.is_closed or caller.connection is None:
            return
        try:
            caller.unsent = caller.unsent[caller.connection.send(caller.unsent) :]
        except BlockingIOError:
            return
        except OSError:  # its end is seen by `process`; what it has sent is read then
            caller.unsent = b""

    def _give_up(self, caller: AnyClient) -> None:
        caller.is_unsure = True
        self._drop(caller)

    def _drop(self, caller: AnyClient) -> None:
        if not caller.is_closed:
            caller.is_closed = True
            if caller.connection is not None:
                caller.connection.close()
            if caller.relay is not None:
                caller.relay.close()
