"""Send requests to a running lab over abstract Unix sockets.

A request is a line of JSON with file descriptors, and the answer is a line of JSON. A socket named after the lab takes
faults. A socket in every host takes commands to run on another host (see `rsh_agent.py`). The kernel's list of sockets
is the list of running labs, so a name is free again after its lab has ended in any way.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from multiring._runtime.bootstrap.addresses import peer_credentials
from multiring.errors import ArgumentError, LaunchError, MultiringError, StateError

_PREFIX = "multiring-lab-"
_HOST_SOCKET = "\0multiring-lab"  # the same in rsh_agent.py
_NAME_BYTES = 64
_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 3
_AGAIN_S = 0.05  # pause before the next attempt to accept a caller
_BACKLOG = 1024
_ANSWER_S = 30.0

Message = dict[str, Any]


class Caller:
    """A connection to a control socket.

    `descriptors` came with its message. `hang_up` is called when the other end closes the connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._heard = b""
        self.descriptors: list[int] = []
        self.hang_up: Callable[[], None] | None = None
        connection.setblocking(False)

    @property
    def descriptor(self) -> int:
        """The file descriptor to poll, or -1 after `close`."""
        return self._connection.fileno()

    def listen(self) -> Message | None:
        """Read once, and return the message if it is complete, else None.

        At the end of the stream, the connection is closed.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _READ_BYTES, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return None
        except ConnectionError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        if not data:
            self.close()
            if self.hang_up is not None:
                self.hang_up()
            return None
        self._heard += data
        line, end, _ = self._heard.partition(b"\n")
        if not end:
            return None
        message: Message = json.loads(line)
        return message

    def answer(self, **words: object) -> None:
        """Send the answer and close the connection.

        A caller that has closed its end gets no answer.
        """
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps(words).encode() + b"\n")
        self.close()

    def close(self) -> None:
        """Close the connection and the descriptors that came over it.

        A second call has no effect.
        """
        self.release()
        self._connection.close()

    def release(self) -> None:
        """Close the descriptors that came over the connection."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class ControlSocket:
    """Listens at an abstract address in the current network namespace.

    Args:
        name: the abstract address, with its leading zero byte.
        answer: handles a message. It may keep the caller and answer later.
    """

    def __init__(self, name: str, answer: Callable[[Caller, Message], None]) -> None:
        self._answer = answer
        self._callers: list[Caller] = []
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(name)
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register the descriptors with `poll`, each with a callable as its data."""
        self._callers = [caller for caller in self._callers if caller.descriptor >= 0]
        poll.register(self._listener, selectors.EVENT_READ, self._accept)
        for caller in self._callers:
            poll.register(caller.descriptor, selectors.EVENT_READ, _Hearing(caller, self._answer))

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._listener.close()
        for caller in self._callers:
            caller.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # the table of descriptors is full; the caller waits, and the lab continues
            time.sleep(_AGAIN_S)
            return
        if peer_credentials(connection).uid == os.geteuid():
            self._callers.append(Caller(connection))
        else:
            connection.close()


class _Hearing:
    """Reads from a caller, and handles its message when it is complete."""

    def __init__(self, caller: Caller, answer: Callable[[Caller, Message], None]) -> None:
        self._caller = caller
        self._answer = answer

    def __call__(self) -> None:
        try:
            message = self._caller.listen()
            if message is not None:
                self._answer(self._caller, message)
        except (MultiringError, OSError, SubprocessError) as error:
            self._caller.answer(error=str(error))
        except (ValueError, LookupError, TypeError) as error:
            self._caller.answer(error=f"not understood: {error!r}")


def check_lab_name(name: str) -> None:
    """Raise ArgumentError if `name` is not a valid name of a lab."""
    if not 1 <= len(os.fsencode(name)) <= _NAME_BYTES or not name.isprintable() or " " in name:
        raise ArgumentError(f"a lab cannot be called {name!r}, want 1 to {_NAME_BYTES} bytes without spaces")


def open_lab_socket(name: str, answer: Callable[[Caller, Message], None]) -> ControlSocket:
    """Open the control socket of the lab `name` and return it.

    Raises:
        ArgumentError: another running lab has this name.
    """
    try:
        return ControlSocket(f"\0{_PREFIX}{name}", answer)
    except OSError as error:
        raise ArgumentError(
            f"a lab cannot be called {name!r}: {error.strerror}; running: {_text(running_labs())}"
        ) from None


def open_host_socket(answer: Callable[[Caller, Message], None]) -> ControlSocket:
    """Open and return the control socket of a host.

    The host is the owner of the calling thread's network namespace.
    """
    return ControlSocket(_HOST_SOCKET, answer)


def running_labs() -> list[str]:
    """Return the names of the running labs of this machine, in this network namespace."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    places = [line.split(" ", 7)[-1].split()[-1] for line in lines if f"@{_PREFIX}" in line]
    return sorted({place.removeprefix(f"@{_PREFIX}") for place in places})


def ask_lab(name: str | None, **words: object) -> None:
    """Send a request to the lab `name` and wait for its answer.

    The default is the only running lab.

    Raises:
        ArgumentError: there is no such lab, or no name is given and several labs run. The text lists the running labs.
        StateError: the lab refuses the request.
        LaunchError: the lab has ended, hangs, or belongs to another user.
    """
    running = running_labs()
    if name is None and len(running) != 1:
        raise ArgumentError(
            f"several labs are running: name one of {_text(running)}" if running else "no lab is running"
        )
    name = running[0] if name is None else name
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(f"\0{_PREFIX}{name}")
            connection.sendall(json.dumps(words).encode() + b"\n")
            answer = connection.makefile("rb").readline()
        except ConnectionRefusedError:
            raise ArgumentError(f"no lab {name!r}; running: {_text(running)}") from None
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        except OSError as error:
            raise LaunchError(f"lab {name!r} does not answer: {error}") from None
    if not answer:
        raise LaunchError(f"lab {name!r} did not answer: it ended, or belongs to another user")
    refusal = json.loads(answer)["error"]
    if refusal is not None:
        raise StateError(refusal)


def _text(names: list[str]) -> str:
    return ", ".join(names) or "none"
