"""Rendezvous: the ranks of a job find each other during `init`.

The rendezvous is closed when `init` returns. Every rank sends its peer info (a small JSON object) and gets the peer
infos of all ranks, in rank order. Rank 0 listens at an abstract Unix socket on one host, or at host:port. The other
ranks retry until they reach it.
"""

import secrets
from typing import final

from multiring._runtime.bootstrap.addresses import parse_address
from multiring._runtime.bootstrap.handshake import SECRET_BYTES, Message, decode, encode
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous_client import Client
from multiring._runtime.bootstrap.rendezvous_link import TimeLimit
from multiring._runtime.bootstrap.rendezvous_server import Server
from multiring._version import VERSION
from multiring.errors import RendezvousError


class _Alone:
    """The rendezvous of a job of one rank."""

    def __init__(self, limit: TimeLimit) -> None:
        self.limit = limit

    def secret(self) -> bytes:
        return secrets.token_bytes(SECRET_BYTES)

    def exchange(self, peer_info: Message) -> list[Message]:
        return [decode(encode(peer_info))]

    def disturbed(self) -> bool:
        return False

    def fail(self, text: str) -> None:
        """Do nothing: there is no other rank."""

    def close(self) -> None:
        """Do nothing: there is no connection."""


@final
class Rendezvous:
    """One rank's end of the rendezvous, a context manager.

    Every rank of the job must enter it. If a rank leaves the block by an exception, the other ranks' `exchange` raises
    its text. Rank 0 listens from construction on. The connections are made in the first `exchange`.

    Args:
        identity: this rank, and the address of the rendezvous.
        timeout_s: the time-out of all exchanges together, in seconds. Rank 0's value is used for all ranks; another
            rank uses its own value only while it tries to reach rank 0. Ranks that have met in the first exchange have
            ten seconds for the later ones even if less is left, or `timeout_s` if that is shorter.
        version: the version of multiring, which must be the same on all ranks.
        began: the time, by time.monotonic(), from which the time-out counts. Default: now.

    Raises:
        RendezvousError: rank 0 cannot listen at `identity.rendezvous`.
        ArgumentError: `identity.rendezvous` is not a valid address.
    """

    def __init__(
        self, identity: Identity, *, timeout_s: float, version: str = VERSION, began: float | None = None
    ) -> None:
        limit = TimeLimit(timeout_s, began)
        self._end: _Alone | Server | Client
        if identity.size == 1:
            self._end = _Alone(limit)
            return
        address = parse_address(identity.rendezvous)
        end = Server if identity.rank == 0 else Client
        self._end = end(identity, address, version, limit)

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None and not isinstance(error, RendezvousError):
                self._end.fail(f"{type(error).__name__}: {error}")
        finally:
            self.close()

    def exchange(self, peer_info: Message) -> list[Message]:
        """Send this rank's peer info and return those of all ranks, in rank order.

        The call blocks until every rank has called it; Ctrl-C interrupts it. The call costs one message to rank 0 and
        one message back. All ranks may call it several times.

        Args:
            peer_info: a JSON object below 1 MiB. All ranks get it after a round trip through JSON.

        Raises:
            RendezvousError: a rank is missing at the time-out, was lost, failed, has another secret, version or size,
                or is there twice. Every reachable rank raises the same text.
        """
        return self._end.exchange(peer_info)

    def secret(self) -> bytes:
        """Return the job's secret, the same on all ranks and never empty.

        If the launcher gave no secret, which is allowed with an abstract Unix socket, rank 0 draws a secret and sends
        it to the other ranks. Another rank then waits until it has reached rank 0, and raises the same errors as
        `exchange`.
        """
        return self._end.secret()

    def disturbed(self) -> bool:
        """Return, without blocking, whether another rank is known to have failed.

        The next `exchange` or `agree` then raises the reason. The method is for a rank that is busy between exchanges.
        """
        return self._end.disturbed()

    @property
    def left_s(self) -> float:
        """The seconds that are left for a step between exchanges, after the first exchange."""
        return self._end.limit.left_s

    def agree(self, error: str | None) -> None:
        """Wait until every rank has reported success of a step, which takes at most `left_s` seconds.

        Args:
            error: the text of this rank's failure; None if it succeeded.

        Raises:
            RendezvousError: a rank failed; all ranks raise the same text, with every failed rank.
        """
        errors = [peer_info["error"] for peer_info in self._end.exchange({"error": error})]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
        if failed:
            raise RendezvousError("; ".join(failed))

    def close(self) -> None:
        """Close the connections and release the address. It may be called twice."""
        self._end.close()


def meet(identity: Identity, peer_info: Message, *, timeout_s: float, version: str = VERSION) -> list[Message]:
    """Return every rank's peer info after a rendezvous of a single exchange.

    See `Rendezvous`.
    """
    with Rendezvous(identity, timeout_s=timeout_s, version=version) as rendezvous:
        return rendezvous.exchange(peer_info)
