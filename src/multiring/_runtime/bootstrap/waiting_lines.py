"""Warnings while `init` waits.

Every ten seconds a line names the missing ranks and the attempts so far.
"""

import logging
import socket
import time
from collections.abc import Callable

from multiring._runtime.bootstrap.addresses import LocalAddress, TcpAddress
from multiring._runtime.bootstrap.identity import Identity

_EVERY_S = 10.0
_log = logging.getLogger("multiring")
_LEFT_OVER = (
    "if another launcher, or the shell that it started, left these variables in the environment, unset them; otherwise "
    "start all ranks"
)
FIREWALL = (
    "a firewall may close this port: MULTIRING_PORTS=20000-20100 keeps ranks to a range of ports, which the hosts must "
    "open for each other"
)


class WaitingLines:
    """Logs a line every ten seconds, counted from its creation."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.next_at = self._began + _EVERY_S

    def say(self, tell: Callable[[], str]) -> None:
        """Log the text that `tell` returns, if a line is due."""
        now = time.monotonic()
        if now >= self.next_at:
            self.next_at = now + _EVERY_S
            _log.warning("init has waited for %.0f s: %s", now - self._began, tell())


def led_to(address: LocalAddress | TcpAddress) -> str:
    """Return the addresses of the host's name here, and the variables to change them.

    For a local address, return "".
    """
    if isinstance(address, LocalAddress):
        return ""
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        found = [f"no address: {error.strerror}"]
    return (
        f"; {address.host} resolves to {', '.join(found)} here: MULTIRING_RENDEZVOUS sets where rank 0 listens, and "
        "MULTIRING_INTERFACE sets the interface that carries bytes"
    )


def closed_port(address: LocalAddress | TcpAddress) -> str:
    """Return why ranks that run may not arrive at the address, with advice. For a local address, return ""."""
    return "" if isinstance(address, LocalAddress) else f"; if they have started, {FIREWALL}"


def who_says_so(identity: Identity) -> str:
    """Return the variables that made this process its rank, with advice.

    The advice is for variables that are not meant for this process.
    """
    if not identity.told:
        return ""
    hint = "" if identity.source == "multiring" else f"; {_LEFT_OVER}"
    return f"; this process is rank {identity.rank} of {identity.size} according to {identity.told}{hint}"
