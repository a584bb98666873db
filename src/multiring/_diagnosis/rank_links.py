"""The ranks' connections to rank 0 during a check. Rank 0 asks, and never waits longer than it says.

The rendezvous of `init` is not used: it refuses other versions of multiring, and it ends with the first fault.
"""

import contextlib
import os
import selectors
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from multiring._diagnosis.checker import HostChecker
from multiring._diagnosis.relay import Relay
from multiring._launch.control_link import ControlLink
from multiring._launch.control_tcp import ControlListener, connect
from multiring._runtime.bootstrap.addresses import TcpAddress, host_id, parse_address
from multiring._runtime.bootstrap.handshake import Message
from multiring._runtime.bootstrap.identity import Identity
from multiring.errors import LaunchError

_PAUSE_S = 0.05
_DIRECT_S, _RELAYED_S = 4.0, 3.0
_GOODBYE_S = 1.0
_QUIET_S = 90.0  # longer than a check; a rank 0 that says nothing for this long is gone


@dataclass(frozen=True, slots=True)
class ArrivedRank:
    """A rank that has come: its host, the CPUs that it may use, and the number of ranks that its host is to have.

    `planned` is None if the host is to have as many ranks as come.
    """

    rank: int
    host: str
    cpus: frozenset[int]
    planned: int | None = None


def arrival_here(rank: int, planned: int | None) -> ArrivedRank:
    """Return this rank's arrival."""
    return ArrivedRank(rank, host_id(), frozenset(os.sched_getaffinity(0)), planned)


class RankLinks:
    """Rank 0's end.

    Args:
        identity: rank 0's identity. With one rank, nothing listens.
        checker: the checker of rank 0's own host.
        planned: the number of ranks that rank 0's host is to have, None: as many as come.

    Raises:
        LaunchError: rank 0 cannot listen.
    """

    def __init__(self, identity: Identity, checker: HostChecker, planned: int | None = None) -> None:
        self._checker = checker
        self._planned = planned
        self._links: dict[int, ControlLink] = {}
        self._size = identity.size
        self._asked = 0
        self._own = ThreadPoolExecutor(1)
        self._listener: ControlListener | None = None
        if identity.size > 1:
            address = parse_address(identity.rendezvous)
            if not isinstance(address, TcpAddress):
                raise LaunchError(f"{identity.rendezvous}: ranks of one host do not meet for a check")
            if identity.listener is not None:
                identity.listener.close()
            self._listener = ControlListener(address, identity.secret, key=bytes)

    def arrive(self, within_s: float) -> list[ArrivedRank]:
        """Wait until all ranks have come, or the time has passed; return those that came, in the order of the ranks."""
        until = time.monotonic() + within_s
        found = {0: arrival_here(0, self._planned)}
        while len(found) < self._size and (left_s := until - time.monotonic()) > 0:
            for rank, message in self._hear(left_s):
                with contextlib.suppress(KeyError, TypeError):
                    found[rank] = ArrivedRank(
                        rank, str(message["host"]), frozenset(message["cpus"]), message["planned"]
                    )
        return [found[rank] for rank in sorted(found)]

    def ask(self, questions: Mapping[int, Message], within_s: float) -> dict[int, Any]:
        """Ask ranks at once, and return the answers by rank. A rank that does not answer in time is missing."""
        self._asked += 1
        until = time.monotonic() + within_s
        answers: dict[int, Any] = {}
        own: Future[Any] | None = None
        for rank, question in questions.items():
            if rank == 0:
                own = self._own.submit(self._checker.answer, question)
            elif rank in self._links:
                self._links[rank].send(asked=self._asked, **question)
        awaited = {rank for rank in questions if rank in self._links}
        while (left_s := until - time.monotonic()) > 0:
            if own is not None and own.done():
                answers[0], own = own.result(), None
            awaited = {rank for rank in awaited if self._links[rank].is_open}
            if own is None and not awaited:
                break
            for rank, message in self._hear(left_s if own is None else min(left_s, _PAUSE_S)):
                if message.get("answers") == self._asked:
                    answers[rank] = message["value"]
                    awaited.discard(rank)
        return answers

    def _hear(self, within_s: float) -> list[tuple[int, Message]]:
        """Return messages that have come; wait for some of them, but not longer than `within_s`."""
        with selectors.PollSelector() as poll:
            if self._listener is not None:
                self._listener.watch(poll)
            for link in self._links.values():
                link.watch(poll)
            for key, _ in poll.select(max(0.0, min(within_s, 1.0))):
                key.data()
        self._admit()
        heard = []
        for rank, link in self._links.items():
            while (message := link.next_message()) is not None:
                if isinstance(message, dict):
                    heard.append((rank, message))
        return heard

    def _admit(self) -> None:
        for rank, link in self._listener.take() if self._listener is not None else ():
            if not 0 < rank < self._size:
                link.close()
                continue
            # A rank of srun or torchrun connects once to look whether rank 0 listens, and then again.
            if rank in self._links:
                self._links[rank].close()
            self._links[rank] = link

    def dismiss(self, ranks: set[int]) -> None:
        """Tell ranks that they are not needed any more."""
        for rank in ranks & self._links.keys():
            link = self._links.pop(rank)
            link.send(bye=1)
            link.flush(time.monotonic() + _GOODBYE_S)
            link.close()

    def close(self) -> None:
        """Dismiss all ranks and stop listening."""
        self.dismiss(set(self._links))
        if self._listener is not None:
            self._listener.close()
        self._own.shutdown(wait=False, cancel_futures=True)
        self._checker.close()


def attend(
    identity: Identity, checker: HostChecker, peers: tuple[str, ...], patience_s: float, planned: int | None = None
) -> None:
    """Answer rank 0's questions on another rank, until rank 0 dismisses it or its connection ends.

    If rank 0 cannot be reached, the rank tries to reach it through the hosts of `peers`, on the same port.

    Args:
        identity: this rank's identity.
        checker: the checker of this host.
        peers: the names of the job's hosts, as far as they are known.
        patience_s: how long to try to reach rank 0.
        planned: the number of ranks that this host is to have, None: as many as come.

    Raises:
        LaunchError: rank 0 was not reached.
    """
    address = parse_address(identity.rendezvous)
    if not isinstance(address, TcpAddress):
        return  # all ranks are on one host, which rank 0 checks alone
    with contextlib.ExitStack() as stack:
        if peers:
            stack.enter_context(contextlib.closing(Relay(address)))
        link = _found(identity, address, peers, patience_s)
        stack.callback(link.close)
        arrival = arrival_here(identity.rank, planned)
        link.send(host=arrival.host, cpus=sorted(arrival.cpus), planned=arrival.planned)
        stack.callback(checker.close)
        _serve(link, checker)


def _found(identity: Identity, address: TcpAddress, peers: tuple[str, ...], patience_s: float) -> ControlLink:
    """Return a connection to rank 0, perhaps through another host."""
    until = time.monotonic() + patience_s
    own = os.uname().nodename
    relays = [str(TcpAddress(name, address.port)) for name in peers if name not in (own, address.host)]
    failure: LaunchError | None = None
    while (left_s := until - time.monotonic()) > 0:
        for at, each in enumerate([str(address), *relays]):
            try:
                return connect(
                    each, identity.secret, identity.rank, min(left_s, _RELAYED_S if at else _DIRECT_S), bytes
                )
            except LaunchError as error:
                failure = failure or error
    raise failure or LaunchError(f"rank 0 was not reached at {address} within {patience_s:g} s")


def _serve(link: ControlLink, checker: HostChecker) -> None:
    while link.is_open and not link.is_quiet(_QUIET_S):
        with selectors.PollSelector() as poll:
            link.watch(poll)
            for key, _ in poll.select(1.0):
                key.data()
        while (message := link.next_message()) is not None:
            if not isinstance(message, dict) or "bye" in message:
                return
            link.send(answers=message["asked"], value=checker.answer(message))
            link.write_some()
