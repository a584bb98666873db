"""What ranks tell the launcher on this machine that started the job."""

import socket
from contextlib import suppress

from multiring.settings import RANK_JOINS, RANK_LOST, JobNews, roll_address

_PATIENCE_S = 0.5  # the launcher reads at once, and the kernel keeps ten messages


class LauncherNews:
    """Tells the launcher each thing once; where there is none, nobody hears it."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        """Tell as `rank`, of ranks that meet at `rendezvous`."""
        self._rank = rank
        self._address = roll_address(rendezvous) if rendezvous.startswith("@") else None
        self._told: set[bytes] = set()

    def tell(self, news: JobNews) -> None:
        """Tell `news` of the whole job, which rank 0 does."""
        if self._rank == 0:
            self._tell(news.value)

    def tell_joining(self) -> None:
        """Tell that this process is the rank: the launcher knows its parent, which may be a shell."""
        self._tell(RANK_JOINS % self._rank)

    def tell_lost(self, rank: int) -> None:
        """Tell that this rank has lost another: what it fails with afterwards is no cause; -1 stands for any."""
        self._tell(RANK_LOST % (self._rank, rank))

    def _tell(self, words: bytes) -> None:
        if self._address is None or words in self._told:
            return
        self._told.add(words)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller, suppress(OSError):
            teller.settimeout(_PATIENCE_S)
            teller.sendto(words, self._address)
