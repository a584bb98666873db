"""Which names and addresses are this machine's loopback."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can reach a name or an address.

    Names that end with .localhost are not counted: a resolver may give them any address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
