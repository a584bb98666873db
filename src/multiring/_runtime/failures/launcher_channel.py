"""The channel between a rank and the launcher of its host, for the vote on the next generation.

The launcher keeps the rank's vote. What the rank has sent is in the kernel's memory, where it outlives the process. The
launcher tells which ranks ended, and with which vote, and it is the vote's referee. Each line of text is one message:

    rank to launcher    H RANK PROOF    the first line: this process is the rank
                        A               the answer to W
                        K VOTE          keep this vote
                        V MESSAGE       a message to the referee
                        G REASON        this rank cannot go on, so the job should end
                        B               this rank has left, and sends nothing more
                        F               this rank ends by an error or leaves early, and sends nothing more
                        Q               SIGTERM has come: does the job end?
    launcher to rank    W               the launcher watches this process now; "W far": it does so through the agent of
                                        this host
                        K               a launcher that is far has kept one more vote
                        E RANK VOTE     the rank's process ended; the vote is the last one that it kept
                        L RANK VOTE     the rank has left
                        R MESSAGE       a message of the referee
                        T               the job ends
                        U REASON        the ranks that are left cannot go on, so they should save their state now

A vote that a far launcher has not kept would be lost with this host: nobody may hear of it before.
An empty vote was kept by a rank that has not voted. "?" stands for a vote that nobody has.
"""

import contextlib
import hashlib
import hmac
import select
import socket
from typing import NamedTuple

HELLO, WATCHED, ALIVE, KEEP, VOTE, GIVE_UP, BYE, FAILED, ENDED, LEFT, REFEREE_SAYS = "HWAKVGBFELR"
ASKS_FOR_END, JOB_ENDS, CANNOT_GO_ON = "QTU"
_NO_RANK = frozenset("WAKVGBFRQTUCYJNPDSXO")  # kinds without a rank, with those of intake_channel
FAR = "far"
UNKNOWN = b"?"  # in place of a vote that nobody has
MOST_BYTES = 1 << 20  # of a line
_PATIENCE_S = 10.0  # for the launcher, which reads at once


class LauncherMessage(NamedTuple):
    """One message."""

    kind: str
    rank: int  # -1 in messages without a rank
    rest: bytes


def proof_of(secret: bytes, job: str, rank: int) -> str:
    """Return the proof that a process belongs to the job."""
    return hmac.new(secret, f"vote|{job}|{rank}".encode(), hashlib.sha256).hexdigest()


def message_in(text: bytes) -> LauncherMessage:
    """Return the message in a line, without its end.

    Raises:
        ValueError: the line is no message.
    """
    kind, _, rest = text.partition(b" ")
    word = kind.decode("ascii", "replace")
    if word in {HELLO, ENDED, LEFT}:
        number, _, rest = rest.partition(b" ")
        return LauncherMessage(word, int(number), rest)
    if len(word) == 1 and word in _NO_RANK:
        return LauncherMessage(word, -1, rest)
    raise ValueError(f"{text[:100]!r} is no message between a rank and its launcher")


class MessageCutter:
    """Cuts received bytes into lines."""

    def __init__(self) -> None:
        self._begun = b""

    def take(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` ends.

        Raises:
            ValueError: a line has no end.
        """
        *whole, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MOST_BYTES:
            raise ValueError(f"a line of more than {MOST_BYTES} bytes")
        return whole


class LauncherChannel:
    """A rank's end of the channel.

    Args:
        address: the address of the launcher's socket.
        rank: this process's number.
        proof: see `proof_of`.

    Raises:
        OSError: the launcher does not answer.
    """

    def __init__(self, address: str, rank: int, proof: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._cutter = MessageCutter()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self.is_far = False  # what is sent is not with the launcher at once
        self.first_messages: list[LauncherMessage] = []  # came before the constructor had ended
        try:
            self._socket.settimeout(_PATIENCE_S)
            self._socket.connect(address)
            self.send(f"{HELLO} {rank} {proof}".encode())
            self._await_watch()
            self.send(ALIVE.encode())
        except BaseException:
            self.close()
            raise

    def _await_watch(self) -> None:
        is_watched = False
        while not is_watched:
            messages = self.receive(_PATIENCE_S)
            if messages is None:
                raise ConnectionError("it has refused this process")
            if not messages:
                raise TimeoutError(f"it has not answered for {_PATIENCE_S:g} s")
            is_watched = any(each.kind == WATCHED for each in messages)
            self.is_far |= any(each.kind == WATCHED and each.rest == FAR.encode() for each in messages)
            self.first_messages += [each for each in messages if each.kind != WATCHED]

    def send(self, line: bytes) -> None:
        """Send a line. When the call returns, the launcher has it, whatever becomes of this process.

        A launcher that is far has it later, if this host is not lost before.

        Raises:
            OSError: the launcher does not read, or has ended. The line counts as not sent, and so do later ones.
        """
        self._socket.sendall(line + b"\n")

    def wake(self) -> None:
        """Have `receive` return at once, on another thread. A handler of signals may call it."""
        with contextlib.suppress(OSError):
            self._waker.send(b"1")

    def receive(self, seconds: float) -> list[LauncherMessage] | None:
        """Return the messages that have come; [] after `seconds` or `wake`, and None when the channel is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000.0 * seconds)}
        if self._woken.fileno() in ready:
            self._woken.recv(1 << 10)
        if ready <= {self._woken.fileno()}:
            return []
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        return [message_in(each) for each in self._cutter.take(data)] if data else None

    def close(self) -> None:
        """Close the channel."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for each in (self._socket, self._waker, self._woken):
            each.close()
