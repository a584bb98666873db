"""Where ranks meet: rendezvous addresses, the socket rank 0 listens on, and who this host is."""

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
# An address of TEST-NET-1 (RFC 5737): no packet is sent, the kernel only looks up the route.
_SOMEWHERE_ELSE = ("192.0.2.1", 9)
_ABSTRACT_NAME_BYTES = 107  # sockaddr_un.sun_path less its leading NUL
_BACKLOG = 4096  # as far as net.core.somaxconn allows
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """An abstract Unix socket: seen by its network namespace only, and gone with its owner."""

    name: str

    def __str__(self) -> str:
        return f"@{self.name}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (name or literal, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> LocalAddress | TcpAddress:
    """Return the address that `text`, `@name` or `host:port`, stands for.

    Raises:
        ArgumentError: it is neither.
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
    """Return a non-blocking socket that listens at `address` and nowhere else.

    Raises:
        OSError: the address is taken, or not one of this host.
    """
    if isinstance(address, LocalAddress):
        return _bound(socket.AF_UNIX, b"\0" + os.fsencode(address.name))
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    # Debian's /etc/hosts maps a host's own name to 127.0.1.1, where no other host could reach us.
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
    """Who is at the other end of a Unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return the credentials the other end had when it connected, or began to listen."""
    return PeerCredentials._make(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def own_address(interface: str | None) -> str:
    """Return an IPv4 address by which other hosts reach this one.

    Args:
        interface: an interface's name or an address, as the user set it; without it, what this host's name
            stands for, else the address its default route starts from.

    Raises:
        LaunchError: there is none, or no such interface.
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
    raise LaunchError("this host's name leads to no address other hosts can reach; set MULTIRING_INTERFACE")


def address_of_rail(interface: str, source: str) -> str:
    """Return the address of this host's `interface`, a name or an address; `source` is what named it, for the error.

    Raises:
        LaunchError: it is none of this host's, or has no IPv4 address.
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
    """Return what is equal for two processes exactly when they run on one machine, since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def network_id() -> str:
    """Return what is equal for two processes whose addresses mean the same: of one boot and network namespace."""
    return f"{boot_id()} {Path('/proc/self/ns/net').stat().st_ino}"


def host_id() -> str:
    """Return what is equal for two processes exactly when they share a boot, a host name and a network namespace.

    A virtual host (own namespaces on one machine) counts as a host of its own.
    """
    return f"{os.uname().nodename} {network_id()}"
