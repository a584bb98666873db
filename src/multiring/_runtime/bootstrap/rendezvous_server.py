"""Rank 0's end of the rendezvous.

The server runs on the caller's thread, only while rank 0 itself waits in a call. Pending handshakes use a bounded
number of connections, bytes and seconds, and never stop the loop. If there are too many, further connections wait in
the kernel's queue. A rank whose connection was dropped before its handshake was complete connects again. If a rank of
the job fails, all ranks that have come get the same error text.
"""

import errno
import os
import secrets
import selectors
import socket
import time
from typing import Any

from multiring._runtime.bootstrap.addresses import LocalAddress, TcpAddress, listen, peer_credentials
from multiring._runtime.bootstrap.handshake import (
    MOST_RANKS,
    PEER_INFO_FRAME_BYTES,
    PROTOCOL,
    SECRET_BYTES,
    FrameError,
    Message,
    decode,
    encode,
    frame,
    is_nonce,
    is_proof,
    proof,
    shown,
)
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.open_files import make_room_for_files
from multiring._runtime.bootstrap.rendezvous_link import LONGEST_WAIT_S, RendezvousLink, TimeLimit, tell
from multiring._runtime.bootstrap.sealing import client_words, offer_for, server_answer
from multiring._runtime.bootstrap.waiting_lines import WaitingLines, closed_port, led_to, who_says_so
from multiring.errors import ArgumentError, RendezvousError

_MAX_PENDING_HANDSHAKES = 256  # one more connection waits, or replaces the oldest pending handshake
_HANDSHAKE_S = 10.0  # the time limit for a connection's proof, and then for its join
_YOUNG_S = 0.5  # a pending handshake is not replaced before this age
_FULL_PAUSE_S = 0.005
_LINGER_S = 1.0  # after a failure, rank 0 waits this long for further ranks, so that they get the error too
_LATE_S = 1.0  # ranks whose time-outs have passed arrive at about the same time
_LOOK_S = 0.5  # the longest time between two looks whether the ranks still meet
_FLUSH_S = 1.0  # the time limit for sending the last messages
_ADDRESS_TAKEN_S = 2.0  # the previous rank 0 may hold the address for a moment after its end
_RECEIVE_BYTES = 16384
_ACCEPTS_A_TURN = 32
_NAMED_RANKS = 16  # error messages list this many ranks and count the others


class Server:
    """Gathers the ranks' peer infos in each round, and sends all of them to each rank."""

    def __init__(self, identity: Identity, address: LocalAddress | TcpAddress, version: str, limit: TimeLimit) -> None:
        self._identity = identity
        self.limit = limit
        self._deadline = limit.until  # of the round
        self._round = 0
        self._peer_infos: dict[int, bytes] = {}  # JSON text, which rank 0 passes on without parsing it
        self._pending_handshakes: dict[RendezvousLink, None] = {}  # links that are not authenticated yet; oldest first
        self._guests: dict[RendezvousLink, None] = {}  # authenticated links that have not joined yet; oldest first
        self._members: dict[int, RendezvousLink] = {}
        self._extras: list[RendezvousLink] = []  # authenticated links that cannot be ranks; they get the job's error
        self._lost: set[int] = set()
        self._versions = {0: version}
        self._origins = {0: f"pid {os.getpid()}"}
        self._refusals: list[str] = []
        self._trouble: str | None = None
        self._secret = identity.secret
        if not self._secret:
            if not isinstance(address, LocalAddress):
                raise ArgumentError(f"rank 0 cannot listen at {address} without a secret: anybody could join")
            self._secret = secrets.token_bytes(SECRET_BYTES)
        make_room_for_files(identity.size + _MAX_PENDING_HANDSHAKES)
        self._listener = identity.listener or _listen_soon(address)
        self._place = address
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._rests_until: float | None = None  # if set, no connections are accepted: there are too many handshakes

    def exchange(self, peer_info: Message) -> list[Message]:
        """Wait for the peer infos of all ranks, then send them to every rank.

        See `Rendezvous.exchange`.
        """
        self._round += 1
        self._take_peer_info(0, peer_info)
        self._deadline = self.limit.until if self._round == 1 else max(time.monotonic(), self.limit.until) + _LATE_S
        waiting = WaitingLines()
        while self._trouble is None and len(self._peer_infos) < self._identity.size:
            waiting.say(self._waited_for_text)
            if time.monotonic() >= self._deadline:
                self._trouble = self._missing_text()
                self._end_in_trouble(linger_s=0.0)
            self._identity.refuse_withdrawn()
            self._serve(min(self._deadline, waiting.next_at, time.monotonic() + _LOOK_S))
        if self._trouble is not None:
            self._end_in_trouble(linger_s=_LINGER_S)
        payload = b'{"peer_infos":[' + b",".join(self._peer_infos[rank] for rank in range(self._identity.size)) + b"]}"
        self._peer_infos = {}
        # From here on, rank 0 only writes: a rank with all peer infos may already connect for the next `init`.
        if slow := tell(self._members.values(), payload, max(self._deadline - time.monotonic(), _FLUSH_S)):
            self._trouble = f"{_ranks_text(slow)} did not take the answer within {self.limit.timeout_s:g} s"
            self._end_in_trouble(linger_s=0.0)
        peer_infos: list[Message] = decode(payload)["peer_infos"]
        self.limit.extend_once()
        return peer_infos

    def secret(self) -> bytes:
        """Return the job's secret, which rank 0 has drawn if the launcher gave none."""
        return self._secret

    def disturbed(self) -> bool:
        """Handle the messages that came since the last round; return whether the job has failed."""
        self._identity.refuse_withdrawn()
        self._serve(time.monotonic())
        return self._trouble is not None

    def fail(self, text: str) -> None:
        """Report to all ranks that rank 0 gives up.

        Ranks that have not connected yet get a moment to do so.
        """
        self._blame(f"rank 0 failed during init: {text}")
        self._spread_trouble(_LINGER_S)

    def close(self) -> None:
        """Close the connections and release the address."""
        for link in [*self._pending_handshakes, *self._guests, *self._members.values(), *self._extras]:
            link.sock.close()
        self._selector.close()
        self._listener.close()

    # -- failures, and their report to the ranks

    def _blame(self, text: str) -> None:
        self._trouble = self._trouble or text

    def _end_in_trouble(self, linger_s: float) -> None:
        raise RendezvousError(self._spread_trouble(linger_s))

    def _spread_trouble(self, linger_s: float) -> str:
        """Send the failure to all connected ranks; return its text."""
        until = min(time.monotonic() + linger_s, self._deadline)
        everyone = set(range(self._identity.size))
        while time.monotonic() < until and not everyone <= {0, *self._members, *self._lost}:
            self._serve(until)
        text = self._trouble or ""
        if len(set(self._versions.values())) > 1:
            text = _versions_text(self._versions)
        tell([*self._members.values(), *self._extras], encode({"error": text}), _FLUSH_S)
        return text

    def _missing_text(self) -> str:
        did_not = "arrive at" if self._round == 1 else "answer at"
        within = f"within {self.limit.timeout_s:g} s ({len(self._peer_infos)} of {self._identity.size} did)"
        return f"{self._absent()} did not {did_not} {self._place} {within}{self._tried()}"

    def _waited_for_text(self) -> str:
        until = f"for at most {self.limit.timeout_s:g} s (MULTIRING_INIT_TIMEOUT_S)"
        return f"{self._absent()} did not come yet to {self._place}, where rank 0 listens {until}{self._tried()}"

    def _absent(self) -> str:
        return _ranks_text([rank for rank in range(self._identity.size) if rank not in self._peer_infos])

    def _tried(self) -> str:
        refused = f"; refused meanwhile: {'; '.join(self._refusals)}" if self._refusals else closed_port(self._place)
        return f"{refused}{led_to(self._place)}{who_says_so(self._identity)}"

    # -- the loop

    def _serve(self, until: float) -> None:
        """Wait for events, at most until the time `until`, and handle them."""
        ends = [next(iter(each)).until for each in (self._pending_handshakes, self._guests) if each]
        wake = min([until, *ends] if self._rests_until is None else [until, self._rests_until, *ends])
        for key, _ in self._selector.select(min(max(0.0, wake - time.monotonic()), LONGEST_WAIT_S)):
            if key.data is None:
                self._accept()
            elif key.data.is_open:  # an earlier event of this turn may have closed the link
                self._receive(key.data)
        now = time.monotonic()
        for link in [link for link in (*self._pending_handshakes, *self._guests) if link.until <= now]:
            self._refuse(link, f"did not join within {_HANDSHAKE_S:g} s")
        if self._rests_until is not None and self._rests_until <= now:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            if len(self._pending_handshakes) >= _MAX_PENDING_HANDSHAKES and not self._make_room():
                return
            try:
                sock, place = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            sock.setblocking(False)
            link = RendezvousLink(sock, _origin(sock, place), _HANDSHAKE_S)
            self._pending_handshakes[link] = None
            self._selector.register(sock, selectors.EVENT_READ, link)
            if not _is_same_user(sock):
                self._refuse(link, f"it runs as another user, but this job runs as uid {os.getuid()}")
            else:
                link.send(frame(encode({"hello": PROTOCOL, "nonce": link.nonce})))

    def _make_room(self) -> bool:
        """Drop the oldest pending handshake.

        If it is too young, stop accepting for a moment and return False.
        """
        oldest = next(iter(self._pending_handshakes), None)
        if oldest is None:
            return False
        self._receive(oldest)  # the handshake's proof may have arrived, but rank 0 has not read it yet
        if oldest not in self._pending_handshakes:
            return True
        if time.monotonic() >= oldest.since + _YOUNG_S:
            self._drop(oldest)
            return True
        self._rest()
        return False

    def _rest(self) -> None:
        """Leave new connections in the kernel's queue for a moment."""
        self._selector.unregister(self._listener)
        self._rests_until = time.monotonic() + _FULL_PAUSE_S

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return  # the other end closed the connection before it was accepted
        if not self._pending_handshakes and not self._guests:
            self._blame(f"rank 0 cannot hold more connections ({error.strerror}); raise its limit, see ulimit -n")
        elif not self._make_room() and self._rests_until is None:
            self._rest()

    def _receive(self, link: RendezvousLink) -> None:
        try:
            data = link.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(link, "its connection closed")
            return
        try:
            link.reader.feed(data)
            while link.is_open and (payload := link.reader.next_frame()) is not None:
                self._hear(link, payload)
        except FrameError as error:
            if link.rank is None:
                self._refuse(link, f"it does not speak {PROTOCOL!r}: {error}")
            else:
                self._forget(link, f"it broke the protocol: {error}")

    def _hear(self, link: RendezvousLink, payload: bytes) -> None:
        if link.seal is None:
            self._prove(link, decode(payload))
        elif link in self._guests:
            self._join(link, link.seal.open(payload))
        else:
            self._note(link, link.seal.open(payload))

    # -- the three kinds of messages of a connection

    def _prove(self, link: RendezvousLink, message: Message) -> None:
        (nonce, rank), mine = _claimed(message), self._identity
        if not is_proof(message.get("proof"), proof(mine.secret, client_words(message), link.nonce, nonce, rank)):
            self._refuse(link, f"wrong secret (it says it is rank {rank})")
        elif isinstance(offer := offer_for(message, rank, seals=mine.seals, library=mine.seal_library), str):
            self._blame(offer)
            self._refuse(link, offer)
        else:
            answer, link.seal = server_answer(offer, mine.secret, message, (link.nonce, nonce), rank)
            link.send(frame(encode(answer)))
            link.reader.limit_bytes = PEER_INFO_FRAME_BYTES
            link.until = time.monotonic() + _HANDSHAKE_S
            del self._pending_handshakes[link]
            self._guests[link] = None

    def _join(self, link: RendezvousLink, message: Message) -> None:
        rank, size = _field(message, "rank", int), _field(message, "size", int)
        version, job = _field(message, "version", str), _field(message, "job", str)
        origin = f"pid {_field(message, 'pid', int)} on {_field(message, 'host', str)}"
        mine = self._identity
        if job != mine.job:
            self._refuse(link, f"this is job {mine.job!r}, but the process belongs to job {job!r}")
            return
        if self._round > 1:
            self._refuse(link, f"the job is complete; rank {rank} is {self._origins.get(rank, 'not one of it')}")
            return
        del self._guests[link]
        if size != mine.size:
            self._blame(f"rank {rank} ({origin}) was started for {size} ranks, but rank 0 for {mine.size}")
        elif not 0 <= rank < size:
            self._blame(f"a process ({origin}) was started as rank {rank}: want 0 to {size - 1}")
        elif rank in self._origins:
            self._blame(f"two processes are rank {rank}: {self._origins[rank]} and {origin}")
        else:
            link.rank = rank
            self._members[rank] = link
            self._versions[rank] = version
            self._origins[rank] = origin
            if version != self._versions[0]:
                self._blame(_versions_text(self._versions))
        if link.rank is None:
            self._extras.append(link)
        welcome: Message = {"remaining_s": self._deadline - time.monotonic(), "timeout_s": self.limit.timeout_s}
        if not mine.secret:  # without a secret, only ranks of this user on this host are admitted
            welcome["secret"] = self._secret.hex()
        _answer(link, {"welcome": welcome})

    def _note(self, link: RendezvousLink, message: Message) -> None:
        if link.rank is None:
            return  # the link is not a rank's; its messages are ignored
        if "failed" in message:
            self._forget(link, str(message["failed"]), "failed")
        elif link.rank in self._peer_infos or not isinstance(message.get("peer_info"), dict):
            raise FrameError("an unexpected message")
        else:
            self._take_peer_info(link.rank, message["peer_info"])

    def _take_peer_info(self, rank: int, peer_info: Message) -> None:
        self._peer_infos[rank] = encode(peer_info)
        # The failure is reported before all peer infos have arrived; some ranks may be waiting for the failed rank.
        if peer_info.get("error") is not None:
            self._blame(f"rank {rank}: {peer_info['error']}")

    # -- losing a connection

    def _refuse(self, link: RendezvousLink, reason: str) -> None:
        if len(self._refusals) < _NAMED_RANKS:
            self._refusals.append(f"{link.origin}: {reason}")
        if link.seal is not None:
            _answer(link, {"refused": reason})
        else:
            link.send(frame(encode({"refused": reason})))
        self._drop(link)

    def _forget(self, link: RendezvousLink, reason: str, verb: str = "was lost") -> None:
        """Drop a connection that ended. If it belonged to a rank, the job fails."""
        if link.rank is not None:
            del self._members[link.rank]
            self._lost.add(link.rank)
            self._blame(f"rank {link.rank} ({self._origins[link.rank]}) {verb} during init: {reason}")
        self._drop(link)

    def _drop(self, link: RendezvousLink) -> None:
        self._pending_handshakes.pop(link, None)
        self._guests.pop(link, None)
        if link in self._extras:
            self._extras.remove(link)
        self._selector.unregister(link.sock)
        link.sock.close()


def _answer(link: RendezvousLink, message: Message) -> None:
    if link.seal is not None:
        link.send(link.seal.close(encode(message)))


def _listen_soon(address: LocalAddress | TcpAddress) -> socket.socket:
    deadline = time.monotonic() + _ADDRESS_TAKEN_S
    while True:
        try:
            return listen(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"rank 0 cannot listen at {address}: {error.strerror}; "
                    "MULTIRING_RENDEZVOUS sets where rank 0 listens"
                ) from None
            if time.monotonic() >= deadline:
                raise RendezvousError(f"rank 0 cannot listen at {address}: another process does") from None
        time.sleep(0.02)


def _field(message: Message, name: str, kind: type) -> Any:
    value = message.get(name)
    if type(value) is not kind:
        raise FrameError(f"the message lacks {name}: it has {shown(sorted(message))}")
    return value


def _claimed(message: Message) -> tuple[str, int]:
    nonce, rank = _field(message, "nonce", str), _field(message, "rank", int)
    if not is_nonce(nonce) or not 0 <= rank < MOST_RANKS:
        raise FrameError("its proof lacks a valid nonce or rank")
    return nonce, rank


def _origin(sock: socket.socket, place: object) -> str:
    if sock.family == socket.AF_UNIX:
        peer = peer_credentials(sock)
        return f"pid {peer.pid} of uid {peer.uid}"
    return f"{place[0]}:{place[1]}" if isinstance(place, tuple) else str(place)


def _is_same_user(sock: socket.socket) -> bool:
    return sock.family != socket.AF_UNIX or peer_credentials(sock).uid == os.getuid()


def _ranks_text(ranks: list[int]) -> str:
    """Return "rank 3", or "ranks 1, 4, 5 and 20 more"."""
    named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _versions_text(versions: dict[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, version in sorted(versions.items()):
        ranks_of.setdefault(version, []).append(rank)
    found = "; ".join(f"{version} on {_ranks_text(ranks)}" for version, ranks in ranks_of.items())
    return f"ranks run different multiring versions: {found}; install one version everywhere"
