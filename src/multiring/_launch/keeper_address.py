"""Where a launcher and the keeper of a job meet, and what they tell each other.

`multiring run --survive-launcher S` starts a keeper: a process that runs the job and outlives the process that the user
has started, the launcher. The same command in the same folder finds the keeper at an abstract Unix socket whose name
follows from user, folder and command. The kernel takes the name away with the keeper, so nothing is left behind.

Each message is one packet: a JSON object. A launcher that adopts a job sends its standard output and error along.
"""

import contextlib
import hashlib
import json
import os
import shlex
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring._runtime.bootstrap.handshake import shown
from multiring._version import VERSION
from multiring.errors import LaunchError

_PACKET_BYTES = 1 << 14
_SHOWN_COMMAND = 1000  # characters, of which each may take 12 bytes
_ANSWER_S = 20.0  # how long a keeper may take to answer
_AGAIN_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def send(link: socket.socket, descriptors: Sequence[int] = (), **message: object) -> None:
    """Send one message, with open files; nothing if the other end has gone."""
    with contextlib.suppress(OSError):  # reading tells the end of the connection
        socket.send_fds(link, [json.dumps(message).encode()], list(descriptors), socket.MSG_NOSIGNAL)


def receive(link: socket.socket, most_descriptors: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message with its open files; None if the other end has gone, or sends what is no message.

    Raises:
        BlockingIOError: there is none yet.
        TimeoutError: none has come within the time of the socket.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(link, _PACKET_BYTES, most_descriptors)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError:
        return None, []
    try:
        message = json.loads(data) if data else None
    except (ValueError, RecursionError):  # of a program that is neither launcher nor keeper
        message = None
    return message if isinstance(message, dict) else None, list(descriptors)


def owner_of(link: socket.socket) -> tuple[int, int]:
    """Return the process ID and the user of the other end, as the kernel knows them."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


@dataclass(frozen=True, slots=True)
class KeptJob:
    """What a keeper tells of its job.

    - keeper: the keeper's process ID.
    - launcher: the process ID of the job's launcher, or None if it was lost.
    - command: the command that started the job.
    - ends: why the job takes no launcher any more, or nothing.
    - is_over: the job has ended, and its exit code waits for a launcher.
    """

    keeper: int
    launcher: int | None
    command: str
    ends: str
    is_over: bool

    def told(self) -> dict[str, Any]:
        """Return the message that says this."""
        return {
            "version": VERSION,
            "keeper": self.keeper,
            "launcher": self.launcher,
            "command": self.command[:_SHOWN_COMMAND],
            "ends": self.ends,
            "is_over": self.is_over,
        }


@dataclass(frozen=True, slots=True)
class KeeperPlace:
    """The place of one command in one folder: words are those behind `multiring`."""

    folder: str  # a digest
    command: str  # a digest

    @classmethod
    def of(cls, words: Sequence[str]) -> "KeeperPlace":
        """Return the place of a command in this process's folder.

        Raises:
            LaunchError: the folder was removed.
        """
        try:
            here, name = Path().stat(), str(Path.cwd())
        except OSError as error:
            raise LaunchError(f"this command's folder was removed ({error.strerror}): change to another one") from None
        folder = [str(os.getuid()), str(here.st_dev), str(here.st_ino), name]
        return cls(_digest(folder), _digest(words))

    @property
    def address(self) -> str:
        """The address of the keeper."""
        return f"\0{self._of_folder}{self.command}"

    @property
    def _of_folder(self) -> str:
        return f"multiring-keeper-{self.folder}-"

    def others(self) -> list[str]:
        """Return the addresses of keepers of other commands in this folder."""
        found = sorted(each for each in _addresses() if each.startswith(f"\0{self._of_folder}"))
        return [each for each in found if each != self.address]


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:20]


def bound(place: KeeperPlace) -> socket.socket | None:
    """Return a socket at the address of `place`, which does not listen yet; None if a keeper has the address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(place.address)
    except OSError:
        sock.close()
        return None
    return sock


def meet(address: str) -> tuple[socket.socket, KeptJob] | None:
    """Connect to the keeper at `address`; return the connection and what it tells, or None if it has gone.

    Raises:
        LaunchError: the keeper does not answer, belongs to another user, or has another version.
    """
    until = time.monotonic() + _ANSWER_S
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(max(_AGAIN_S, until - time.monotonic()))
        try:
            link.connect(address)
            break
        except ConnectionRefusedError:  # nobody is there, or a keeper that starts
            link.close()
            if address not in _addresses() or time.monotonic() >= until:
                return None
            time.sleep(_AGAIN_S)
        except OSError as error:
            link.close()
            raise LaunchError(f"the keeper of a job in this folder does not answer: {error}") from None
    pid, user = owner_of(link)
    if user != os.getuid():
        link.close()
        raise LaunchError(
            f"user {user} (process {pid}) holds the address at which this job's keeper would be met; use another folder"
        )
    try:
        message, _ = receive(link)
    except TimeoutError:
        message = {}
    if message is None:
        link.close()
        return None
    job = _job_in(message)
    if job is None:
        link.close()
        was_silent = not message
        told = f"has not answered for {_ANSWER_S:g} s" if was_silent else f"says {shown(message)}"
        raise LaunchError(
            f"process {pid} keeps a job of this folder and {told}: it is stopped (`kill -CONT {pid}`), or of another "
            f"version; `kill -9 {pid}` ends its job"
        )
    return link, job


def _addresses() -> set[str]:
    """Return the abstract addresses that are in use; none if the kernel does not list them."""
    try:
        listed = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return set()
    return {f"\0{word[1:]}" for word in listed if word.startswith("@")}


def _job_in(message: dict[str, Any]) -> KeptJob | None:
    keeper, launcher = message.get("keeper"), message.get("launcher")
    command, ends = message.get("command"), message.get("ends")
    is_right = isinstance(keeper, int) and isinstance(command, str) and isinstance(ends, str)
    if message.get("version") != VERSION or not is_right or not isinstance(launcher, int | None):
        return None
    return KeptJob(int(keeper or 0), launcher, str(command), str(ends), message.get("is_over") is True)


def command_told(words: Sequence[str]) -> str:
    """Return a command as a user would type it."""
    return shlex.join(["multiring", *words])
