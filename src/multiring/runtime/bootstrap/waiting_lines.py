"""What `init` says while it waits: every ten seconds a line of who is missing, and what was tried."""

import logging
import socket
import time
from collections.abc import Callable

from multiring.runtime.bootstrap.addresses import LocalAddress, TcpAddress
from multiring.runtime.bootstrap.launchers import Identity

_EVERY_S = 10.0
_log = logging.getLogger("multiring")
_LEFT_OVER = (
    "if another launcher, or the shell that it started, left these variables in the environment, unset them; else "
    "start all ranks"
)


class WaitingLines:
    """Says a line every ten seconds, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.next_at = self._began + _EVERY_S

    def say(self, tell: Callable[[], str]) -> None:
        """Log what `tell` returns, where a line is due."""
        now = time.monotonic()
        if now >= self.next_at:
            self.next_at = now + _EVERY_S
            _log.warning("init waits since %.0f s: %s", now - self._began, tell())


def led_to(address: LocalAddress | TcpAddress) -> str:
    """Return what a name stands for on this host, and which variables choose another place; "" within one host."""
    if isinstance(address, LocalAddress):
        return ""
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        found = [f"no address: {error.strerror}"]
    return (
        f"; {address.host} stands for {', '.join(found)} here: MULTIRING_RENDEZVOUS says where rank 0 listens, and "
        "MULTIRING_INTERFACE which interface carries bytes"
    )


def who_says_so(identity: Identity) -> str:
    """Return which variables made this process the rank that it is, and what to do if they should not."""
    if not identity.told:
        return ""
    hint = "" if identity.source == "multiring" else f"; {_LEFT_OVER}"
    return f"; this process is rank {identity.rank} of {identity.size} by {identity.told}{hint}"
