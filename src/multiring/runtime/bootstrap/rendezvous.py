"""How the ranks of a job find each other; it serves `init` and is gone when `init` returns.

Every rank submits its peer info (a small JSON object) and gets everyone's, in rank order. Rank 0 listens, at an
abstract Unix socket on one host or at host:port; the others come and go on trying until it is there.
"""

import secrets
from types import TracebackType
from typing import final

from multiring.errors import RendezvousError
from multiring.runtime.bootstrap.addresses import parse_address
from multiring.runtime.bootstrap.handshake import SECRET_BYTES, Message, decode, encode
from multiring.runtime.bootstrap.launchers import Identity
from multiring.runtime.bootstrap.rendezvous_client import Client
from multiring.runtime.bootstrap.rendezvous_server import Server
from multiring.version import VERSION


class _Alone:
    """The rendezvous of a job of one rank."""

    def secret(self) -> bytes:
        return secrets.token_bytes(SECRET_BYTES)

    def exchange(self, peer_info: Message, _began: float | None = None) -> list[Message]:
        return [decode(encode(peer_info))]

    def disturbed(self) -> bool:
        return False

    def fail(self, text: str) -> None:
        """Nobody is there to be told."""

    def close(self) -> None:
        """Nothing is open."""


@final
class Rendezvous:
    """One rank's end of the meeting: a context manager, to be entered by every rank of the job.

    A rank that leaves the block by an exception tells the others, whose `exchange` then raises its text.
    Rank 0 listens from construction on; the connections are made in the first `exchange`.

    Args:
        timeout_s: rank 0's governs: how long the first exchange waits from construction on, and each later
            one from its call on. Another rank uses its own only while it looks for rank 0.
        version: what all ranks must agree on.

    Raises:
        RendezvousError: rank 0 cannot listen at `identity.rendezvous`.
        ArgumentError: `identity.rendezvous` is no address.
    """

    def __init__(self, identity: Identity, *, timeout_s: float, version: str = VERSION) -> None:
        self._end: _Alone | Server | Client
        if identity.size == 1:
            self._end = _Alone()
            return
        address = parse_address(identity.rendezvous)
        end = Server if identity.rank == 0 else Client
        self._end = end(identity, address, version, timeout_s)

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not isinstance(error, RendezvousError):
                self._end.fail(f"{type(error).__name__}: {error}")
        finally:
            self.close()

    def exchange(self, peer_info: Message) -> list[Message]:
        """Return every rank's peer info, in rank order; may be called again, by all ranks.

        Blocks until every rank has called it. Costs one message to rank 0 and one back. Ctrl-C works.

        Args:
            peer_info: a JSON object below 1 MiB; what comes back went through JSON on every rank alike.

        Raises:
            RendezvousError: a rank is missing at the time-out, was lost, failed, has another secret, version
                or size, or came twice. Every rank that can be reached raises the same words.
        """
        return self._end.exchange(peer_info)

    def secret(self) -> bytes:
        """Return the job's secret, the same on all its ranks and never empty.

        Where the launcher gave none, which it may where ranks meet at an abstract Unix socket, rank 0 draws one and
        hands it over there. Another rank waits until rank 0 is found, and raises what `exchange` does.
        """
        return self._end.secret()

    def disturbed(self) -> bool:
        """Return whether the job is known to have failed elsewhere; the next `exchange` or `agree` then says why.

        Never blocks; for a rank that is busy between two exchanges.
        """
        return self._end.disturbed()

    def agree(self, error: str | None, began: float) -> None:
        """Return when every rank is fine.

        Args:
            error: what went wrong on this rank; None where nothing did.
            began: by time.monotonic(), when this rank began what it is to be agreed on. Where that went wrong, rank 0
                has used up its own time for it, too, if it still is there.

        Raises:
            RendezvousError: something went wrong on some rank; the same words on all, the first one named.
        """
        errors = [
            peer_info["error"] for peer_info in self._end.exchange({"error": error}, None if error is None else began)
        ]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
        if failed:
            raise RendezvousError("; ".join(failed))

    def close(self) -> None:
        """Give up the connections and the address; may be called twice."""
        self._end.close()


def meet(identity: Identity, peer_info: Message, *, timeout_s: float, version: str = VERSION) -> list[Message]:
    """Return every rank's peer info: one exchange, then close; see `Rendezvous`."""
    with Rendezvous(identity, timeout_s=timeout_s, version=version) as rendezvous:
        return rendezvous.exchange(peer_info)
