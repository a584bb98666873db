"""Which names and addresses are this machine's loopback."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
