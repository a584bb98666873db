"""Messages from ranks to the process of the launcher that started them on this machine."""

import socket
from contextlib import suppress

from multiring._settings import RANK_JOINS, RANK_LOST, RANK_STEPS, JobNews, roll_address

_PATIENCE_S = 0.5  # the launcher reads at once, and the kernel buffers ten messages


class LauncherNews:
    """Sends each message to the launcher once.

    Without a launcher the messages are lost.
    """

    def __init__(self, rank: int, reports: str | None) -> None:
        """Create the sender of `rank`; `reports` is the value of MULTIRING_REPORTS, or None without a launcher."""
        self._rank = rank
        self._address = None if reports is None else roll_address(reports)
        self._told: set[bytes] = set()

    def tell(self, news: JobNews) -> None:
        """Send `news` about the whole job. Only rank 0 sends it."""
        if self._rank == 0:
            self._tell(news.value)

    def tell_joining(self) -> None:
        """Report to the launcher that this process is the rank.

        The process that the launcher started may be a shell.
        """
        self._tell(RANK_JOINS % self._rank)

    def tell_lost(self, rank: int) -> None:
        """Report to the launcher that this rank has lost `rank`; -1 stands for an unknown rank.

        The launcher then does not report later failures of this rank as the cause.
        """
        self._tell(RANK_LOST % (self._rank, rank))

    def report_steps(self, report: bytes) -> None:
        """Send a report on this rank's steps, or drop it if the launcher cannot take it at once."""
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as teller, suppress(OSError):
            teller.sendto(RANK_STEPS + report, self._address)

    def _tell(self, words: bytes) -> None:
        if self._address is None or words in self._told:
            return
        self._told.add(words)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller, suppress(OSError):
            teller.settimeout(_PATIENCE_S)
            teller.sendto(words, self._address)
