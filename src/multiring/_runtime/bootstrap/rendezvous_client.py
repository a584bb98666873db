"""The rendezvous on ranks other than 0.

Such a rank finds rank 0, authenticates, then sends one peer info per round.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Callable

from multiring._runtime.bootstrap.addresses import LocalAddress, TcpAddress, peer_credentials
from multiring._runtime.bootstrap.handshake import (
    PROTOCOL,
    UNPROVEN_FRAME_BYTES,
    FrameError,
    FrameReader,
    Message,
    Seal,
    decode,
    encode,
    frame,
    is_nonce,
    is_proof,
    new_nonce,
    proof,
    shown,
)
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous_link import LONGEST_WAIT_S, TimeLimit
from multiring._runtime.bootstrap.sealing import KeyOffer, SecretSeal
from multiring._runtime.bootstrap.waiting_lines import FIREWALL, WaitingLines, led_to, who_says_so
from multiring.errors import RendezvousError, StateError

# The errors of a connection attempt that was not even refused.
_UNANSWERED = {"timed out", os.strerror(errno.ETIMEDOUT), os.strerror(errno.EHOSTUNREACH)}
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_QUIET_S = 1.0
_DIAL_S = 5.0  # the time-out of one connect; a host that drops packets must not use up the whole time
_PROBE_S = 1  # after this many seconds without traffic, the kernel probes a TCP connection
_PROBES = 127  # the most probes that Linux allows, because an unreachable peer may come back
_GRACE_S = 3.0  # rank 0 may need this long after its own time-out to report the missing ranks
_TABLE_FRAME_BYTES = 1 << 30
_RECEIVE_BYTES = 1 << 18


class _AttemptError(Exception):
    """The attempt to connect ended before rank 0 accepted or refused this rank."""


class _WithItselfError(_AttemptError):
    """The kernel has connected the socket to itself."""


class _Connection:
    """A connected socket for frames.

    Each read and write must end before the deadline (by time.monotonic()).
    """

    def __init__(self, sock: socket.socket, deadline: float, while_quiet: Callable[[], object]) -> None:
        self.sock = sock
        self.deadline = deadline
        self.reader = FrameReader(UNPROVEN_FRAME_BYTES)
        self._while_quiet = while_quiet  # called about once a second while no data arrives

    def write(self, data: bytes) -> None:
        self.sock.settimeout(self._remaining_s())
        self.sock.sendall(data)

    def read_frame(self) -> bytes:
        while (payload := self.reader.next_frame()) is None:
            left_s = self._remaining_s()
            self.sock.settimeout(min(left_s, _QUIET_S))
            try:
                data = self.sock.recv(_RECEIVE_BYTES)
            except TimeoutError:
                if left_s <= _QUIET_S:
                    raise
                self._while_quiet()
                continue
            if not data:
                raise _AttemptError("it closed the connection")
            self.reader.feed(data)
        return payload

    def _remaining_s(self) -> float:
        return min(max(self.deadline - time.monotonic(), _FIRST_PAUSE_S), LONGEST_WAIT_S)


class _Talk:
    """A connection whose two ends have authenticated each other."""

    def __init__(self, line: _Connection, seal: Seal | SecretSeal, peer: str) -> None:
        self.line = line
        self._seal = seal
        self._peer = peer

    def say(self, message: Message) -> None:
        try:
            self.line.write(self._seal.close(encode(message)))
        except OSError:
            return  # rank 0 may have sent a reason before it closed the connection; the next `hear` returns it

    def hear(self) -> Message:
        try:
            message = self._seal.open(self.line.read_frame())
        except TimeoutError:
            raise RendezvousError(f"rank 0 at {self._peer} stopped answering during init") from None
        except (OSError, _AttemptError):
            raise RendezvousError("rank 0 was lost during init: its connection closed") from None
        except FrameError as error:
            raise RendezvousError(f"rank 0 broke the protocol during init: {error}") from None
        for kind in ("refused", "error"):
            if kind in message:
                raise RendezvousError(str(message[kind]))
        return message


class Client:
    """A rank's connection to rank 0, made in the first round and kept until the last."""

    def __init__(self, identity: Identity, address: LocalAddress | TcpAddress, version: str, limit: TimeLimit) -> None:
        self._identity = identity
        self._address = address
        self._version = version
        self.limit = limit  # this rank's until it has joined, then rank 0's
        self._talk: _Talk | None = None
        self._secret = identity.secret
        self._is_first = True  # whether the first round has not ended yet
        self._waiting = WaitingLines()

    def exchange(self, peer_info: Message) -> list[Message]:
        """Send this rank's peer info and return those of all ranks.

        See `Rendezvous.exchange`.
        """
        talk = self._meet()
        # rank 0 decides by its own clock which ranks are late: wait for its decision
        until = self.limit.until if self._is_first else max(time.monotonic(), self.limit.until)
        talk.line.deadline = until + _GRACE_S
        talk.say({"peer_info": peer_info})
        peer_infos: list[Message] = talk.hear()["peer_infos"]
        self._is_first = False
        self.limit.extend_once()
        return peer_infos

    def secret(self) -> bytes:
        """Return the job's secret; see `Rendezvous`.

        If the launcher gave none, connect to rank 0 and return its secret.
        """
        self._meet()
        return self._secret

    def _meet(self) -> _Talk:
        if self._talk is None:
            self._talk = self._find()
            self.limit = self._join(self._talk)
        return self._talk

    def fault_of_place(self, *, knows_secret: bool = True) -> str:
        """Connect once, and return why it is sure that rank 0 of this job does not listen at the address, or "".

        The connection is closed again. A slow or unreachable rank 0 is no proof: the rendezvous itself goes on trying.
        If this rank does not know the secret, only the greeting is heard.
        """
        try:
            self._introduce(self._dial(), self._prove if knows_secret else _greeted).line.sock.close()
        except (ConnectionRefusedError, RendezvousError) as error:
            return f"{self._address}: {getattr(error, 'strerror', None) or error}"
        except _WithItselfError as error:
            return f"{self._address}: {error}"
        except (OSError, _AttemptError):
            return ""
        return ""

    def disturbed(self) -> bool:
        """Return whether rank 0 sent a message or disconnected between rounds.

        Either means an error.
        """
        self._identity.refuse_withdrawn()
        if self._talk is None:
            return False
        spoken = select.poll()  # poll() accepts descriptors of any number, unlike select()
        spoken.register(self._talk.line.sock, select.POLLIN)
        return bool(spoken.poll(0))

    def fail(self, text: str) -> None:
        """Report to rank 0, if this rank is connected to it, that this rank gives up."""
        if self._talk is not None:
            self._talk.say({"failed": text})

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._talk is not None:
            self._talk.line.sock.close()

    def _find(self) -> _Talk:
        pause_s = _FIRST_PAUSE_S
        self._waiting = WaitingLines()
        while True:
            self._identity.refuse_withdrawn()
            try:
                return self._introduce(self._dial())
            except (OSError, _AttemptError) as error:
                reason = getattr(error, "strerror", None) or str(error)
            if time.monotonic() + pause_s >= self.limit.until:
                raise RendezvousError(self._not_found_text(f"within {self.limit.timeout_s:g} s", reason))
            self._waiting.say(lambda: self._not_found_text("yet", reason))  # noqa: B023 -- called now
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _say_quiet(self) -> None:
        """Log from time to time that rank 0's address accepts, but does not answer.

        Once this rank has joined, rank 0 logs the missing ranks instead.
        """
        self._identity.refuse_withdrawn()
        if self._talk is None:
            self._waiting.say(lambda: self._not_found_text("yet", "connected, but no answer came"))

    def _not_found_text(self, when: str, reason: str) -> str:
        where = f"rank {self._identity.rank} found no rank 0 at {self._address} {when}"
        hint = (
            "; an address that begins with @ is visible on one host only"
            if isinstance(self._address, LocalAddress)
            else led_to(self._address) + (f"; nothing answers: {FIREWALL}" if reason in _UNANSWERED else "")
        )
        return f"{where} (last attempt: {reason}){hint}{who_says_so(self._identity)}"

    def _dial(self) -> socket.socket:
        remaining_s = min(max(self.limit.until - time.monotonic(), _FIRST_PAUSE_S), LONGEST_WAIT_S)
        if isinstance(self._address, TcpAddress):
            sock = socket.create_connection((self._address.host, self._address.port), min(remaining_s, _DIAL_S))
            try:
                with_itself = sock.getsockname() == sock.getpeername()
            except OSError:  # the connection was reset
                sock.close()
                raise
            if with_itself:
                # If no process listens at the port yet, and the port is in this host's ephemeral range, the kernel may
                # choose it as the local port and connect the socket to itself. An open socket would then keep rank 0
                # from listening at the port.
                sock.close()
                raise _WithItselfError("nobody listens there yet")
            _probe_when_silent(sock)
            return sock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(remaining_s)
            sock.connect(b"\0" + os.fsencode(self._address.name))
            self._check_user(peer_credentials(sock).uid)
        except BaseException:
            sock.close()
            raise
        return sock

    def _check_user(self, uid: int) -> None:
        if uid != os.getuid():
            raise RendezvousError(f"{self._address} is held by uid {uid}, this rank runs as uid {os.getuid()}")

    def _introduce(self, sock: socket.socket, prove: Callable[[_Connection], Seal | SecretSeal] | None = None) -> _Talk:
        """Authenticate this rank and rank 0 to each other on `sock`.

        The socket is closed on failure. `prove` replaces `_prove`.

        Raises:
            _AttemptError, OSError: the connection ended before that.
            RendezvousError: rank 0 refuses this rank, or the listener is not rank 0 of this job.
        """
        line = _Connection(sock, self.limit.until, self._say_quiet)
        try:
            seal = (prove or self._prove)(line)
        except FrameError as error:
            sock.close()
            raise RendezvousError(f"{self._address} does not speak {PROTOCOL!r}: {error}") from None
        except TimeoutError:
            sock.close()
            raise _AttemptError("connected, but no answer came") from None
        except BaseException:
            sock.close()
            raise
        line.reader.limit_bytes = _TABLE_FRAME_BYTES
        return _Talk(line, seal, str(self._address))

    def _prove(self, line: _Connection) -> Seal | SecretSeal:
        server_nonce = _nonce_of_greeting(line)
        nonce, rank, secret = new_nonce(), self._identity.rank, self._identity.secret
        offer = self._offer(line, server_nonce, nonce) if self._identity.seals else None
        words = "client" if offer is None else f"client {offer.text}"
        told: Message = {"nonce": nonce, "rank": rank, "proof": proof(secret, words, server_nonce, nonce, rank)}
        line.write(frame(encode(told if offer is None else {**told, "offer": offer.text})))
        answer = decode(line.read_frame())
        if "refused" in answer:
            raise RendezvousError(f"{self._address} refused rank {rank}: {shown(answer['refused'])}")
        words = "server" if offer is None else f"server {offer.text} {answer.get('offer')}"
        if not is_proof(answer.get("proof"), proof(secret, words, server_nonce, nonce, rank)):
            raise RendezvousError(f"{self._address} does not know the job's secret; it is not this job's rank 0")
        if offer is not None:
            return offer.seal(str(answer.get("offer")), secret, server_nonce, nonce, "client")
        return Seal(proof(secret, "session", server_nonce, nonce, rank), "client")

    def _offer(self, line: _Connection, server_nonce: str, nonce: str) -> KeyOffer:
        """Return this rank's key offer; if it has no libcrypto, tell rank 0, which ends the job."""
        try:
            return KeyOffer(self._identity.seal_library)
        except StateError as error:
            rank, secret = self._identity.rank, self._identity.secret
            mine = proof(secret, f"client fault {error}", server_nonce, nonce, rank)
            line.write(frame(encode({"nonce": nonce, "rank": rank, "proof": mine, "fault": str(error)})))
            raise

    def _join(self, talk: _Talk) -> TimeLimit:
        """Join the job at rank 0; return the time for which rank 0 will still wait for ranks."""
        talk.say(
            {
                "rank": self._identity.rank,
                "size": self._identity.size,
                "version": self._version,
                "job": self._identity.job,
                "pid": os.getpid(),
                "host": socket.gethostname(),
            }
        )
        welcome = talk.hear()["welcome"]
        self._secret = self._secret or bytes.fromhex(welcome.get("secret", ""))
        limit = TimeLimit(float(welcome["timeout_s"]))
        limit.until = time.monotonic() + float(welcome["remaining_s"])
        return limit


def _nonce_of_greeting(line: _Connection) -> str:
    hello = decode(line.read_frame())
    nonce = hello.get("nonce")
    if hello.get("hello") != PROTOCOL or not isinstance(nonce, str) or not is_nonce(nonce):
        raise FrameError(shown(hello.get("refused", "an unknown greeting")))
    return nonce


def _greeted(line: _Connection) -> Seal | SecretSeal:
    """Hear rank 0's greeting, and return a seal that opens nothing: this rank has no secret to prove."""
    return Seal(proof(b"", "session", _nonce_of_greeting(line), new_nonce(), 0), "client")


def _probe_when_silent(sock: socket.socket) -> None:
    """Enable TCP keepalive on a connection on which rank 0 sends first.

    If a listener is closed at the moment of a connect, the connection may have no other end (a few in 100,000 on Linux
    6.18). This rank sends nothing until rank 0 has sent something. Without keepalive it would wait on the dead
    connection while the next rank 0 already listens.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
