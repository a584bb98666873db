"""Slurm's PMI-2, by its text protocol on the socket PMI_FD. No library is needed.

Source: PMI-2 wire protocol of MPICH (src/pmi/doc/wire-protocol.md): after a line in PMI-1's form, each message is its
length in six characters, followed by name=value pairs, each ended by a semicolon.
"""

import base64
import os
import select
import socket
import stat
import struct
import sys
import time
from contextlib import suppress

from multiring._exchanges.background_call import BackgroundCall
from multiring._exchanges.contract import ExchangeError, PlaceExchange

_KEY = "multiring"
_PIECE = 800  # characters of a value; PMI-2 allows 1024
_LENGTH = 6
_MOST_BYTES = 1 << 20
_ANSWER_S = 20.0  # time-out for an answer that needs no other rank
_FENCE_S = 10.0  # how long rank 0 waits for the others before it also uses other ways
_LATE_S = 60.0  # how long `close` lets a thread wait for a fence
_MORE, _LAST = "+", "."
_UCRED = struct.Struct("3i")


class Pmi2Exchange(PlaceExchange):
    """Put the text into the step's key-value space, and fence: a fence ends once all ranks have come to it.

    Args:
        number: the value of PMI_FD; None if it is not set.
        job: the value of PMI_JOBID.
        rank: the value of PMI_RANK.
    """

    name = "PMI-2"

    def __init__(self, number: str | None, job: str = "", rank: str = "") -> None:
        super().__init__()
        self._number, self._job, self._rank = number, job, rank
        self._socket: socket.socket | None = None
        self._read = b""
        self._is_fencing = False
        self._ending: BackgroundCall[None] | None = None

    def publish(self, text: str) -> bool:
        """Put the text; return whether all ranks have come to the fence."""
        self._open()
        encoded = base64.b64encode(text.encode()).decode()  # a value cannot contain every character
        pieces = [encoded[at : at + _PIECE] for at in range(0, len(encoded), _PIECE)]
        for number, piece in enumerate(pieces):
            mark = _LAST if number == len(pieces) - 1 else _MORE
            self._ask("kvs-put", key=f"{_KEY}-{number}", value=f"{mark}{piece}")
        return self._fenced(_FENCE_S)

    def fetch(self, wait_s: float) -> str | None:
        """Return the text once all ranks have come to the fence."""
        self._open()
        if not self._fenced(wait_s):
            self.waits_for = "not all ranks of the step have come to init"
            return None
        encoded = ""
        for number in range(_MOST_BYTES // _PIECE):
            answer = self._ask("kvs-get", jobid=self._job, srcid="-1", key=f"{_KEY}-{number}")
            if answer.get("found") != "TRUE" or not answer.get("value"):
                raise ExchangeError("rank 0 has put nothing before the fence")
            encoded += answer["value"][1:]
            if answer["value"][0] == _LAST:
                return base64.b64decode(encoded).decode()
        raise ExchangeError("the text does not end")

    def close(self) -> None:
        """Tell Slurm that this rank has ended its use of PMI; if a fence waits for other ranks, once it has ended."""
        if self._socket is None or self._ending is not None:
            return
        if self._is_fencing:  # the ranks have met in another way; the last one may just be coming to the fence
            self._ending = BackgroundCall(lambda: self._end(_LATE_S))
        else:
            self._end(0.0)

    def _end(self, wait_s: float) -> None:
        with suppress(ExchangeError):
            if not self._is_fencing or self._fenced(wait_s):
                self._ask("finalize")
        if self._socket is not None:
            # A duplicate of PMI_FD, which stays open, and may be the program's.
            with suppress(OSError):
                self._socket.setblocking(True)
            self._socket.close()
            self._socket = None

    def _open(self) -> None:
        if self._socket is not None:
            return
        if self._number is None:
            raise ExchangeError("srun offers none (PMI_FD is not set; srun --mpi=pmi2 does)")
        _refuse_if_mpi_has_it()
        self._socket = _socket_of(self._number)
        try:
            self._begin()
        except ExchangeError:
            self._socket.close()
            self._socket = None
            raise

    def _begin(self) -> None:
        self._send(b"cmd=init pmi_version=2 pmi_subversion=0\n")
        answer = dict(_pairs(self._line().decode(errors="replace").split()))
        if answer.get("cmd") != "response_to_init" or answer.get("rc") != "0":
            raise ExchangeError(f"slurmstepd refuses version 2: {answer}")
        self._ask("fullinit", pmijobid=self._job, pmirank=self._rank, threaded="FALSE")

    def _fenced(self, wait_s: float) -> bool:
        if not self._is_fencing:
            self._tell("kvs-fence")
            self._is_fencing = True
        if self._answer("kvs-fence", wait_s) is None:
            return False
        self._is_fencing = False
        return True

    def _ask(self, command: str, **values: str) -> dict[str, str]:
        self._tell(command, **values)
        answer = self._answer(command, _ANSWER_S)
        if answer is None:
            raise ExchangeError(f"slurmstepd does not answer {command} for {_ANSWER_S:g} s")
        return answer

    def _tell(self, command: str, **values: str) -> None:
        body = "".join(f"{name}={text.replace(';', ';;')};" for name, text in {"cmd": command, **values}.items())
        self._send(f"{len(body):{_LENGTH}d}{body}".encode())

    def _answer(self, command: str, wait_s: float) -> dict[str, str] | None:
        """Return the next message, or None if it has not come after `wait_s`. A part of it is kept."""
        latest = time.monotonic() + wait_s
        while True:
            if len(self._read) >= _LENGTH:
                length = self._read[:_LENGTH].strip()
                if not length.isdigit():
                    raise ExchangeError(f"slurmstepd answers {self._read[:40]!r}, which is not PMI-2")
                end = _LENGTH + int(length)
                if len(self._read) >= end:
                    body, self._read = self._read[_LENGTH:end].decode(errors="replace"), self._read[end:]
                    break
            if not self._receive(latest - time.monotonic()):
                return None
        answer = dict(_pairs(body.replace(";;", "\0").split(";")))
        answer = {name: text.replace("\0", ";") for name, text in answer.items()}
        if answer.get("cmd") != f"{command}-response" or answer.get("rc", "0") != "0":
            raise ExchangeError(f"slurmstepd answers {command} with {body!r}")
        return answer

    def _line(self) -> bytes:
        latest = time.monotonic() + _ANSWER_S
        while b"\n" not in self._read:
            if not self._receive(latest - time.monotonic()):
                raise ExchangeError(f"slurmstepd does not answer for {_ANSWER_S:g} s")
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _receive(self, wait_s: float) -> bool:
        """Read what has come; return False if nothing came within `wait_s`."""
        assert self._socket is not None  # noqa: S101 -- opened by every caller
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(max(wait_s, 0.0) * 1000):
                return False
            data = self._socket.recv(_MOST_BYTES)
        except OSError as error:
            raise ExchangeError(f"PMI_FD={self._number}: {error}") from None
        if not data:
            raise ExchangeError("slurmstepd has closed it (a program of this step has used it already)")
        self._read += data
        if len(self._read) > _MOST_BYTES:
            raise ExchangeError("slurmstepd's answer is too long")
        return True

    def _send(self, data: bytes) -> None:
        assert self._socket is not None  # noqa: S101 -- opened by every caller
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.sendall(data)
        except OSError as error:
            raise ExchangeError(
                f"PMI_FD={self._number}: {error.strerror or error} (a program of this step may have used it already)"
            ) from None


def _refuse_if_mpi_has_it() -> None:
    """An MPI library that is initialised talks on the same socket."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        raise ExchangeError("this program's MPI uses it")


def _socket_of(number: str) -> socket.socket:
    """Return a duplicate of slurmstepd's socket.

    A wrapper may have closed the descriptor, and another file may have its number now.
    """
    try:
        descriptor = int(number)
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ExchangeError(f"PMI_FD={number} is not a socket any more: a wrapper has closed it")
        found = socket.socket(fileno=os.dup(descriptor))
    except (OSError, ValueError) as error:
        raise ExchangeError(f"PMI_FD={number}: {error}: a wrapper has closed it") from None
    problem = _problem_of(found)
    if problem:
        found.close()
        raise ExchangeError(f"PMI_FD={number} {problem}: a wrapper has closed slurmstepd's socket")
    return found


def _problem_of(found: socket.socket) -> str:
    try:
        if found.family != socket.AF_UNIX or found.getpeername():
            return "is another socket"
        pid, uid, _ = _UCRED.unpack(found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError as error:
        return str(error.strerror)
    return "is this user's own socket" if pid == os.getpid() or (uid == os.getuid() and uid != 0) else ""


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return [(name, text) for name, mark, text in (word.partition("=") for word in words) if mark]
