"""Where the ranks of a job meet, and their secret: as the settings say, or chosen by rank 0 and told to the others."""

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multiring._exchanges import PlaceExchange, fetch, publish
from multiring._runtime.bootstrap.addresses import LocalAddress, TcpAddress, listen, own_address, parse_address
from multiring._runtime.bootstrap.handshake import SECRET_BYTES
from multiring._runtime.bootstrap.identity import Identity, naming, sealing_as
from multiring._runtime.bootstrap.rendezvous_client import Client
from multiring._runtime.bootstrap.rendezvous_link import TimeLimit
from multiring._runtime.bootstrap.waiting_lines import WaitingLines
from multiring._settings import Settings
from multiring._version import VERSION
from multiring.errors import ArgumentError, LaunchError, MultiringError

_ADVICE = (
    "set MULTIRING_RENDEZVOUS=host:port (rank 0's host and a free port there) and "
    "MULTIRING_SECRET or MULTIRING_SECRET_FILE, the same on all ranks"
)
_BY_HAND = f"To meet in none of these ways, {_ADVICE}; if they are set on some ranks only, set them on all"
_GREETING_S = 15.0  # how long a rank waits for rank 0's greeting; rank 0 publishes before it greets
_LAST_WORDS_S = 3.0  # how long a rank 0 that cannot listen says so to the others


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Rank 0's address for the rendezvous.

    `told` is the message to the other ranks; it contains "error" if rank 0 cannot listen.
    """

    told: dict[str, str]
    listener: socket.socket | None = None


def choose_rendezvous_point(settings: Settings, source: str, *, is_one_host: bool) -> RendezvousPoint:
    """Choose rank 0's address and start to listen there.

    An error is returned, not raised, because the other ranks wait for the result in a broadcast.

    Args:
        settings: the address, secret and job name are taken from the settings if set; otherwise new ones are made.
        source: the launcher's name; part of a new job name.
        is_one_host: whether all ranks are on this host.
    """
    token = secrets.token_hex(8)
    job = settings.job or f"{source}-{token}"
    listener = None
    try:
        secret = secret_of(settings) or secrets.token_bytes(SECRET_BYTES)
        if settings.rendezvous is not None:
            with naming("MULTIRING_RENDEZVOUS"):
                address: LocalAddress | TcpAddress = parse_address(settings.rendezvous)
        elif is_one_host:
            address = LocalAddress(f"multiring-{token}")
        else:
            host = own_address(settings.interface)
            listener = _listen_in_range(host, settings.ports)
            address = TcpAddress(host, listener.getsockname()[1])
    except (MultiringError, OSError) as error:
        return RendezvousPoint({"error": str(error)})
    return RendezvousPoint({"rendezvous": str(address), "secret": secret.hex(), "job": job}, listener)


def _listen_in_range(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that listens at `host`, on the first free port of `ports`.

    `ports` is a range, both ends included.

    Raises:
        OSError: no port is free, or `host` is not an address of this host.
    """
    first, last = ports or (0, 0)
    refusal: OSError | None = None
    for port in range(first, last + 1):
        try:
            return listen(TcpAddress(host, port))
        except OSError as error:
            refusal = error
    raise OSError(f"no port of {first}-{last} is free at {host}: {refusal}")


def given_rendezvous_point(settings: Settings, source: str, one_host: str | None) -> tuple[str, bytes]:
    """Return the rendezvous address and the secret from the settings, or new ones.

    `one_host` is the job's name if all ranks are on one host.
    """
    secret = secret_of(settings)
    if settings.rendezvous is not None:
        with naming("MULTIRING_RENDEZVOUS"):
            address = parse_address(settings.rendezvous)
        if isinstance(address, TcpAddress) and secret is None:
            raise LaunchError(
                f"MULTIRING_RENDEZVOUS={settings.rendezvous} can be reached by anyone on the network: set "
                "MULTIRING_SECRET or MULTIRING_SECRET_FILE, the same on all ranks"
            )
        return settings.rendezvous, secret or b""
    if one_host is None and source == "MULTIRING_RANK":
        raise ArgumentError("MULTIRING_RENDEZVOUS is not set: ranks with MULTIRING_RANK need an address to meet at")
    if one_host is None:
        raise LaunchError(f"this job was started by {source} and its ranks are on several hosts, so {_ADVICE}")
    # The name is not secret: each end asks the kernel for the other end's user, which must be the same.
    digest = hashlib.sha256(os.fsencode(one_host)).hexdigest()[:32]
    return f"@multiring-{os.getuid()}-{digest}", secret or b""


def secret_of(settings: Settings) -> bytes | None:
    if settings.secret is not None and settings.secret_file is not None:
        raise ArgumentError("both MULTIRING_SECRET and MULTIRING_SECRET_FILE are set; set one")
    if settings.secret_file is not None:
        try:
            secret = Path(settings.secret_file).read_bytes().strip()
        except OSError as error:
            raise ArgumentError(f"MULTIRING_SECRET_FILE={settings.secret_file!r}: {error.strerror}") from None
    elif settings.secret is not None:
        secret = os.fsencode(settings.secret)
    else:
        return None
    if not secret:
        raise ArgumentError("the job's secret is empty; want a text that nobody can guess")
    return secret


def meet_by_exchange(settings: Settings, numbers: Identity, ways: Sequence[PlaceExchange]) -> Identity:
    """Return `numbers` with the place, secret and job that rank 0 chooses and tells to the other ranks.

    If the settings give a secret, it is used, and not told. The settings give no address.

    Args:
        settings: this process's settings.
        numbers: the rank's numbers; its job and address do not matter.
        ways: the ways of telling, the best one first.

    Raises:
        LaunchError: rank 0 cannot listen, or no way works. Then the text names each way and what has failed in it.
    """
    if numbers.rank == 0:
        return _choose_and_publish(settings, numbers, ways)
    own_secret = secret_of(settings)

    def fault_of(text: str) -> str:
        told = json.loads(text)
        if "error" in told:
            return ""
        # A secret that only one of the two ranks was given is no sign of a former program: that is refused below. So
        # rank 0 is asked with the secret that it tells, if it tells one.
        secret = bytes.fromhex(told["secret"]) or own_secret
        place = replace(numbers, rendezvous=told["rendezvous"], secret=secret or b"", job=told["job"])
        place = sealing_as(settings, place)
        client = Client(place, parse_address(place.rendezvous), VERSION, TimeLimit(_GREETING_S))
        return client.fault_of_place(knows_secret=secret is not None)

    told = json.loads(fetch(ways, settings.init_timeout_s, _BY_HAND, WaitingLines().say, fault_of))
    _refuse_error(told)
    if bool(told["secret"]) == (own_secret is not None):
        here, there = ("this rank has", "rank 0 has none") if own_secret else ("this rank has none", "rank 0 has one")
        raise LaunchError(
            f"MULTIRING_SECRET or MULTIRING_SECRET_FILE: {here}, but {there}; set it on all ranks, or on none"
        )
    secret = own_secret or bytes.fromhex(told["secret"])
    return replace(numbers, rendezvous=told["rendezvous"], secret=secret, job=told["job"])


def _choose_and_publish(settings: Settings, numbers: Identity, ways: Sequence[PlaceExchange]) -> Identity:
    has_secret = settings.secret is not None or settings.secret_file is not None
    point = choose_rendezvous_point(settings, numbers.source, is_one_host=False)
    told = {**point.told, "secret": ""} if has_secret else point.told
    try:
        publication = publish(ways, json.dumps(told), _BY_HAND)
    except BaseException:
        if point.listener is not None:
            point.listener.close()
        raise
    if "error" in told:
        time.sleep(_LAST_WORDS_S)
        publication.close()
        _refuse_error(told)
    return replace(
        numbers,
        rendezvous=told["rendezvous"],
        secret=bytes.fromhex(point.told["secret"]),
        job=told["job"],
        listener=point.listener,
        publication=publication,
    )


def _refuse_error(told: dict[str, str]) -> None:
    if "error" in told:
        raise LaunchError(f"rank 0 cannot listen: {told['error']}")
