"""Which name a request asks for, and which names and addresses are this machine's loopback."""

import ipaddress
import re

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{0,5})?", re.IGNORECASE | re.ASCII)


def name_in(host: str) -> str:
    """Return the name or the address in the header Host, in small letters and without the port.

    Returns:
        "" if the header is malformed. Starlette's `request.url` would put the server's own address there, and so a
        request for any name could pass for one of this machine.
    """
    found = _HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can reach a name or an address.

    Names that end with .localhost are not counted: a resolver may give them any address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
