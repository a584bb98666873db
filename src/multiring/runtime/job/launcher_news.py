"""What rank 0 tells the launcher on this machine that started the job."""

import socket
from contextlib import suppress

from multiring.settings import JobNews, roll_address


class LauncherNews:
    """Tells the launcher each thing once; where there is none, nobody hears it."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        """Tell as `rank`, of ranks that meet at `rendezvous`."""
        self._address = roll_address(rendezvous) if rank == 0 and rendezvous.startswith("@") else None
        self._told: set[JobNews] = set()

    def tell(self, news: JobNews) -> None:
        """Tell `news`, unless it was told before."""
        if self._address is None or news in self._told:
            return
        self._told.add(news)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as teller, suppress(OSError):
            teller.sendto(news.value, self._address)
