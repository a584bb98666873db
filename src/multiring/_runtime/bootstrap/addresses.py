"""Rendezvous addresses, rank 0's listening socket, and this host's identity."""

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from multiring.errors import ArgumentError, LaunchError

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface
_IFNAME_BYTES = 16
# An address of TEST-NET-1 (RFC 5737). No packet is sent to it; the kernel only looks up the route.
_SOMEWHERE_ELSE = ("192.0.2.1", 9)
_ABSTRACT_NAME_BYTES = 107  # the size of sockaddr_un.sun_path without its leading NUL
_BACKLOG = 4096  # the kernel reduces this number to net.core.somaxconn
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """An abstract Unix socket.

    The socket is visible in its network namespace only. The kernel removes the socket when its owner ends.
    """

    name: str

    def __str__(self) -> str:
        return f"@{self.name}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (a name or an address, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> LocalAddress | TcpAddress:
    """Parse an address of the form `@name` or `host:port`.

    Raises:
        ArgumentError: `text` has neither form.
    """
    if text.startswith("@"):
        if not 1 <= len(os.fsencode(text[1:])) <= _ABSTRACT_NAME_BYTES:
            raise ArgumentError(f"rendezvous {text!r}: want 1 to {_ABSTRACT_NAME_BYTES} bytes after the @")
        return LocalAddress(text[1:])
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ArgumentError(f"rendezvous {text!r}: want host:port (port 1 to 65535) or @name")
    return TcpAddress(host, int(port))


def listen(address: LocalAddress | TcpAddress) -> socket.socket:
    """Return a non-blocking socket that listens at `address` only.

    Raises:
        OSError: the address is in use, or is not an address of this host.
    """
    if isinstance(address, LocalAddress):
        return _bound(socket.AF_UNIX, b"\0" + os.fsencode(address.name))
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    # Debian's /etc/hosts maps a host's own name to 127.0.1.1, which other hosts cannot reach.
    found.sort(key=lambda entry: ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback)
    refusal: OSError | None = None
    for family, _, _, _, place in found:
        try:
            return _bound(socket.AddressFamily(family), place)
        except OSError as error:
            refusal = refusal or error
    raise refusal or OSError(f"{address.host} has no address")


def _bound(family: socket.AddressFamily, place: bytes | tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class PeerCredentials(NamedTuple):
    """The process at the other end of a Unix socket, as reported by the kernel."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return the credentials that the other end had at its connect or listen."""
    return PeerCredentials._make(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def own_address(interface: str | None) -> str:
    """Return an IPv4 address at which other hosts reach this host.

    Args:
        interface: an interface's name or an address, as the user set it. None uses the address of this host's name,
            or else the source address of the default route.

    Raises:
        LaunchError: there is no such address or interface.
    """
    if interface is not None:
        return interface if _is_address(interface) else _address_of_interface(interface, "MULTIRING_INTERFACE")
    for find in (_address_by_name, _address_by_route):
        try:
            address = find()
        except OSError:
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise LaunchError(
        f"this host's name, {socket.gethostname()}, resolves to no address that other hosts can reach; set "
        "MULTIRING_INTERFACE to an interface or an address of this host"
    )


def address_of_rail(interface: str, source: str) -> str:
    """Return the address of an interface of this host.

    Args:
        interface: the interface's name or address.
        source: the setting or file that named the interface, for the error.

    Raises:
        LaunchError: this host has no such interface, or the interface has no IPv4 address.
    """
    if not _is_address(interface):
        return _address_of_interface(interface, source)
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((interface, 0))
        except OSError as error:
            raise LaunchError(f"{source}={interface!r}: {error.strerror}; interfaces here: {_interfaces()}") from None
    return interface


def _interfaces() -> str:
    return ", ".join(known for _, known in socket.if_nameindex())


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address_of_interface(name: str, setting: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(name)[: _IFNAME_BYTES - 1])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise LaunchError(f"{setting}={name!r}: {error.strerror}; interfaces here: {_interfaces()}") from None
    return socket.inet_ntoa(answer[20:24])


def _address_by_name() -> str:
    return socket.gethostbyname(socket.gethostname())


def _address_by_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE_ELSE)
        return str(probe.getsockname()[0])


def boot_id() -> str:
    """Return the id of the machine's current boot.

    The id is equal in two processes exactly if they share the boot.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def network_id() -> str:
    """Return an id of this process's boot and network namespace.

    The id is equal in two processes exactly if they share both. Between such processes, an address means the same
    interface.
    """
    return f"{boot_id()} {Path('/proc/self/ns/net').stat().st_ino}"


def host_id() -> str:
    """Return an id of this process's boot, host name and network namespace.

    The id is equal in two processes exactly if they share all three. A virtual host, with its own namespaces on a
    shared machine, counts as a separate host.
    """
    return f"{os.uname().nodename} {network_id()}"
